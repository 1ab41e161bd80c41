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
    """Trace a training step of PyTorch, compare with eager PyTorch, and write an ONNX file.

    ``factory``: ``MODULE:FACTORY``, a function, or a function's result: (module, loss function or None, optimizer or
    several, example batch[, scheduler]). Raises OptionError and InputError for wrong arguments, or without PyTorch,
    UnsupportedError for a step that cannot be exported, RunError for a failed write.

    >>> gopt.export("train.py:make", "step.onnx")  # doctest: +SKIP
    """
    with needs_torch("gopt export"):
        from gopt.frontends.pytorch.export import export as trace
    return trace(factory, output, options=options, force=force, advance=advance)


@contextlib.contextmanager
def needs_torch(what: str) -> Iterator[None]:
    """The context of an import of PyTorch: raises OptionError if missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "onnxscript", "onnx_ir"):
            raise
        raise OptionError(f"{what} needs {error.name}", "pip install 'gopt[torch]'") from None
