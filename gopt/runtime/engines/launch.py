"""Starts ranks under ``mpiexec`` and watches them: a rank that dies or hangs ends the job and is named, with its
step."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gopt.errors import RunError, StoppedError
from gopt.limits import LINE_BYTES
from gopt.runtime.engines.heartbeat import (
    ENDED,
    HEARTBEATS,
    LIVE,
    REPORTED,
    WAITING,
    RankStatus,
    mark,
    read,
    read_claim,
    read_explanation,
    signal_name,
    waiting,
)

COPYING = 20.0
"""Seconds that the last output of ranks has to come, once all have ended."""
CLEANING = 20.0
"""Seconds that mpiexec has to end the others when a rank has died, and to say how it died."""
START = 5.0
"""Seconds beyond twice the deadline that ranks have to start, or to move."""
_STOPS = (signal.SIGTERM, signal.SIGHUP)
_NOISE = ("=====", "=   ", "YOUR APPLICATION TERMINATED", "This typically refers", "Please see the FAQ", "Abort(")
"""Prefixes of lines that MPICH's launcher prints when ranks end early; gopt replaces them by one line."""
_PROCESS = re.compile(r"PID (\d+)")
_SIGNAL = re.compile(r"signal:? (\d+)", re.I)


def mpiexec(extra: str = "mpi") -> str:
    """The launcher beside this interpreter, or on the PATH. Raises RunError, which names the extra of gopt that
    installs it."""
    beside = Path(sys.prefix, "bin", "mpiexec")
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if found is None:
        raise RunError("there is no mpiexec", f"install it with: pip install 'gopt[{extra}]'")
    return found


def launch(
    ranks: int, arguments: Sequence[str], deadline: float, show: Callable[[str], None], *, patient: bool = False,
    names: Sequence[str] = (), start: Callable[[str, int, Sequence[str]], list[str]] | None = None,
) -> int:  # fmt: skip
    """Run ``gopt`` with these arguments on ``ranks`` processes; returns their exit code.

    ``show`` is called with a line of JSON for each step of the first rank. ``patient``: the ranks get a stop signal
    first, and have the deadline to write a checkpoint; a second signal ends them at once. ``names``: the names of
    processes that are not ranks. ``start``: returns the command from the launcher, the processes and the program, for a
    job whose processes outlive one that dies: they report why they end, or go on. Raises RunError when a rank died
    without a message, or when no rank makes progress for twice the deadline; StoppedError at a stop signal.
    """
    with tempfile.TemporaryDirectory(prefix="gopt.") as folder, _signals(patient) as caught:
        mark(Path(folder))
        environment = {**os.environ, HEARTBEATS: folder}
        if ranks > 2 * (os.cpu_count() or 1):
            environment["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"  # many more ranks than cores: give way while waiting
        program = [sys.executable, "-P", "-m", "gopt.cli", *arguments]
        alone = [mpiexec(), "-n", str(ranks), *program]
        command = alone if start is None else start(mpiexec(), ranks, program)
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
        )
        assert process.stdout is not None and process.stderr is not None
        streams = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        banner: list[str] = []
        copies = [threading.Thread(target=_copy, args=(*each, banner), daemon=True) for each in streams]
        for copy in copies:
            copy.start()
        watchdog = _JobMonitor(
            process, Path(folder), deadline, show, caught, banner, copies, patient, names, start is not None
        )
        try:
            return watchdog.run()
        finally:
            watchdog.end()
            for copy in copies:
                copy.join(COPYING)
            sys.stderr.write(read_explanation(Path(folder)))
            sys.stderr.flush()


@contextlib.contextmanager
def _signals(patient: bool) -> Iterator[list[int]]:
    """Collect the stop signals that arrive. Ranks run in a session of their own, so a terminal sends them none.

    An ignored signal, as under nohup, stays ignored. Only the main thread can listen.
    """
    caught: list[int] = []
    listens = threading.current_thread() is threading.main_thread()
    usual = (signal.SIG_DFL, *((signal.default_int_handler,) if patient else ()))
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, *_STOPS) if listens}
    before = {each: old for each, old in before.items() if old in usual}
    for number in before:
        signal.signal(number, lambda came, _: caught.append(came))
    try:
        yield caught
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _copy(source: IO[bytes], target: IO[str], banner: list[str]) -> None:
    """Copy what ranks print, without the launcher's banner, whose lines are added to ``banner``."""
    for line in source:
        text = line.decode("utf-8", "replace")
        if text.startswith(_NOISE):
            banner.append(text)
        else:
            target.write(text)
            target.flush()


