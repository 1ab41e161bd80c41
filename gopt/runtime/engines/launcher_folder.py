"""The folder of a launcher: its marker, who reports an error and the report, and how a rank died."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gopt.runtime.engines.processes import new_name, remove_shared
from gopt.system.lock import LockState, lock_existing, lock_file

HEARTBEATS = "GOPT_HEARTBEATS"
"""Environment variable: the folder in which ranks publish their positions."""
LAUNCHER = "launcher"
"""File in that folder, its marker: the launcher's process. Its ranks end when it has."""
LIVE = "live"
"""File in that folder: a line of JSON for each step of the first rank."""
ERROR_CLAIMED = "said"
"""File in that folder: created by the rank that reports why the job ends, with its exit code and process."""
ERROR_TEXT = "why"
"""File in that folder: what that rank says. The launcher prints it: it ends ranks before it has read their output."""
DIED = "died"
"""First part of the name of a file in that folder, by the launcher, for the code with which a rank's process ended: 128
and the number of the signal that killed it."""
STORE = "store"
"""File in that folder: where processes of ``torch.distributed`` meet."""
PREFIX = "gopt."
"""Of the names of launchers' folders."""
_MARK = "gopt-launcher"
"""First word of the marker."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher's process; ``start``: the start time in ticks of the system, because process numbers are reused;
    ``job``: the name of the processes, '' in the folder of an older gopt."""

    process: int
    start: int
    job: str = ""


@contextmanager
def marked(folder: Path) -> Iterator[str]:
    """Make a folder the folder of the launcher in this process and lock the marker in the block; yields the job's
    name."""
    job, lock = new_name(), lock_file(folder / LAUNCHER)
    try:
        Path(folder, LAUNCHER).write_text(f"{_MARK} {os.getpid()} {start_of(os.getpid())} {job}")
        yield job
    finally:
        if lock is not None:
            os.close(lock)


def remove_dead(home: Path) -> None:
    """Remove what killed launchers have left in the folder for temporary files: folders with a marker of this user and
    a free lock, and the shared memory of the jobs."""
    for folder in home.glob(f"{PREFIX}*"):
        with suppress(OSError):
            about = folder.lstat()
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and (launcher := read_marker(folder)):
                lock = lock_existing(folder / LAUNCHER) if launcher.job else None
                if lock is not None:
                    if lock[1] is LockState.MINE:
                        remove_folder(folder)
                    os.close(lock[0])


def read_marker(folder: Path) -> Launcher | None:
    """Return the launcher of this folder; None for any other folder."""
    with suppress(OSError, ValueError):
        number = os.open(folder / LAUNCHER, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(number, "rb") as file:
            about = os.fstat(number)
            if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
                word, process, start, *job = file.read(100).decode().split()
                return Launcher(int(process), int(start), *job[:1]) if word == _MARK else None
    return None


def launcher_folder() -> Path | None:
    """Return the folder of the gopt that launched this process; None without a launcher, and for a variable that names
    an unmarked folder."""
    text = os.environ.get(HEARTBEATS)
    folder = Path(text) if text else None
    return folder if folder is not None and read_marker(folder) is not None else None


def start_of(process: int) -> int:
    """When a process started, in ticks since the system did; 0 for a process that has ended."""
    fields = _stat(process)
    return int(fields[19]) if len(fields) > 19 else 0


def _stat(process: int) -> list[bytes]:
    """The fields shown by the system for a process of this host, behind the name; empty for a process that has
    ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b") ")[2].split()
    return []


def remove_folder(folder: Path) -> None:
    """Remove the files of launcher and ranks from their folder, the folder itself if nothing else is in it, and the
    ranks' shared memory."""
    if (launcher := read_marker(folder)) is not None and launcher.job:
        remove_shared(launcher.job)
    with suppress(OSError):
        for path in list(folder.iterdir()):
            kind = path.name.partition(".")[0]
            if path.name.isdigit() or kind in (LAUNCHER, LIVE, ERROR_CLAIMED, ERROR_TEXT, DIED, STORE):
                path.unlink()
        folder.rmdir()


@dataclass(frozen=True, slots=True)
class ErrorClaim:
    """The claim of a rank to report why a job ends: the job's exit code, and the rank's process."""

    code: int
    process: int


def read_claim(folder: Path) -> ErrorClaim | None:
    """Return the claim to report why the job ends, or None where no rank has failed."""
    with suppress(OSError, ValueError):  # it may be written just now
        code, process = map(int, (folder / ERROR_CLAIMED).read_text().split())
        return ErrorClaim(code, process)
    return None


def read_explanation(folder: Path) -> str:
    """Return a rank's report on why the job ends; '' if no rank has left a report for the launcher."""
    with suppress(OSError):
        return (folder / ERROR_TEXT).read_text("utf-8")
    return ""


def how_it_died(rank: int, seconds: float = 1.0) -> str:
    """How the process of a silent rank ended: the signal or the code; '' where no parent has told within some
    seconds."""
    folder = launcher_folder()
    until = time.monotonic() + seconds
    while folder is not None:
        with suppress(OSError, ValueError):
            code = int((folder / f"{DIED}.{rank}").read_text())
            if code > 128:
                return f"was killed by {signal_name(code - 128)}"
            return f"exited with code {code} and no message"
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    return ""


def signal_name(number: int) -> str:
    """The name of a signal, such as ``SIGSEGV``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_alive(process: int) -> bool:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, 0)
        return True
    return False


def is_stopped(process: int) -> bool:
    """Return whether a process of this host is stopped by a signal or a debugger."""
    return _stat(process)[:1] in ([b"T"], [b"t"])
