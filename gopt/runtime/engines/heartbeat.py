"""Heartbeats: each rank of a job publishes its position, so that others can name a rank that died or did not arrive.

Under ``--launch`` ranks write files in the launcher's folder, one each. Under a user's own launcher ranks write to
unnamed memory files (memfd), opened by the other ranks of the host through ``/proc``; no file stays behind."""

from __future__ import annotations

import io
import mmap
import os
import select
import signal
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gopt.errors import RunError
from gopt.runtime.engines.processes import new_name, remove_shared
from gopt.runtime.engines.watchdog import Watchdog
from gopt.spmd.pass_records import rank_ranges
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
ERROR_GRACE = 1.0
"""Seconds that the others leave to a rank that is about to create that file."""
PREFIX = "gopt."
"""Of the names of launchers' folders."""
_MARK = "gopt-launcher"
"""First word of the marker."""
_PASSING = 0.1
"""Seconds that a user's own launcher has to take what a rank prints, before the rank ends the job."""
_EXPLAINS = 60.0
"""Seconds that the others leave to that rank to report; on a busy machine it takes long to be scheduled."""
_RECORD = struct.Struct("<qqqqd")
"""Process number, step, call, how it goes, seconds since the epoch."""
RUNNING, ENDED, REPORTED, WAITING = 0, 1, 2, 3
"""Status of a rank: running; ended well; reported an error; waiting for others in a call."""


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
                        _remove(folder)
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


def _remove(folder: Path) -> None:
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


