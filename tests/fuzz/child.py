"""One command in a forked child, with bounds on its memory and time, and what became of it."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gopt.artifact.integrity import unchecked

SECONDS, MEMORY = 30.0, 1 << 30
"""Of one command: beyond this it hangs, or takes too much."""
_HARD = 8 << 30
_FILE = 2 << 30


@dataclass(frozen=True)
class Outcome:
    """How a command ended; ``code`` is negative for a signal, None where it was killed for taking too long."""

    code: int | None
    said: str
    peak: int
    seconds: float


def in_child(work: Callable[[], int], folder: Path, seconds: float = SECONDS) -> Outcome:
    """Run work in ``folder``, with all that it says caught."""
    path = folder / ".said"
    began = time.monotonic()
    child = os.fork()
    if not child:
        _be_child(work, folder, path)
    status, used = _wait(child, began + seconds)
    said = path.read_text(errors="replace") if path.exists() else ""
    path.unlink(missing_ok=True)
    code = None if status is None else os.waitstatus_to_exitcode(status)
    return Outcome(code, said, used.ru_maxrss << 10, time.monotonic() - began)


def _be_child(work: Callable[[], int], folder: Path, path: Path) -> None:
    code = 99
    try:
        os.setsid()
        os.chdir(folder)
        said = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for place in (1, 2):
            os.dup2(said, place)
        sys.stdout, sys.stderr = (os.fdopen(place, "w", errors="replace", closefd=False) for place in (1, 2))
        resource.setrlimit(resource.RLIMIT_AS, (_HARD, _HARD))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with unchecked():  # digests would refuse all damages alike
            code = work()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _wait(child: int, end: float) -> tuple[int | None, resource.struct_rusage]:
    pause = 0.001
    while time.monotonic() < end:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            _sweep(child)
            return status, used
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
    _sweep(child)
    _, _, used = os.wait4(child, 0)
    return None, used


def _sweep(child: int) -> None:
    """End whatever the child started: it leads a group of its own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
