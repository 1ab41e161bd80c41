"""The record of options for training by ranks, or trainers and servers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from gopt.errors import OptionError
from gopt.options.records import check_deadline, check_least, check_types, check_words, spelled
from gopt.runtime.session import Array
from gopt.runtime.training.array_source import Last
from gopt.runtime.training.batch_stream import BatchStream
from gopt.runtime.training.evaluation import BestRule, EvaluationPlan
from gopt.runtime.training.job import Job
from gopt.verbs.curves import check_writer

if TYPE_CHECKING:
    from gopt.runtime.parameter_server.job import ServerJob
    from gopt.runtime.parameter_server.waits import ServerSummary

FilePath = str | os.PathLike[str]


def check_samples(name: str, data: object) -> None:
    """Raise OptionError for iterable values other than batches."""
    unnamed = isinstance(data, Mapping) and not all(isinstance(key, str) for key in data)
    if unnamed or isinstance(data, bytes | bytearray | set | frozenset):
        raise OptionError(
            f"{name} cannot be {data!r:.60}", "it takes a path, arrays by input, or an iterable of batches"
        )


@spelled
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run.

    ``settings``: hyper-parameter -> a number or a schedule (``cosine:1e-3:0:1000``). ``state``: values missing in the
    folder. ``shuffle``: seed of a new order of samples in every pass. ``last``: the use of samples at the end of a pass
    too few for a step: the next pass completes the step (``carry``, the default), the samples are left out (``drop``),
    or the pass's first samples complete the step (``pad``). ``batch_size``: samples of each rank's batch, where the
    step leaves their number open and ``data`` is on disk. ``draws``: seed of random numbers missing in the data. A
    resumed run keeps these four. ``checkpoint``: a folder on disk; checkpoints are written at the end and ``every`` so
    many steps, ``keep`` checkpoints stay, and ``resume`` continues from the newest. ``startup``: False starts from
    stored values even with start-up graphs. ``sync_init``: axes with the first rank's start values, ``all`` or such as
    ``dp+tp``. ``tuning``: False runs without tiling and generated kernels, with the same bits. ``audit``: compare the
    ranks' common values every so many steps, and before each checkpoint; 0 is never. ``trace``: the file for every
    rank's times. ``deadline``: seconds to wait for other ranks at a call.

    ``eval``: a model of the forward (``gopt export --eval``) that is evaluated on ``eval_data``, in a form of ``data``
    that ends, at the end and every ``eval_every`` steps. ``keep_best``: a metric of it, as ``accuracy:max``; the best
    checkpoint is kept as ``best``. ``patience``: end after so many evaluations without a better one. ``tensorboard``: a
    folder for curves. ``peak_flops``: operations a second of a rank's device, by which a run says what it uses.

    Of a split alone: ``trainers``, how many take part; ``roles``, which process is what; ``on_trainer_loss`` in rounds,
    ``abort`` or ``continue``; ``nan``, what servers do about gradients that are not finite: ``pass``, ``abort`` or
    ``skip``; ``stop``, whether the ``first`` trainer without data ends the run or the last of ``all``; ``staleness``,
    how many steps a trainer may be ahead; ``record``, the file for the order in which messages are received, by which
    ``verify`` replays a run without rounds.
    """

    settings: Mapping[str, float | str] = field(default_factory=dict)
    state: FilePath | None = None
    shuffle: int | None = None
    last: str | None = None
    batch_size: int | None = None
    draws: int | None = None
    checkpoint: FilePath | None = None
    every: int = 0
    keep: int = 2
    resume: bool = False
    stop_on_nan: bool = False
    startup: bool = True
    sync_init: str | None = None
    tuning: bool = True
    audit: int | None = None
    trace: FilePath | None = None
    record: FilePath | None = None
    deadline: float = 120.0
    eval: FilePath | None = None
    eval_data: FilePath | Mapping[str, Array] | Iterable[Any] | None = None
    eval_every: int = 0
    keep_best: str | None = None
    patience: int = 0
    tensorboard: FilePath | None = None
    peak_flops: float | None = None
    trainers: int | None = None
    roles: str | None = None
    on_trainer_loss: str = "abort"
    nan: str = "pass"
    stop: str | None = None
    staleness: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_least(
            self,
            shuffle=0,
            draws=0,
            every=0,
            audit=0,
            keep=1,
            trainers=1,
            staleness=0,
            eval_every=0,
            patience=0,
            batch_size=1,
        )
        check_words(self, on_trainer_loss=("abort", "continue"), nan=("abort", "skip", "pass"), stop=("first", "all"))
        if self.last is not None:
            check_words(self, last=tuple(Last))
        check_deadline(self.deadline)
        if self.draws is not None and self.draws >= 2**64:
            raise OptionError(f"--draws cannot be {self.draws}", "give a seed below 2**64")
        if self.checkpoint is None and (self.every or self.resume):
            raise OptionError(
                f"--{'every' if self.every else 'resume'} needs --checkpoint CKPT", "name a folder for checkpoints"
            )
        check_samples("eval_data", self.eval_data)
        if self.record is not None and self.resume:
            raise OptionError(
                "--record cannot be combined with --resume: a replay begins with the first step",
                "leave one of them out",
            )

        if self.tensorboard is not None:
            check_writer()
        if self.peak_flops is not None and not 0 < self.peak_flops < math.inf:
            raise OptionError(f"--peak-flops cannot be {self.peak_flops}", "give a number above 0, such as 312e12")
        for name, needed, hint in (
            ("eval_data", "eval", "--eval MODEL, which gopt export --eval writes"),
            ("eval_every", "eval", "--eval MODEL, which gopt export --eval writes"),
            ("keep_best", "eval", "--eval MODEL, which gopt export --eval writes"),
            ("eval", "eval_data", "--eval-data DATA, held-out samples"),
            ("patience", "keep_best", "--keep-best METRIC, which says what is better"),
        ):
            if getattr(self, name) not in (None, 0) and getattr(self, needed) is None:
                raise OptionError(f"--{name} needs --{needed}".replace("_", "-"), f"add {hint}")

    def job(self, folder: Path, data: str | BatchStream, steps: int) -> Job:
        """The job of ``steps`` steps on the samples of ``data``."""
        return Job(
            folder=folder, data=data, steps=steps, settings={name: str(value) for name, value in self.settings.items()},
            state=None if self.state is None else os.fspath(self.state), shuffle=self.shuffle,
            draws=self.draws, last=None if self.last is None else Last(self.last),
            batch_size=self.batch_size,
            checkpoint=None if self.checkpoint is None else Path(self.checkpoint), every=self.every, keep=self.keep,
            resume=self.resume, stop_on_nan=self.stop_on_nan, startup=self.startup, sync_init=self.sync_init,
            tuning=self.tuning, audit=self.audit,
            trace=None if self.trace is None else Path(self.trace),
            record=None if self.record is None else Path(self.record), evaluation=self._evaluation(),
            peak_flops=self.peak_flops,
        )  # fmt: skip

    def _evaluation(self) -> EvaluationPlan | None:
        if self.eval is None or self.eval_data is None:
            return None
        if self.keep_best is not None and self.checkpoint is None:
            raise OptionError("--keep-best needs --checkpoint CKPT", "name a folder for checkpoints")
        data = os.fspath(self.eval_data) if isinstance(self.eval_data, os.PathLike) else self.eval_data
        return EvaluationPlan(
            model=Path(self.eval), data=data, every=self.eval_every, patience=self.patience,
            best=None if self.keep_best is None else BestRule.parse(self.keep_best),
        )  # fmt: skip

    def check(self, *, split: bool) -> None:
        """Raise OptionError for options without meaning for a split, or for ranks without servers."""
        if split:
            if self.sync_init is not None:
                raise OptionError(
                    "--sync-init: trainers of a split take their start values from the servers", "leave it out"
                )
            if self.audit is not None:
                raise OptionError(
                    "--audit: trainers of a split have no states in common but what they pull", "leave it out"
                )
            if self.last is not None:
                raise OptionError(
                    "--last needs ranks of gopt shard: trainers of a split have passes of their own", "leave it out"
                )
            if self.batch_size is not None:
                raise OptionError(
                    "--batch-size needs ranks of gopt shard: a split has batches of the size that its step fixes",
                    "leave it out",
                )
            if self.eval is not None:
                raise OptionError(
                    "--eval needs ranks of gopt shard: servers hold the parameters, and no step is the same on all "
                    "trainers",
                    "leave it out, and evaluate checkpoints: gopt merge CKPT/step_… --inference -o MODEL",
                )
            if self.peak_flops is not None:
                raise OptionError(
                    "--peak-flops needs ranks of gopt shard: servers compute a part of the step", "leave it out"
                )
            if self.trace is not None:
                raise OptionError(
                    "--trace needs ranks of gopt shard: trainers and servers have no calls to trace", "leave it out"
                )
            return
        usual = RunOptions()
        for name in ("nan", "on_trainer_loss", "trainers", "roles", "staleness", "stop", "record"):
            if getattr(self, name) != getattr(usual, name):
                option = f"--{name.replace('_', '-')}"
                raise OptionError(
                    f"{option} is for trainers and servers, but the folder holds ranks of gopt shard", "leave it out"
                )

    def server_job(
        self, job: Job, tell: Callable[[str], None], summarise: Callable[[Sequence[ServerSummary]], None]
    ) -> ServerJob:
        """The job with the trainers and servers. ``tell`` gets a line for each fault; ``summarise`` each server's
        summary, at the end. Raises InputError and OptionError."""
        from gopt.runtime.parameter_server.faults import FaultOptions, OnNan, StopFault
        from gopt.runtime.parameter_server.job import ServerJob
        from gopt.runtime.parameter_server.run_record import check_recordable

        faults = FaultOptions(
            OnNan(self.nan), None if self.stop is None else StopFault(self.stop), self.on_trainer_loss == "continue",
            self.staleness, tell, summarise,
        )  # fmt: skip
        server_job = ServerJob.read(job, self.trainers, self.roles)
        faults.check(server_job.plan)
        check_recordable(job, server_job.plan)
        return replace(server_job, faults=faults)


class RunKeywords(TypedDict, total=False):
    """The fields of ``RunOptions`` as keywords of a verb."""

    settings: Mapping[str, float | str]
    state: FilePath | None
    shuffle: int | None
    last: str | None
    batch_size: int | None
    draws: int | None
    checkpoint: FilePath | None
    every: int
    keep: int
    resume: bool
    stop_on_nan: bool
    startup: bool
    sync_init: str | None
    tuning: bool
    audit: int | None
    trace: FilePath | None
    record: FilePath | None
    deadline: float
    eval: FilePath | None
    eval_data: FilePath | Mapping[str, Array] | Iterable[Any] | None
    eval_every: int
    keep_best: str | None
    patience: int
    tensorboard: FilePath | None
    peak_flops: float | None
    trainers: int | None
    roles: str | None
    on_trainer_loss: str
    nan: str
    stop: str | None
    staleness: int | None
