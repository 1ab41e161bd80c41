"""How a command failed, and when two commands fail in the same way."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import TracebackType

_QUOTED = re.compile(r"(?<!\w)'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_NAME = re.compile(r"[^\s:;,()]*[\w/][./_\\0-9][^\s:;,()]*|[./\\]\S*")
_NUMBER = re.compile(r"(?<![A-Za-z])[-+]?\d[\d.,]*(?:e[-+]?\d+)?%?")


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a command that did not end with 0.

    ``kind``: the class of the error; ``result`` for a command that ended normally with another code, ``signal`` for a
    process ended by a signal, ``time-out``, ``program`` for a program other than gopt. ``message``: the first line.
    ``where``: module and function of gopt that raised a defect; empty for a refusal. ``command``: the index of the
    failed command among several, from 0."""

    exit_code: int
    kind: str
    message: str = ""
    where: str = ""
    command: int = 0

    def same_as(self, failure: Failure) -> bool:
        """Return whether ``failure`` has the same code, kind, place and shape of the message."""
        mine = (self.exit_code, self.kind, self.where, self.command, message_shape(self.message))
        return mine == (failure.exit_code, failure.kind, failure.where, failure.command, message_shape(failure.message))

    def __str__(self) -> str:
        location = f" in {self.where}" if self.where else ""
        return f"exit code {self.exit_code}, {self.kind}{location}" + (f": {self.message}" if self.message else "")


def message_shape(message: str) -> str:
    """A message without names, paths and numbers: the common part of two refusals for one reason.

    Quoted texts, words with a digit, a dot, a slash or an underscore, and numbers stand for any other."""
    text = _QUOTED.sub("§", message.split("\n", 1)[0])
    text = _NAME.sub("§", _NUMBER.sub("§", text))
    return re.sub(r"§(?:[\s,]*(?:and )?§)*", "§", text)


def place_of(trace: TracebackType | None) -> str:
    """Module and function of the innermost frame of gopt, such as ``gopt.passes.prune:prune``; empty without one."""
    location = ""
    while trace is not None:
        frame = trace.tb_frame
        module = frame.f_globals.get("__name__", "")
        if module == "gopt" or module.startswith("gopt."):
            location = f"{module}:{frame.f_code.co_name}"
        trace = trace.tb_next
    return location


def failure_of(error: BaseException, exit_code: int) -> Failure:
    """The failure of an error; only defects say where they were raised."""
    from gopt.errors import GoptError

    message = error.message if isinstance(error, GoptError) else str(error)
    where = place_of(error.__traceback__) if exit_code == 70 else ""
    return Failure(exit_code, type(error).__name__, message.split("\n", 1)[0], where)
