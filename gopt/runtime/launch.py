"""Start ranks under ``mpiexec`` and watch them: one that dies or hangs ends the job and is named, with its step."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gopt.errors import RunError

HEARTBEATS = "GOPT_HEARTBEATS"
"""Environment variable: the folder in which ranks say where they are."""
_RECORD = struct.Struct("<qqqqd")
"""Process number, step, call, 1 when the rank has ended well, seconds since the epoch."""


@dataclass(slots=True)
class Heartbeat:
    """Where a rank says where it is, for the launcher to read; costs one small write a call."""

    number: int

    @classmethod
    def open(cls, rank: int) -> Heartbeat | None:
        """None when nobody watches."""
        folder = os.environ.get(HEARTBEATS)
        if not folder:
            return None
        beat = cls(os.open(Path(folder, f"{rank}"), os.O_RDWR | os.O_CREAT, 0o600))
        beat.at(0, -1)
        return beat

    def at(self, step: int, call: int, done: bool = False) -> None:
        os.pwrite(self.number, _RECORD.pack(os.getpid(), step, call, done, time.time()), 0)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rank said last."""

    rank: int
    process: int
    step: int
    call: int
    done: bool
    when: float

    @property
    def where(self) -> str:
        call = f", call {self.call}" if self.call >= 0 else ""
        return f"rank {self.rank}, step {self.step + 1}{call}"

    @property
    def alive(self) -> bool:
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        status = Path(f"/proc/{self.process}/stat")
        try:  # a zombie is dead
            return status.read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False


def mpiexec() -> str:
    """The launcher beside this interpreter, or on the PATH; raises RunError."""
    beside = Path(sys.prefix, "bin", "mpiexec")
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if found is None:
        raise RunError("there is no mpiexec", "install it with: pip install 'gopt[mpi]'")
    return found


def launch(ranks: int, arguments: Sequence[str], deadline: float) -> int:
    """Run ``gopt`` with these arguments on ``ranks`` processes; returns their exit code.

    Raises RunError when a rank died without a word, or when none moves for twice the deadline.
    """
    with tempfile.TemporaryDirectory(prefix="gopt.") as folder:
        environment = {**os.environ, HEARTBEATS: folder}
        if ranks > 2 * (os.cpu_count() or 1):
            environment["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"  # many more ranks than cores: give way while waiting
        command = [mpiexec(), "-n", str(ranks), sys.executable, "-m", "gopt.cli", *arguments]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        seen: list[Seen] = []
        try:
            return _watch(process, Path(folder), deadline)
        finally:
            seen = read(Path(folder))
            _end(process, seen)


def read(folder: Path) -> list[Seen]:
    """What every rank said last."""
    found = []
    for path in sorted(folder.iterdir(), key=lambda path: int(path.name)):
        data = path.read_bytes()
        if len(data) == _RECORD.size:
            process, step, call, done, when = _RECORD.unpack(data)
            found.append(Seen(int(path.name), process, step, call, bool(done), when))
    return found


def _watch(process: subprocess.Popen[bytes], folder: Path, deadline: float) -> int:
    dead: Seen | None = None
    while (code := process.poll()) is None:
        time.sleep(0.05)
        seen = read(folder)
        dead = dead or next((each for each in seen if not each.done and not each.alive), None)
        newest = max((each.when for each in seen), default=time.time())
        if time.time() - newest > 2 * deadline:
            late = min(seen, key=lambda each: (each.step, each.call))
            raise RunError(f"{late.where}: it has not moved for {2 * deadline:g} s")
        if dead is not None and not _settled(process):
            break
    if dead is not None and (code is None or code < 0 or code not in range(1, 71)):
        raise RunError(f"{dead.where}: the process died", "see what it wrote above")
    return code or 0


def _settled(process: subprocess.Popen[bytes], seconds: float = 3.0) -> bool:
    """Whether the launcher ends by itself soon after a rank has died."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: subprocess.Popen[bytes], seen: Sequence[Seen]) -> None:
    """Leave no process behind."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        if not _settled(process, 2.0):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for each in seen:
        if each.alive and each.process != os.getpid():
            try:
                os.kill(each.process, signal.SIGKILL)
            except ProcessLookupError:
                continue
