"""``gopt.derive``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from gopt.frontends.derive.options import DeriveOptions
from gopt.options.types import checked

if TYPE_CHECKING:
    from gopt.frontends.derive.derive import Derived


@checked
def derive(
    forward: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: DeriveOptions,
    *,
    force: bool = False,
    advance: Callable[[str], None] = lambda text: None,
) -> Derived:
    """Write the training step of a forward ONNX model: backward, loss and optimizer are added.

    ``options``: a ``DeriveOptions``. Nothing is written unless finite differences confirm the gradients. Raises
    InputError for a damaged model, OptionError for a request without a step, or a missing onnx-ad, UnsupportedError for
    an operator without a derivative or an unconfirmed gradient, RunError for a failed write.

    >>> options = gopt.DeriveOptions(loss="cross-entropy", optimizer="adamw")
    >>> gopt.derive("model.onnx", "step.onnx", options)  # doctest: +SKIP
    """
    from gopt.frontends.derive.derive import derive as written

    return written(forward, output, options, force=force, advance=advance)
