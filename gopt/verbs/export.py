"""``gopt.export``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gopt.errors import OptionError
from gopt.frontends.pytorch.options import ExportOptions
from gopt.options.types import checked

if TYPE_CHECKING:
    from gopt.frontends.pytorch.export import Exported


@checked
def export(
    factory: str | Callable[[], Any] | tuple[Any, ...],
    output: str | os.PathLike[str],
    *,
    options: ExportOptions | None = None,
    force: bool = False,
    advance: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Trace a training step of PyTorch, compare it with eager PyTorch, and write it as one ONNX file.

    ``factory``: ``MODULE:FACTORY``, a function, or what one returns: (module, loss function or None, optimizer or
    several, example batch[, scheduler]). Raises OptionError and InputError for what the user gave, or where PyTorch is
    missing, UnsupportedError for a step that cannot be exported, RunError when the file cannot be written.

    >>> gopt.export("train.py:make", "step.onnx")  # doctest: +SKIP
    """
    with needs_torch("gopt export"):
        from gopt.frontends.pytorch.export import export as trace
    return trace(factory, output, options=options, force=force, advance=advance)


@contextlib.contextmanager
def needs_torch(what: str) -> Iterator[None]:
    """The context of an import needing PyTorch: raises OptionError where that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "onnxscript", "onnx_ir"):
            raise
        raise OptionError(f"{what} needs {error.name}", "pip install 'gopt[torch]'") from None
