"""Commands in a child of their own, with the memory and the processor time that they took."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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


_LAUNCHER = """
import json, os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # no machine goes down for a test
command = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
_, status, used = os.wait4(command, 0)
with open(sys.argv[1], "w") as file:
    json.dump([os.waitstatus_to_exitcode(status), used.ru_maxrss << 10, used.ru_utime + used.ru_stime], file)
"""
"""The peak of a process begins at that of the one that starts it: this one is small, and pytest is not."""


def run(*arguments: str, folder: Path, timeout: float = 120) -> Ended:
    """``gopt`` with arguments; TimeoutExpired where it does not end."""
    said, used = folder / ".stderr", folder / ".used"
    command = [sys.executable, "-m", "gopt.cli", *arguments]
    with said.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(used), *command], cwd=folder, stdout=file, stderr=file,
            env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
        try:
            child.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    text = said.read_text(errors="replace")
    code, peak, seconds = json.loads(used.read_text())
    said.unlink()
    used.unlink()
    return Ended(code, text, peak, seconds)
