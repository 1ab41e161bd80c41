"""Code that asks a traced tensor for its value, refused with its line."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch._functorch._aot_autograd.functional_utils import from_fun
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from gopt.errors import UnsupportedError

READS = {
    "__bool__": "branches on", "__float__": "takes float() of", "__int__": "takes int() of",
    "__index__": "takes as an index", "tolist": "takes tolist() of",
}  # fmt: skip


@contextlib.contextmanager
def no_reads(reader: str) -> Iterator[None]:
    """Raise UnsupportedError where code reads a value that the graph computes: its answer of one step would hold for
    all. ``reader``: what the code is, for the message."""
    with contextlib.ExitStack() as stack:
        for name, what in READS.items():
            stack.enter_context(mock.patch.object(FunctionalTensor, name, _reader(reader, name, what)))
        yield


def _reader(reader: str, name: str, what: str) -> Any:
    def read(value: FunctionalTensor) -> Any:
        inner: Any = from_fun(value)
        mode = get_proxy_mode()
        slot = None if mode is None else get_proxy_slot(inner, mode.tracer, None)
        constant = inner if slot is None else slot.constant
        if constant is None:
            raise UnsupportedError(
                f"{reader} {what} a value that the graph computes, {user_line()}",
                "its value in the traced step would be used in every step; write it with torch.where",
            )
        with _disable_current_modes(), torch.no_grad():
            return getattr(constant, name)()

    return read


def user_line(above: CodeType | None = None) -> str:
    """Return where user code stands: file, line and its text. ``above``: code that calls it; user code above that is
    not looked at."""
    frame = user_frame(above)
    if frame is None:
        return "in code that cannot be shown" if above is None else "in an operator of PyTorch"
    name = frame.f_code.co_filename
    return f"in {Path(name).name}, line {frame.f_lineno}: {linecache.getline(name, frame.f_lineno).strip()}"


def user_frame(above: CodeType | None = None) -> FrameType | None:
    """Return the innermost frame of user code that called this, below ``above``; None where there is none."""
    return next(user_frames(above), None)


def user_frames(above: CodeType | None = None) -> Iterator[FrameType]:
    """Yield the frames of user code that called this, below ``above``, from the inside out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None and frame.f_code is not above:
        if is_of_user(frame):
            yield frame
        frame = frame.f_back


def is_of_user(frame: FrameType) -> bool:
    """Return whether a frame runs neither torch, but for its optimizers, nor gopt, nor helpers of Python."""
    name = frame.f_code.co_filename
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    of_python = frame.f_globals.get("__name__") in ("contextlib", "functools")
    return not of_python and (not name.startswith(own) or "/torch/optim/" in name.replace("\\", "/"))
