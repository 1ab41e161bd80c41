"""``torch.autocast`` of another device than the one that gopt traces on: it has no effect there, and is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
    """Note on each autocast whether its user enables it: torch disables those of devices that are not there."""
    made = _AUTOCAST.__init__

    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *rest: Any, **named: Any) -> None:
        vars(self)[_WANTED] = bool(enabled)
        made(self, device_type, dtype, enabled, *rest, **named)

    with mock.patch.object(_AUTOCAST, "__init__", init):
        yield


@contextlib.contextmanager
def no_foreign_autocast() -> Iterator[None]:
    """Raise UnsupportedError where code enters the autocast of another device: its forward would be in float32."""
    enters = _AUTOCAST.__enter__

    def enter(self: Any) -> Any:
        if self.device != DEVICE and vars(self).get(_WANTED, True):
            dtype = str(self.fast_dtype).removeprefix("torch.")
            raise UnsupportedError(
                f"the step runs under torch.autocast({self.device!r}), {user_line()}: it has no effect where gopt "
                f"traces, on the {DEVICE.upper()}, and the step would be in float32",
                f"write torch.autocast(x.device.type, dtype=torch.{dtype}), x being a tensor of the batch",
                f"or leave it out of what is exported, and give --autocast {_option(dtype)}",
            )
        return enters(self)

    with recorded_autocasts(), mock.patch.object(_AUTOCAST, "__enter__", enter):
        yield


def _option(dtype: str) -> str:
    return "bf16" if dtype == "bfloat16" else "fp16"
