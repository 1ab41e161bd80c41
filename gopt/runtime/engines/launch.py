"""Starts the ranks of a job on this host and watches them: a dead or hanging rank ends the job and is named, with its
step."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gopt import limits
from gopt.errors import RunError, StoppedError
from gopt.runtime.engines.launcher_folder import (
    DIED,
    HEARTBEATS,
    LIVE,
    PREFIX,
    is_stopped,
    marked,
    read_claim,
    read_explanation,
    remove_dead,
    signal_name,
)
from gopt.runtime.engines.mpi import LAUNCHED
from gopt.runtime.engines.processes import RankProcesses, catches
from gopt.runtime.engines.rank_status import ENDED, WAITING, RankStatus, read, waiting
from gopt.system.signals import INTERRUPT, STOPS, handle_signals

COPYING = 20.0
"""Seconds that the last output of ranks has to come, once all have ended."""
START = 5.0
"""Seconds beyond twice the deadline that ranks have to start, or to move."""
_LOOK = 0.05
"""Seconds between two looks at what ranks publish."""
_NOISE = "Abort("
"""Prefix of lines that MPICH prints where a rank ends the job; gopt says why itself."""


TORCH = ("RANK", "SLURM_PROCID")
"""Variables set by torchrun and by Slurm in the environment of a rank of ``torch.distributed``."""


def is_started(engine: str) -> bool:
    """Return whether a launcher has started this process as a rank of this engine."""
    return any(name in os.environ for name in (*LAUNCHED, *(TORCH if engine == "torch" else ())))


def engine_of_launcher() -> str:
    """The engine that a job's launcher stands for; threads without one."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torch"
    return "mpi" if is_started("mpi") else "threads"


