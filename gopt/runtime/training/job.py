"""Settings of a run, and the record of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gopt.artifact import manifest_check
from gopt.artifact.manifest import Manifest
from gopt.artifact.path_diagnostics import check_folder
from gopt.documents.records import OPTIONAL, Amount, Count, to_document
from gopt.errors import RunError
from gopt.records.mesh import Mesh
from gopt.runtime.training.array_source import Last, SampleOrder
from gopt.runtime.training.batch_stream import BatchStream
from gopt.runtime.training.evaluation import Evaluation, EvaluationMessage, EvaluationPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The options of ``gopt run``, the same on all ranks."""

    folder: Path
    data: str | BatchStream
    steps: int
    settings: Mapping[str, str] = field(default_factory=dict)
    """Hyper-parameter -> a number or a schedule."""
    state: str | None = None
    shuffle: int | None = None
    last: Last | None = None
    batch_size: int | None = None
    """Samples of a rank's batch, where the step leaves their number open; None: of the run that is continued."""
    draws: int | None = None
    """The seed of the random numbers that are drawn; None: of the run that is continued, else the default."""
    checkpoint: Path | None = None
    every: int = 0
    """Steps between checkpoints; 0 is one at the end."""
    keep: int = 2
    resume: bool = False
    stop_on_nan: bool = False
    sync_init: str | None = None
    """Axes along which the group's first rank gives the start values in common: ``all``, or such as ``dp+tp``."""
    startup: bool = True
    """Whether a run that starts anew takes its first states from start-up graphs where the folder has them."""
    tuning: bool = True
    """False: run the segments on a CPU as they are, to bisect; the results have the same bits."""
    audit: int | None = None
    """Steps between comparisons of what ranks hold in common; None: before each checkpoint; 0: none."""
    trace: Path | None = None
    """The file into which the first rank writes the timeline of all ranks, in Chrome's trace format."""
    peak_flops: float | None = None
    """Operations a second that one rank's device makes at most: the run says what share of it is used."""
    record: Path | None = None
    """The file into which the chief of a split writes in which order all received messages."""

    evaluation: EvaluationPlan | None = None

    def order(self, times: int, axis: int = 0, *, once: bool = False) -> SampleOrder:
        """How samples, counted by dimension ``axis``, are dealt out to steps of so many micro-steps."""
        return SampleOrder(self.shuffle, self.last or Last.CARRY, once, times, self.batch_size, axis)


@dataclass(frozen=True, slots=True)
class JobUsage:
    """The use of a step. ``tokens``: of all ranks, 0 where the batch has no tokens; ``memory``: the largest peak of a
    process by then, in bytes; ``flops``: of all ranks; ``peak``: operations a second of all ranks' devices, 0 if
    unknown."""

    tokens: int = 0
    memory: int = 0
    flops: int = 0
    peak: float = 0.0


