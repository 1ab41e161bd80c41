"""A layer below gopt's writes: it counts them, and at one of them kills the process, interrupts it, or fails.

gopt writes through functions of ``os`` and through ``renameat2`` (``gopt.system``). The layer stands in their place in
a forked child. An audit hook sees files that are opened for writing past it: then the sweep is no proof, and says so.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from gopt.system import rename

PAST = 99
"""Exit code of a child that wrote past the layer."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_FREEING = ("unlink", "remove", "rmdir", "close")
"""Calls that a disk without room allows."""


def _half(data: Any) -> memoryview:
    """The first half of what is to be written, and a byte at least."""
    return memoryview(data)[: max(len(data) // 2, 1)]


class Fault(Enum):
    """What happens at a point."""

    NONE = "none"
    KILL = "kill"
    """The process is killed before the call."""
    TORN = "torn"
    """A write is done by half, then the process is killed."""
    FULL = "full"
    """From here on the disk takes nothing more; a write is done by half first."""
    QUOTA = "quota"
    """The same, and the reason is the user's quota (EDQUOT)."""
    BROKEN = "broken"
    """The call fails once, with EIO; a file that it would close is closed, as on NFS."""
    SHORT = "short"
    """From here on each write takes half of what it is given, and nothing fails."""
    INTERRUPT = "interrupt"
    """SIGINT comes before the call."""
    TERMINATE = "terminate"
    """SIGTERM comes before the call."""


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """The n-th call of a thread: the order within a thread is always the same."""

    thread: str
    number: int


@dataclass
class Layer:
    """Stands between gopt and the disk, for all that lies in ``root``."""

    root: Path
    fault: Fault
    at: Point | None
    notes: Path
    """Where it says which points there were: a line of JSON each."""
    exchange: bool = True
    """Whether the file system can exchange names."""

    def __post_init__(self) -> None:
        self._top = os.fsencode(self.root)
        self._counts: Counter[str] = Counter()
        self._process = os.getpid()
        self._full = self._short = False
        self._past: list[str] = []
        self._inside = threading.local()
        self._real = {name: getattr(os, name) for name in ("open", "write", "readlink", "close")}
        self._said = os.open(self.notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def install(self) -> None:
        """Take the place of the functions; there is no way back, for the process is a child."""
        for name in ("open", "write", "fsync", "close", "mkdir", "rename", "replace", "unlink", "remove", "rmdir",
                     "link", "symlink", "truncate", "ftruncate", "pwrite", "chmod"):  # fmt: skip
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        real = rename.renameat2()
        rename.renameat2 = lambda: self._renamed(real) if self.exchange else None  # type: ignore[assignment]
        sys.addaudithook(self._hear)

    def ended(self, code: int) -> int:
        """The exit code, unless something was written past the layer."""
        if self._past:
            sys.stderr.write(f"written past the layer: {self._past}\n")
            return PAST
        return code

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and not getattr(self._inside, "now", False):
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES and not isinstance(path, int) and self._is_ours(path, None):
                self._past.append(os.fsdecode(path))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            subject = given[0] if given else more.get("path")
            if not self._wanted(name, given) or not self._is_ours(subject, more.get("dir_fd")):
                return real(*given, **more)
            if self._short and name == "write":
                given = (given[0], _half(given[1]))
            return self._at_point(name, subject, lambda *short: real(*(short or given), **more), given)

        return call

    @staticmethod
    def _wanted(name: str, given: tuple[Any, ...]) -> bool:
        """Whether a call writes; of a closing, whether the file was open for that."""
        if name == "close":
            try:
                return bool(fcntl.fcntl(given[0], fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR))
            except OSError:
                return False
        return name != "open" or bool(given[1] & _WRITES)

    def _renamed(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(one: bytes, other: bytes, flag: int) -> int:
            try:
                result: int = self._at_point("renameat2", one, lambda: real(one, other, flag), ())
            except OSError as error:
                assert error.errno is not None
                return error.errno
            return result

        return call

    def _at_point(self, name: str, subject: Any, do: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        if os.getpid() != self._process:
            raise PermissionError(errno.EPERM, "past the layer: a child writes", str(subject))
        thread = threading.current_thread().name
        point = Point(thread, self._counts[thread])
        self._counts[thread] += 1
        shown = os.readlink(f"/proc/self/fd/{subject}") if isinstance(subject, int) else os.fsdecode(subject)
        self._real["write"](self._said, (json.dumps([point.thread, point.number, name, shown]) + "\n").encode())
        if point == self.at:
            self._strike(name, do, given)
        elif self._full and name not in _FREEING:
            raise self._no_room()
        self._inside.now = True
        try:
            return do()
        finally:
            self._inside.now = False

    def _strike(self, name: str, do: Callable[..., Any], given: tuple[Any, ...]) -> None:
        if self.fault in (Fault.TORN, Fault.FULL, Fault.QUOTA) and name == "write" and len(given[1]) > 1:
            do(given[0], _half(given[1]))
        if self.fault in (Fault.KILL, Fault.TORN):
            os.kill(os.getpid(), signal.SIGKILL)
        fails = self.fault in (Fault.FULL, Fault.QUOTA, Fault.BROKEN)
        if fails and name == "close":
            do()
        if self.fault in (Fault.FULL, Fault.QUOTA):
            self._full = True
            if name not in _FREEING or name == "close":
                raise self._no_room()
        if self.fault is Fault.BROKEN:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.fault is Fault.SHORT:
            self._short = True
        if self.fault is Fault.INTERRUPT:
            os.kill(os.getpid(), signal.SIGINT)
        if self.fault is Fault.TERMINATE:
            os.kill(os.getpid(), signal.SIGTERM)

    def _no_room(self) -> OSError:
        number = errno.EDQUOT if self.fault is Fault.QUOTA else errno.ENOSPC
        return OSError(number, os.strerror(number))

    def _is_ours(self, subject: Any, folder: int | None) -> bool:
        if isinstance(subject, int):
            try:
                path = os.fsencode(self._real["readlink"](f"/proc/self/fd/{subject}"))
            except OSError:
                return False
            if not path.startswith(b"/"):  # a pipe or a socket
                return False
        else:
            path = os.fsencode(subject)
            if folder is not None:
                path = os.path.join(os.fsencode(self._real["readlink"](f"/proc/self/fd/{folder}")), path)
        return os.path.abspath(path).startswith(self._top + b"/")
