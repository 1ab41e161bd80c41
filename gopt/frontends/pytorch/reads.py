"""Code asking a traced tensor for the value, refused with the line."""

from __future__ import annotations

import contextlib
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch._functorch._aot_autograd.functional_utils import from_fun
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.raising_guards import may_catch, only_raises

READS = {
    "__bool__": "branches on", "__float__": "takes float() of", "__int__": "takes int() of",
    "__index__": "takes as an index", "tolist": "takes tolist() of",
}  # fmt: skip


_assumed: list[dict[str, None]] = []


@contextlib.contextmanager
def assumptions() -> Iterator[dict[str, None]]:
    """Yield a dict filling with the lines of code reading values only to raise an error."""
    _assumed.append({})
    try:
        yield _assumed[-1]
    finally:
        _assumed.pop()


@contextlib.contextmanager
def no_reads(
    reader: str, constants: Sequence[torch.Tensor] = (), decide: Callable[[Any, str], bool] | None = None
) -> Iterator[None]:
    """Raise UnsupportedError for code reading a value of the graph: the answer of a step would hold for all steps.
    Values computed from ``constants``, or from nothing, may be read. Code that only raises an error is an assumption.
    ``reader``: names the code in the message. ``decide``: the side of a branch, by value and line."""
    with contextlib.ExitStack() as stack:
        for name, what in READS.items():
            stack.enter_context(
                mock.patch.object(FunctionalTensor, name, _reader(reader, name, what, constants, decide))
            )
        yield


def _reader(
    reader: str, name: str, what: str, constants: Sequence[torch.Tensor], decide: Callable[[Any, str], bool] | None
) -> Any:
    def read(value: FunctionalTensor) -> Any:
        inner: Any = from_fun(value)
        mode = get_proxy_mode()
        slot = None if mode is None else get_proxy_slot(inner, mode.tracer, None)
        constant = inner if slot is None else slot.constant
        fake = isinstance(inner, FakeTensor)
        if slot is not None and constant is None and not fake and _is_constant(slot.proxy.node, mode, constants):
            constant = inner
        if constant is None and _checks(sys._getframe(1), inner):
            _assumed[-1][user_line()] = None
            constant = inner
        if constant is None and decide is not None and name == "__bool__" and slot is not None:
            return decide(value, user_line())
        if constant is None:
            raise UnsupportedError(
                f"{reader} {what} a value that the graph computes, {user_line()}",
                "its value in the traced step would be used in every step; write it with torch.where",
            )
        with _disable_current_modes(), torch.no_grad():
            return getattr(constant, name)()

    return read


def _is_constant(node: torch.fx.Node, mode: Any, constants: Sequence[torch.Tensor]) -> bool:
    """Return whether a node's value is the same in every step: computed from constants, not from other arguments."""
    fixed = {get_proxy_slot(from_fun(constant), mode.tracer).proxy.node for constant in constants}
    reached, stack = {node}, [node]
    while stack:
        one = stack.pop()
        if one.op == "placeholder" and one not in fixed:
            return False
        stack += [node for node in one.all_input_nodes if node not in reached]
        reached.update(one.all_input_nodes)
    return True


def _checks(frame: FrameType, value: Any) -> bool:
    """Return whether ``frame`` asks for a value only to raise an error, not raised for the example."""
    if not _assumed or isinstance(value, FakeTensor) or not only_raises(frame):
        return False
    return not any(map(may_catch, _below_gopt(frame)))


def _below_gopt(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of user code leading to ``frame``, from the inside out, up to gopt's."""
    while frame is not None and not frame.f_code.co_filename.startswith(str(Path(__file__).parent)):
        if is_of_user(frame):
            yield frame
        frame = frame.f_back


def user_line(above: CodeType | None = None) -> str:
    """Return where user code stands: file, line and the text. ``above``: code calling it; user code above is not looked
    at."""
    frame = user_frame(above)
    if frame is None:
        return "in code that cannot be shown" if above is None else "in an operator of PyTorch"
    name = frame.f_code.co_filename
    return f"in {Path(name).name}, line {frame.f_lineno}: {linecache.getline(name, frame.f_lineno).strip()}"


def line_of(error: BaseException) -> str:
    """Return the user code behind an error: ', in FILE, line N: text', or ''."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_of_user(frame)]
    frames = [frame for frame in frames if not frame[0].f_code.co_filename.startswith("<")]  # generated by torch
    if not frames:
        return ""
    frame, line = frames[-1]
    name = frame.f_code.co_filename
    return f", in {Path(name).name}, line {line}: {linecache.getline(name, line).strip()}"


def user_frame(above: CodeType | None = None) -> FrameType | None:
    """Return the innermost calling frame of user code, below ``above``; None without any."""
    return next(user_frames(above), None)


def user_frames(above: CodeType | None = None) -> Iterator[FrameType]:
    """Yield the calling frames of user code, below ``above``, from the inside out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None and frame.f_code is not above:
        if is_of_user(frame):
            yield frame
        frame = frame.f_back


def is_of_user(frame: FrameType) -> bool:
    """Return whether a frame runs neither torch, but for the optimizers, nor gopt, nor helpers of Python."""
    name = frame.f_code.co_filename
    folders = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    of_python = frame.f_globals.get("__name__") in ("contextlib", "functools")
    return not of_python and (not name.startswith(folders) or "/torch/optim/" in name.replace("\\", "/"))