Losses = tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMessage:
    """The first rank sends its launcher one line of JSON for each training step."""

    step: Count
    """The step is the number of updates since the start of training, this one included."""
    loss: float | None
    """The loss is the mean of the losses of all ranks, with the weights of --loss-reduction weighted:VALUE if any; null
    stands for a number that is not finite."""
    losses: Losses
    """The list has the loss of every rank, in the order of the ranks, with micro-steps the mean of theirs; null stands
    for a number that is not finite."""
    more_losses: Mapping[str, Losses] | None = field(default=None, metadata=OPTIONAL)
    """The table has the losses beside the first, by name, each a list as for the first; the key is absent when there is
    no other."""
    seconds: float
    """The step took this many seconds."""
    samples_per_second: float
    """The rate is the number of samples of all ranks divided by the seconds of the step."""
    tokens_per_second: float | None = field(default=None, metadata=OPTIONAL)
    """The rate is the number of tokens of all ranks divided by the seconds of the step; the key is absent where the
    batch has no token ids."""
    memory: Count = field(default=0, metadata=OPTIONAL)
    """The number is the largest memory of a process by then, in bytes, which the system has counted."""
    utilisation: Amount | None = field(default=None, metadata=OPTIONAL)
    """The share is of the peak of floating-point operations (--peak-flops); the key is absent where no peak is
    given."""
    hyper: Mapping[str, float | None] | None = field(default=None, metadata=OPTIONAL)
    """The table has the hyper-parameters of the step, such as its learning rate, by name; null stands for a number that
    is not finite."""
    evaluation: EvaluationMessage | None = field(default=None, metadata=OPTIONAL)
    """The evaluation was made on held-out data behind the step (--eval); the key is absent where none was."""
    cause: str = field(default="", metadata=OPTIONAL)
    """The text says where numbers end in a first step whose loss is not finite; the key is absent in other steps."""
    bytes_pushed: Count | None = field(default=None, metadata=OPTIONAL)
    """Of a split: the first trainer pushed this many bytes in the step."""
    bytes_pulled: Count | None = field(default=None, metadata=OPTIONAL)
    """Of a split: the first trainer pulled this many bytes in the step."""
    waited: Amount | None = field(default=None, metadata=OPTIONAL)
    """Of a split: the first trainer waited this many seconds for messages."""
    epoch: Amount | None = field(default=None, metadata=OPTIONAL)
    """Of a split whose samples are in a file: they were dealt out this many times by then; 1 is one pass."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One step as reported by the first rank: losses of all ranks (means over micro-steps), seconds, samples of all
    ranks. ``weights``: of the ranks' losses, if not equal."""

    step: int
    losses: tuple[float, ...]
    seconds: float
    samples: int
    more: Mapping[str, Any] = field(default_factory=dict)
    """Additional figures of a split's trainer: bytes pushed and pulled, seconds waited."""
    more_losses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Losses beside the first, by name, of all ranks."""
    hyper: Mapping[str, float] = field(default_factory=dict)
    """The hyper-parameters of the step."""
    evaluation: Evaluation | None = None
    """Of the states behind the step."""
    cause: str = ""
    """Of a first step whose loss is not finite: where the numbers end."""
    usage: JobUsage = JobUsage()
    weights: tuple[float, ...] = ()

    @classmethod
    def of(
        cls, step: int, losses: Sequence[Mapping[str, float]], seconds: float, samples: int,
        more: Mapping[str, Any] | None = None, hyper: Mapping[str, float] | None = None,
        evaluation: Evaluation | None = None, cause: str = "", usage: JobUsage | None = None,
        weights: Sequence[float] = (),
    ) -> Progress:  # fmt: skip
        """From the reports of all ranks: losses by name, the main loss first."""
        main, *further = ({name: tuple(loss[name] for loss in losses)} for name in losses[0])
        (per_rank,) = main.values()
        beside = {name: values for loss in further for name, values in loss.items()}
        return cls(
            step, per_rank, seconds, samples, more or {}, beside, hyper or {}, evaluation, cause, usage or JobUsage(),
            tuple(weights),
        )  # fmt: skip

    @property
    def loss(self) -> float:
        return mean(self.losses, self.weights)

    @property
    def means(self) -> dict[str, float]:
        """The losses beside the first, each the mean over ranks."""
        return {name: mean(losses, self.weights) for name, losses in self.more_losses.items()}

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, [self.loss, *self.means.values()]))

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def tokens(self) -> int:
        return self.usage.tokens

    @property
    def tokens_per_second(self) -> float:
        return self.usage.tokens / self.seconds if self.seconds else 0.0

    @property
    def memory(self) -> int:
        return self.usage.memory

    @property
    def utilisation(self) -> float:
        """The share of the peak of all ranks' devices used by the step's products and convolutions."""
        peak = self.usage.peak * self.seconds
        return self.usage.flops / peak if peak else 0.0

    @property
    def epoch(self) -> float:
        """The passes over the samples of a file by then, for a split; 0 for other runs."""
        return float(self.more.get("epoch", 0))

    def to_json(self) -> dict[str, Any]:
        usage, further = self.usage, {name: tuple(losses) for name, losses in self.more_losses.items()}
        message = StepMessage(
            step=self.step, loss=self.loss, losses=tuple(self.losses), more_losses=further or None,
            seconds=round(self.seconds, 6), samples_per_second=round(self.samples_per_second, 3),
            tokens_per_second=round(self.tokens_per_second, 3) if usage.tokens else None, memory=usage.memory,
            utilisation=round(self.utilisation, 6) if usage.peak else None, hyper=dict(self.hyper) or None,
            evaluation=None if self.evaluation is None else self.evaluation.message, cause=self.cause, **self.more,
        )  # fmt: skip
        return to_document(message)


def mean(values: Sequence[float], weights: Sequence[float] = ()) -> float:
    """The mean, with weights if any are above 0: a value of weight 0 is left out. NaN without values."""
    if any(weights):
        weighed = [weight * value for weight, value in zip(weights, values, strict=True) if weight]
        return sum(weighed) / sum(weights)
    return sum(values) / len(values) if values else math.nan


def not_finite(losses: Mapping[str, float]) -> str:
    """A message on the first loss that is no number, '' if all are numbers."""
    name = next((name for name, value in losses.items() if not math.isfinite(value)), None)
    if name is None:
        return ""
    return f"the loss is {losses[name]}" if len(losses) == 1 else f"the loss {name!r} is {losses[name]}"


def not_finite_error(losses: Mapping[str, float], done: int, cause: str = "") -> RunError:
    """The error for a loss that is no number. ``done``: steps before this step; ``cause``: of the first step, where the
    numbers end."""
    hint = "lower the learning rate" if done else "look there, for nothing was updated before"
    where = f" {cause or 'in the data or the first forward'}" if not done else ""
    return RunError(f"{not_finite(losses)}{where}", f"{hint}, or leave --stop-on-nan out")


def read_manifest(folder: Path) -> tuple[Manifest, Mesh]:
    """The manifest of an output folder, and the mesh; raises InputError."""
    check_folder(folder)
    manifest, mesh = manifest_check.read_manifest(folder)
    manifest_check.check_all_ranks(manifest, folder)
    return manifest, mesh