def launch(
    ranks: int, arguments: Sequence[str], deadline: float, show: Callable[[str], None], *, patient: bool = False,
    names: Sequence[str] = (), outlive: bool = False,
) -> int:  # fmt: skip
    """Run ``gopt`` with these arguments on ``ranks`` processes; returns the exit code.

    ``show`` is called with a line of JSON for each step of the first rank. ``patient``: the ranks get a stop signal
    first, and have the deadline to write a checkpoint; a second signal ends them at once. ``names``: the names of
    processes other than ranks. ``outlive``: processes outlive a dead process: they report why the job ends, or go on.
    Raises RunError when a rank died without a message, or when no rank makes progress for twice the deadline;
    StoppedError at a stop signal."""
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX) as folder, _signals(patient) as caught,
        marked(Path(folder)) as name,
    ):  # fmt: skip
        remove_dead(Path(folder).parent)
        environment = {**os.environ, HEARTBEATS: folder}
        if ranks > 2 * (os.cpu_count() or 1):
            environment["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"  # many more ranks than cores: give way while waiting
        with _copies() as streams:
            try:
                job = RankProcesses.start(ranks, program(arguments), environment, *streams, name=name)
            finally:
                for stream in streams:
                    os.close(stream)
            monitor = _JobMonitor(job, Path(folder), deadline, show, caught, patient, names, outlive)
            try:
                return monitor.run()
            except (RunError, StoppedError):
                job.end()
                if (claim := read_claim(Path(folder))) is not None and read_explanation(Path(folder)):
                    return claim.code  # a rank has said so itself
                raise
            finally:
                job.end()
                monitor.explain()


def program(arguments: Sequence[str]) -> list[str]:
    """The command of a rank."""
    return [sys.executable, "-P", "-m", "gopt.cli", *arguments]


@contextlib.contextmanager
def _copies() -> Iterator[list[int]]:
    """Two open files, copied to stdout and stderr until all processes have closed them; the block closes both."""
    pipes = [os.pipe() for _ in range(2)]
    copies = [
        threading.Thread(target=_copy, args=(source, target), daemon=True)
        for (source, _), target in zip(pipes, (sys.stdout, sys.stderr), strict=True)
    ]
    for copy in copies:
        copy.start()
    targets = [into for _, into in pipes]
    try:
        yield targets
    finally:
        for copy in copies:
            copy.join(COPYING)


@contextlib.contextmanager
def _signals(patient: bool) -> Iterator[list[int]]:
    """Collect the stop signals that arrive. Ranks run in separate sessions, so a terminal sends them no signal.

    An ignored signal, as under nohup, stays ignored. Only the main thread can listen.
    """
    caught: list[int] = []
    usual = (signal.SIG_DFL, *((signal.default_int_handler,) if patient else ()))
    with handle_signals(lambda number, _: caught.append(number), INTERRUPT + STOPS, lambda old: old in usual):
        yield caught


def _copy(source: int, target: IO[str]) -> None:
    """Copy the ranks' output; the copy ends without an error where the reader is gone."""
    with open(source, "rb") as lines:
        for line in lines:
            text = line.decode("utf-8", "replace")
            if not text.startswith(_NOISE):
                with contextlib.suppress(OSError, ValueError):
                    target.write(text)
                    target.flush()


@dataclass(slots=True)
class _JobMonitor:
    """Notices at once when a process of a rank ends."""

    job: RankProcesses
    folder: Path
    deadline: float
    show: Callable[[str], None]
    caught: Sequence[int] = ()
    """Signals that have come."""
    patient: bool = False
    names: Sequence[str] = ()
    outlive: bool = False
    """True if the other processes survive when one dies; they report why the job ends."""
    _stop_time: float = 0.0
    """When the ranks were asked to end."""
    _signalled: int = 0
    """Bytes of the first rank's lines that were shown."""
    _begun: float = field(default_factory=time.time)

    def run(self) -> int:
        failed: list[int] = []
        while self.job.running and not failed:
            ended = self.job.serve(_LOOK)
            self._note(ended)
            failed = [] if self.outlive else [rank for rank in ended if self._failed(rank)]
            self._tell()
            if self.caught and self.job.running:
                self._stop(bool(failed))
            self._refuse_standstill(read(self.folder))
        self._tell()
        claim = read_claim(self.folder)
        if claim is not None:
            return claim.code
        bad = failed or [rank for rank, code in self.job.codes.items() if code]
        if self.job.aborted is not None:
            bad = [self.job.aborted[0]]
        statuses = {status.rank: status for status in read(self.folder)}
        if not bad or (self.outlive and 0 in statuses and statuses[0].how == ENDED):
            return 0
        if self.caught:
            raise StoppedError(self.caught[0])  # it met ranks that do not listen, or listen no more
        for rank in bad:  # one that was no rank yet, or has ended in order, has said why itself
            if 0 < self.job.codes[rank] <= 70 and (rank not in statuses or statuses[rank].how == ENDED):
                return self.job.codes[rank]
        raise self._how_it_died(
            min(bad, key=lambda rank: _progress(self.job.codes[rank], statuses.get(rank))), statuses
        )

    def _note(self, ended: Sequence[int]) -> None:
        """Tell the other processes how these have ended."""
        for rank in ended:
            code = self.job.codes[rank]
            path = self.folder / f"{DIED}.{rank}.new"
            path.write_text(f"{code if code >= 0 else 128 - code}")
            path.rename(self.folder / f"{DIED}.{rank}")

    def _failed(self, rank: int) -> bool:
        """Return whether a rank has ended so that the others would wait for it."""
        how = next((status.how for status in read(self.folder) if status.rank == rank), ENDED)
        return rank not in self.job.finalized and (self.job.codes[rank] != 0 or how != ENDED)

    def _stop(self, late: bool) -> None:
        """Ask the ranks once to end. Raises StoppedError where no wait is needed, or the time is up."""
        if not self._stop_time and self.patient and not late and self._listen():
            self._stop_time = time.monotonic()
            self.job.send(self.caught[0])
        elif late or not self._stop_time or len(self.caught) > 1 or time.monotonic() - self._stop_time > self.deadline:
            raise StoppedError(self.caught[0])

    def _listen(self) -> bool:
        """Return whether all processes keep a step at this signal; loading and ended processes do not."""
        return all(catches(process.pid, signal.SIGTERM) for process in self.job.running.values())

    def _how_it_died(self, rank: int, statuses: Mapping[int, RankStatus]) -> RunError:
        """The error with the name of a dead rank."""
        code = self.job.codes[rank]
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code} and no message"
        where = f"in {statuses[rank].where}" if rank in statuses else "before the first step"
        hint = ("perhaps the system had no memory left",) if code == -signal.SIGKILL else ()
        return RunError(f"{self._name(rank)} {how} {where}{waiting(statuses.values(), rank)}", *hint)

    def _name(self, rank: int) -> str:
        return f"{self.names[rank]} (process {rank})" if rank < len(self.names) else f"rank {rank}"

    def explain(self) -> None:
        """Print a rank's explanation of the job's end."""
        sys.stderr.write(read_explanation(self.folder))
        sys.stderr.flush()

    def _refuse_standstill(self, statuses: Sequence[RankStatus]) -> None:
        limit = 2 * self.deadline + START
        if not statuses and time.time() - self._begun > limit:
            raise RunError(
                f"after {limit:g} s, no rank has begun: they load slowly, or MPI waits",
                "try a longer --deadline; --engine threads runs all ranks in one process",
            )
        if statuses and time.time() - max(status.when for status in statuses) > limit:
            late = min(
                statuses,
                key=lambda status: (not is_stopped(status.process), status.how == WAITING, status.step, status.call),
            )
            raise RunError(
                f"{self._name(late.rank)}, {late.where}: it has made no progress for {2 * self.deadline:g} s",
                "raise --deadline if it is only slow",
            )

    def _tell(self) -> None:
        path = self.folder / LIVE
        if not path.is_file():
            return
        with path.open("rb") as file:
            file.seek(self._signalled)
            data = file.read(limits.LINE_BYTES)
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be incomplete
        for line in whole.decode("utf-8", "replace").splitlines():
            self.show(line)
        self._signalled += len(whole)


def _progress(code: int, status: RankStatus | None) -> tuple[bool, int, int]:
    """Orders ranks found dead together: a signal comes first, then the least advanced rank."""
    return code >= 0, *((status.step, status.call) if status is not None else (0, -1))