class StatusPublisher:
    """Publishes a rank's position; a call costs a small write to memory at the beginning and at the end.

    ``number``: the open file read by others, or None. ``folder``: the launcher's folder."""

    def __init__(self, number: int | None, folder: Path | None) -> None:
        self.folder = folder
        self.step, self.call = 0, -1
        self.others: Callable[[], list[RankStatus]] = lambda: []
        """Returns the last status of all visible ranks."""
        self._process = os.getpid()
        self._record: Any = bytearray(_RECORD.size)
        self.at(0, -1)
        if number is not None:
            # Whole at once: others may read it now. By write, as a full disk would be a signal on a write to memory.
            os.pwrite(number, self._record, 0)
            self._record = mmap.mmap(number, _RECORD.size)

    @classmethod
    def open(cls, rank: int, gather: Callable[[Any], list[Any]]) -> StatusPublisher:
        """Open a rank's heartbeat. ``gather``: returns the item of every rank of the job; all ranks call it."""
        home = launcher_folder()
        if home is None:
            return cls._in_memory(rank, gather)
        beat = cls(os.open(home / f"{rank}", os.O_RDWR | os.O_CREAT, 0o600), home)
        beat.others = lambda: read(home)
        threading.Thread(target=beat.follow, name="launcher", daemon=True).start()
        return beat

    @classmethod
    def _in_memory(cls, rank: int, gather: Callable[[Any], list[Any]]) -> StatusPublisher:
        try:
            number = os.memfd_create("gopt-beat")
        except (AttributeError, OSError):  # not on this system; not enough files
            gather(None)
            return cls(None, None)
        beat = cls(number, None)
        offers = gather((os.getpid(), number, os.uname().nodename))
        near = {
            rank: f"/proc/{offer[0]}/fd/{offer[1]}"
            for rank, offer in enumerate(offers) if offer is not None and offer[2] == os.uname().nodename
        }  # fmt: skip
        beat.others = lambda: [status for rank, path in near.items() if (status := _read(rank, Path(path))) is not None]
        return beat

    def follow(self) -> None:
        """End this rank when the launcher has ended: a killed launcher cannot end its ranks."""
        assert self.folder is not None
        launcher = read_marker(self.folder)
        if launcher is not None:
            try:
                handle = os.pidfd_open(launcher.process)
            except ProcessLookupError:
                pass  # gone already, and perhaps its folder with it
            except OSError:
                return  # the system gives no handle: nothing to follow
            else:
                if start_of(launcher.process) == launcher.start:
                    select.select([handle], [], [])
        _remove(self.folder)
        os._exit(RunError("").exit_code)

    def at(self, step: int, call: int, how: int = RUNNING) -> None:
        self.step, self.call = step, call
        _RECORD.pack_into(self._record, 0, self._process, step, call, how, time.time())

    def waits(self, waiting: bool) -> None:
        """Record that the rank begins or ends a wait for others."""
        self.at(self.step, self.call, WAITING if waiting else RUNNING)

    def first(self, code: int) -> bool:
        """Return whether this rank is the first to report why the job ends; only the first reports, and sets the
        exit code."""
        if self.folder is None:
            return True
        claim = self.folder / f"{ERROR_CLAIMED}.{self._process}"
        try:
            claim.write_text(f"{code} {self._process}")
            os.link(claim, self.folder / ERROR_CLAIMED)  # whole from the first moment on
        except FileExistsError:
            return False
        except OSError:  # the launcher is gone, and its folder
            return True
        return True

    def report(self, code: int, explain: Callable[[], object]) -> None:
        """Publish this rank's failure, once the end of the job is explained: by ``explain``, or by the rank that failed
        first.

        The caller ends the whole job next; an end before the first rank has reported would lose the report."""
        if not self.explain(code, explain):
            self._await_report()
        self.at(self.step, self.call, REPORTED)

    def explain(self, code: int, explain: Callable[[], object]) -> bool:
        """Return whether this rank is the first to report why the job ends; if so, ``explain`` prints the reason on
        stderr, and the job's exit code is ``code``."""
        if not self.first(code):
            return False
        if self.folder is None:
            explain()
            time.sleep(_PASSING)
            return True
        output = io.StringIO()
        with redirect_stderr(output):
            explain()
        try:
            text = self.folder / f"{ERROR_TEXT}.{self._process}"
            text.write_text(output.getvalue(), "utf-8", "backslashreplace")
            text.rename(self.folder / ERROR_TEXT)
        except OSError:  # the launcher is gone, or the disk is full
            sys.stderr.write(output.getvalue())
            sys.stderr.flush()
        return True

    def _await_report(self) -> None:
        """Wait until the first rank has reported, or is gone."""
        assert self.folder is not None  # else this rank is the first
        limit = time.monotonic() + _EXPLAINS
        while time.monotonic() < limit:
            claim = read_claim(self.folder)
            if claim is None or claim.process == self._process or not _is_alive(claim.process):
                return
            if any(status.how == REPORTED for status in self.others() if status.process == claim.process):
                return
            time.sleep(0.05)


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


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The last published status of a rank."""

    rank: int
    process: int
    step: int
    call: int
    how: int
    when: float

    @property
    def where(self) -> str:
        call = f", call {self.call}" if self.call >= 0 else ""
        return f"step {self.step + 1}{call}"


def read(folder: Path) -> list[RankStatus]:
    """Return the last status of every rank, from a launcher's folder."""
    paths = sorted((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    return [status for path in paths if (status := _read(int(path.name), path)) is not None]


def _read(rank: int, path: Path) -> RankStatus | None:
    with suppress(OSError):
        data = path.read_bytes()
        if len(data) == _RECORD.size:
            return RankStatus(rank, *_RECORD.unpack(data))
    return None


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


def follow(watchdog: Watchdog, beat: StatusPublisher, rank: int) -> None:
    """Publish a rank's waits, and give its watchdog the waits of other ranks."""
    watchdog.waits = beat.waits
    watchdog.missing = lambda: missing(beat.others(), rank)


def missing(statuses: Sequence[RankStatus], rank: int) -> str:
    """Name the ranks on which rank ``rank`` waits: ranks that wait for no other rank, or are stopped.

    A rank that waits for such a rank is not named."""
    peers = [status for status in statuses if status.rank != rank]
    stopped = {peer.rank for peer in peers if is_stopped(peer.process)}
    late = [peer for peer in peers if peer.how != WAITING or peer.rank in stopped]
    if not late:
        return _all_wait(statuses, rank)
    one = late[0] if len(late) == 1 else None
    if one is None:
        return f"ranks {_some([status.rank for status in late])} did not reach this call"
    if one.rank in stopped:
        return f"rank {one.rank} did not reach this call: its process is stopped, in {one.where}"
    return f"rank {one.rank} did not reach this call: " + (
        "it has ended" if one.how != RUNNING else f"it is in {one.where}"
    )


def _all_wait(statuses: Sequence[RankStatus], rank: int) -> str:
    """Describe a deadlock, in which all ranks wait: name the least advanced ranks."""
    mine = [status for status in statuses if status.rank == rank]
    behind = [status for status in statuses if mine and (status.step, status.call) < (mine[0].step, mine[0].call)]
    if not behind:
        return "another rank did not reach this call"
    least = min(behind, key=lambda status: (status.step, status.call))
    return f"another rank did not reach this call: rank {least.rank} still waits in {least.where}"


def _is_alive(process: int) -> bool:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, 0)
        return True
    return False


def is_stopped(process: int) -> bool:
    """Return whether a process of this host is stopped by a signal or a debugger."""
    return _stat(process)[:1] in ([b"T"], [b"t"])


def waiting(statuses: Iterable[RankStatus], dead: int) -> str:
    """Where the other ranks waited when a rank died, such as ``; rank 0 waited in call 1``."""
    calls: dict[int, list[int]] = {}
    for status in statuses:
        if status.how == WAITING and status.rank != dead and status.call >= 0:
            calls.setdefault(status.call, []).append(status.rank)
    clauses = [f"; rank{'s' * (len(ranks) > 1)} {_some(ranks)} waited in call {call}" for call, ranks in calls.items()]
    return "".join(clauses[:3])


def _some(ranks: Sequence[int]) -> str:
    text = rank_ranges(sorted(ranks))
    return text if len(text) <= 60 else f"{text[:60].rpartition(',')[0]} and others"
