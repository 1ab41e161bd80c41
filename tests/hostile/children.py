"""Commands in a child of their own, with the memory and the processor time that they took."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    said: str
    """What stands on stderr."""
    peak: int
    """Bytes of memory that it held at most."""
    seconds: float
    """Of processor time."""


def run(*arguments: str, folder: Path, timeout: float = 120) -> Ended:
    """``gopt`` with arguments; TimeoutExpired where it does not end."""
    said = folder / ".stderr"
    with said.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "gopt.cli.main", *arguments], cwd=folder, stdout=file, stderr=file,
            env=os.environ | {"OMP_NUM_THREADS": "1"}, preexec_fn=_bounded,
        )  # fmt: skip
        _, status, used = _wait(child, timeout)
    text = said.read_text(errors="replace")
    said.unlink()
    return Ended(os.waitstatus_to_exitcode(status), text, used.ru_maxrss << 10, used.ru_utime + used.ru_stime)


def _wait(child: subprocess.Popen[bytes], timeout: float) -> tuple[int, int, resource.struct_rusage]:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        pid, status, used = os.wait4(child.pid, os.WNOHANG)
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return pid, status, used
        time.sleep(0.02)
    child.kill()
    raise subprocess.TimeoutExpired(child.args, timeout)


def _bounded() -> None:
    # No machine goes down for a test: what is beyond this fails anyway.
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