@dataclass(slots=True)
class _JobMonitor:
    """Notices at once when a process of a rank ends, by a handle (pidfd) on each."""

    process: subprocess.Popen[bytes]
    folder: Path
    deadline: float
    show: Callable[[str], None]
    caught: Sequence[int] = ()
    """Signals that have come."""
    banner: Sequence[str] = ()
    """Output of the launcher itself."""
    copies: Sequence[threading.Thread] = ()
    """Threads that copy the launcher's output."""
    patient: bool = False
    names: Sequence[str] = ()
    outlive: bool = False
    """True if the other processes survive when one dies; they report why the job ends."""
    _asked: float = 0.0
    """When the ranks were asked to end."""
    _handles: dict[int, int] = field(default_factory=dict)
    """Rank -> handle of its process."""
    _told: int = 0
    """Bytes of the first rank's lines that were shown."""
    _begun: float = field(default_factory=time.time)

    def run(self) -> int:
        dead: RankStatus | None = None
        while self.process.poll() is None and dead is None:
            seen = read(self.folder)
            self._follow(seen)
            gone = self._gone()
            dead = None if self.outlive else self._silent(gone)
            if dead is not None:
                time.sleep(0.3)  # MPI may have ended the others before the system was done with the one that died
                dead = self._silent(self._gone())
            self._tell()
            if self.caught:
                self._stop(dead is not None)
            self._refuse_standstill(seen)
            if dead is None:
                waiting = [handle for rank, handle in self._handles.items() if rank not in gone]
                select.select(waiting, [], [], 0.05)
        if dead is None and self.process.returncode:  # the launcher ended after this check
            dead = self._silent(self._gone())
        if dead is not None and self.outlive and self._went_on():
            self._tell()
            return self._said() or 0
        if dead is not None:
            if self.caught:
                raise StoppedError(self.caught[0])
            raise self._how_it_died(dead)
        code = self.process.wait()
        self._tell()
        if code and (said := self._said()) is not None:
            return said  # MPI ends the others by a signal, and may report that
        seen = read(self.folder)
        if code and not any(each.how == REPORTED for each in seen) and not 0 < code <= 70:
            raise RunError(
                f"mpiexec ended with code {code}, and no rank said why",
                "--engine threads runs all ranks in one process: it shows whether the step itself fails",
            )
        return code if 0 <= code <= 70 else RunError("").exit_code

    def _stop(self, late: bool) -> None:
        """Ask the ranks once to end. Raises StoppedError where they need not be waited for, or their time is up."""
        if not self._asked and self.patient and self._handles and not late:
            self._asked = time.monotonic()
            for handle in self._handles.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, self.caught[0])
        elif late or not self._asked or len(self.caught) > 1 or time.monotonic() - self._asked > self.deadline:
            raise StoppedError(self.caught[0])

    def _how_it_died(self, dead: RankStatus) -> RunError:
        """The error that names the rank that died first: the one that the launcher names, else the one whose end was
        seen first."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(CLEANING)
            for copy in self.copies:
                copy.join(COPYING)
        seen, said = read(self.folder), "".join(self.banner)
        process, number = _PROCESS.search(said), _SIGNAL.search(said)
        first = next((each for each in seen if process and each.process == int(process[1])), None)
        code = self.process.poll() or 0
        if first is not None and number is not None:
            how = f"was killed by {signal_name(int(number[1]))}"
        elif self.outlive and code > 128:
            how = f"was killed by {signal_name(code - 128)}"
        else:
            how = f"exited with code {code} and no message" if 0 < code < 128 else "died with no message"
        dead = first or dead
        hint = ("perhaps the system had no memory left",) if "SIGKILL" in how else ()
        return RunError(f"{self._name(dead.rank)} {how} in {dead.where}{waiting(seen, dead.rank)}", *hint)

    def _follow(self, seen: Sequence[RankStatus]) -> None:
        for each in seen:
            if each.rank not in self._handles:
                try:
                    self._handles[each.rank] = os.pidfd_open(each.process)
                except ProcessLookupError:
                    continue

    def _gone(self) -> list[int]:
        return [rank for rank, handle in self._handles.items() if select.select([handle], [], [], 0)[0]]

    def _silent(self, gone: Sequence[int]) -> RankStatus | None:
        """Return a rank that ended without a report, or None where another rank reported and so ended it."""
        seen = {each.rank: each for each in read(self.folder)}
        if any(each.how == REPORTED for each in seen.values()):
            return None
        silent = [seen[rank] for rank in gone if rank in seen and seen[rank].how != ENDED]
        # MPI ends the others at once: they had come further than the one that died.
        return min(silent, key=lambda each: (each.step, each.call), default=None)

    def _went_on(self) -> bool:
        """Return whether the first process exited with 0, or some process reported an error."""
        seen = read(self.folder)
        return self._said() is not None or any(each.rank == 0 and each.how == ENDED for each in seen)

    def _name(self, rank: int) -> str:
        return f"{self.names[rank]} (process {rank})" if rank < len(self.names) else f"rank {rank}"

    def _said(self) -> int | None:
        """Return the exit code of the rank that reported why the job ends, or None."""
        claim = read_claim(self.folder)
        return None if claim is None else claim.code

    def _refuse_standstill(self, seen: Sequence[RankStatus]) -> None:
        limit = 2 * self.deadline + START
        if not seen and time.time() - self._begun > limit:
            raise RunError(
                f"after {limit:g} s, no rank has begun: mpiexec has started none, or they load slowly",
                f"try {mpiexec()} -n 1 hostname, or a longer --deadline",
            )
        if seen and time.time() - max(each.when for each in seen) > limit:
            late = min(seen, key=lambda each: (each.how == WAITING, each.step, each.call))
            raise RunError(
                f"{self._name(late.rank)}, {late.where}: it has made no progress for {2 * self.deadline:g} s",
                "raise --deadline if it is only slow",
            )

    def _tell(self) -> None:
        path = self.folder / LIVE
        if not path.is_file():
            return
        with path.open("rb") as file:
            file.seek(self._told)
            data = file.read(LINE_BYTES)
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be incomplete
        for line in whole.decode("utf-8", "replace").splitlines():
            self.show(line)
        self._told += len(whole)

    def end(self) -> None:
        """End all processes of the job."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(2.0)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        for handle in self._handles.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
