"""Evaluations of a running job's states on held-out data, and the choice of the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gopt.artifact.checkpoint_index import BestEntry
from gopt.documents.records import OPTIONAL, Amount, Count, to_document
from gopt.errors import OptionError
from gopt.text.sanitize import clean_line, show


@dataclass(frozen=True, slots=True)
class BestRule:
    """The metric by which evaluations are compared, and whether the highest value is best (``max``) or the lowest
    (``min``); None where the user did not say."""

    metric: str
    mode: str | None

    @classmethod
    def parse(cls, text: str) -> BestRule:
        """Of ``METRIC[:min|max]``. Raises OptionError."""
        metric, colon, mode = text.rpartition(":")
        if not colon:
            return cls(text, None)
        if not metric or mode not in ("min", "max"):
            raise OptionError(f"--keep-best cannot be {show(text)}", "write METRIC:min or METRIC:max")
        return cls(metric, mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """How a job evaluates. ``data``: as of the job, with an end. ``every``: steps between evaluations; 0: only at the
    end. ``patience``: evaluations without an improvement after which the job ends; 0: no limit."""

    model: Path
    data: str | Iterable[Any]
    every: int = 0
    best: BestRule | None = None
    patience: int = 0


@dataclass(frozen=True, slots=True)
class EvaluationMessage:
    """An evaluation in the message of a step."""

    values: Mapping[str, float | None]
    """The table has the mean of each metric over all samples, by name; null stands for a number that is not finite."""
    samples: Count
    """The evaluation read this many samples."""
    seconds: Amount
    """The evaluation took this many seconds."""
    best: bool | None = field(default=None, metadata=OPTIONAL)
    """The flag says whether the evaluation is the best so far; the key is absent without --keep-best."""
    without: Count | None = field(default=None, metadata=OPTIONAL)
    """The number counts the evaluations since the best one; the key is absent without --keep-best."""
    ends: bool | None = field(default=None, metadata=OPTIONAL)
    """The flag says whether the run ends because of them (--patience); the key is absent without --keep-best."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The means of the metrics over ``samples``, after a step.

    ``best``: whether this evaluation is the best so far; None without a rule. ``without``: evaluations since the best;
    ``ends``: whether the job ends for lack of improvement."""

    values: Mapping[str, float]
    samples: int
    seconds: float
    best: bool | None = None
    without: int = 0
    ends: bool = False

    @property
    def message(self) -> EvaluationMessage:
        """The evaluation in the message of its step."""
        chosen = (None, None, None) if self.best is None else (self.best, self.without, self.ends)
        return EvaluationMessage(dict(self.values), self.samples, round(self.seconds, 6), *chosen)

    def to_json(self) -> dict[str, Any]:
        return to_document(self.message)


@dataclass(slots=True)
class KeptChoice:
    """The best evaluation so far. ``kept``: the entry of the best evaluation, behind ``step``; ``without``: evaluations
    since then."""

    rule: BestRule
    patience: int
    kept: BestEntry | None = None
    step: int = 0
    without: int = 0

    def judged(self, evaluation: Evaluation, step: int) -> Evaluation:
        """The evaluation behind a step, compared with the earlier ones.

        A killed job may have kept the best of a step that the next job makes again: this step stays the best."""
        value = evaluation.values[self.rule.metric]
        mode = self.rule.mode or "min"
        sign = -1 if mode == "max" else 1
        better = math.isfinite(value) and (self.kept is None or sign * value < sign * self.kept.value)
        if better:
            self.kept, self.step = BestEntry(self.rule.metric, mode, value), step
        better = better or (self.kept is not None and (step, value) == (self.step, self.kept.value))
        self.without = 0 if better or step < self.step else self.without + 1
        return replace(evaluation, best=better, without=self.without, ends=0 < self.patience <= self.without)

    def resume(self, best: BestEntry | None, step: int, since: int) -> None:
        """Go on from the best checkpoint of a continued job, made at a step, so many evaluations ago. Raises
        OptionError where the checkpoint is best by another metric."""
        if best is not None and (best.metric, best.mode) != (self.rule.metric, self.rule.mode):
            raise OptionError(
                f"--keep-best {self.rule.metric}:{self.rule.mode}: the best checkpoint of the run that is continued is "
                f"that by {clean_line(best.metric)}:{best.mode}",
                f"write --keep-best {clean_line(best.metric)}:{best.mode}, or move the folder best away",
            )
        self.kept, self.step, self.without = best, step, max(since, 0)
