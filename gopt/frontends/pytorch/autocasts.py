"""``torch.autocast`` of another device than the one that gopt traces on: it has no effect there, and is refused."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch

from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.reads import user_line

DEVICE = "cpu"
"""The device of every eager step and trace."""
_AUTOCAST = torch.amp.autocast_mode.autocast
_WANTED = "_gopt_wanted"


@contextlib.contextmanager
def recorded_autocasts() -> Iterator[None]:
    """Note on each autocast whether its user enables it: torch disables autocasts of missing devices."""
    start = _AUTOCAST.__init__

    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *rest: Any, **named: Any) -> None:
        vars(self)[_WANTED] = bool(enabled)
        start(self, device_type, dtype, enabled, *rest, **named)

    with mock.patch.object(_AUTOCAST, "__init__", init):
        yield


@contextlib.contextmanager
def no_foreign_autocast() -> Iterator[None]:
    """Raise UnsupportedError for code in the autocast of another device: its forward would be in float32."""
    enters = _AUTOCAST.__enter__

    def enter(self: Any) -> Any:
        if self.device != DEVICE and vars(self).get(_WANTED, True):
            dtype = str(self.fast_dtype).removeprefix("torch.")
            line = _place(sys._getframe(1))
            raise UnsupportedError(
                f"the step runs under torch.autocast({self.device!r}), {line}: it has no effect where gopt traces, "
                f"on the {DEVICE.upper()}, and the step would be in float32",
                f"write torch.autocast(x.device.type, dtype=torch.{dtype}), x being a tensor of the batch",
                f"or leave it out of what is exported, and give --autocast {_option(dtype)}",
            )
        return enters(self)

    with recorded_autocasts(), mock.patch.object(_AUTOCAST, "__enter__", enter):
        yield


def _place(entered: FrameType) -> str:
    """Where code enters an autocast: of a decorator, the function it decorates, which has not begun yet."""
    function = entered.f_locals.get("func") if entered.f_code.co_name == "decorate_autocast" else None
    if function is None:
        return user_line()
    code = inspect.unwrap(function).__code__
    return f"in {Path(code.co_filename).name}, line {code.co_firstlineno}: it decorates {code.co_name}"


def _option(dtype: str) -> str:
    return "bf16" if dtype == "bfloat16" else "fp16"
