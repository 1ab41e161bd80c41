"""The result of a run, and of a step as another process reports the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gopt.analysis.loss_reduction import LossRule
from gopt.artifact.checkpoint_index import BEST_DIR, INDEX_FILE, BestEntry, open_index
from gopt.documents.default_values import DefaultValue
from gopt.documents.draws import Draw
from gopt.documents.records import to_document
from gopt.runtime.training.job import Progress

if TYPE_CHECKING:
    from gopt.runtime.parameter_server.waits import ServerSummary


@dataclass(frozen=True, slots=True)
class NotFinite:
    """Steps whose loss is not finite: how many, and the first; where the numbers end, if known."""

    steps: int
    first: int
    cause: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"steps": self.steps, "first": self.first, **({"cause": self.cause} if self.cause else {})}


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of ``gopt run``. ``steps``: made by this run.

    ``asked``: the step of the training at which the run was to end; ``resumed``: the step from which the run continued,
    None for a start from the beginning. ``checkpoint``: the folder of checkpoints. Of a split, ``roles``: the number of
    trainers and servers, ``servers``: the counts of each server. ``draws``: the inputs of random numbers; inputs
    without data were drawn from ``seed``."""

    folder: Path
    engine: str
    ranks: int
    steps: Sequence[Progress]
    asked: int
    resumed: int | None = None
    checkpoint: Path | None = None
    shared_calls: int = 0
    roles: Mapping[str, int] | None = None
    servers: Sequence[ServerSummary] = ()
    record: Path | None = None
    """The record of the order of messages, where one was written."""

    seed: int | None = None
    draws: Mapping[str, Draw] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, DefaultValue] = field(default_factory=dict)
    """Hyper-parameters that the step has values for, which ``settings`` go before."""
    loss_reduction: str = LossRule.MEAN.value
    """The rule by which gradients were combined; losses are means over the ranks, weighed as the gradients are."""

    @cached_property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @cached_property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def best(self) -> tuple[int, BestEntry] | None:
        """The step of the best checkpoint, and its evaluation; None without a best checkpoint."""
        path = None if self.checkpoint is None else self.checkpoint / BEST_DIR
        if path is None or not (path / INDEX_FILE).is_file() or not any(step.evaluation for step in self.steps):
            return None
        index = open_index(path)
        return None if index.best is None else (index.step, index.best)

    @property
    def samples_per_second(self) -> float:
        return sum(step.samples for step in self.steps) / self.seconds if self.seconds else 0.0

    @property
    def usage(self) -> dict[str, float]:
        """Of all steps, where known: tokens a second, the peak of memory in bytes, the share of the peak of
        operations."""
        used = [step.usage for step in self.steps]
        fields: dict[str, float] = {}
        if any(usage.tokens for usage in used) and self.seconds:
            fields["tokens_per_second"] = round(sum(usage.tokens for usage in used) / self.seconds, 3)
        if used and used[-1].memory:
            fields["memory"] = max(usage.memory for usage in used)
        if used and used[-1].peak and self.seconds:
            fields["utilisation"] = round(sum(usage.flops for usage in used) / (used[-1].peak * self.seconds), 6)
        return fields

    @property
    def not_finite(self) -> NotFinite | None:
        """The steps with losses that are not finite numbers, if any."""
        failed = [step for step in self.steps if not step.finite]
        return NotFinite(len(failed), failed[0].step, failed[0].cause) if failed else None

    def to_json(self) -> dict[str, Any]:
        bad = self.not_finite
        record: dict[str, Any] = {
            "format": "gopt-run/1", "folder": str(self.folder), "engine": self.engine, "ranks": self.ranks,
            "shared_calls": self.shared_calls, "steps": len(self.steps), "asked": self.asked, "resumed": self.resumed,
            "first": self.steps[0].to_json() if self.steps else None,
            "last": self.steps[-1].to_json() if self.steps else None,
            "not_finite": None if bad is None else bad.to_json(),
            "seconds": round(self.seconds, 6),
            "samples_per_second": round(self.samples_per_second, 3),
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
        }  # fmt: skip
        if self.steps:
            record |= self.usage
        evaluated = [step for step in self.steps if step.evaluation is not None]
        if evaluated:
            last = evaluated[-1].evaluation
            record["evaluations"] = [
                {"step": step.step, **step.evaluation.to_json()} for step in evaluated if step.evaluation is not None
            ]
            record["ended"] = "patience" if last is not None and last.ends else None
            record["best"] = None
            if self.best is not None:
                step, entry = self.best
                record["best"] = {"checkpoint": f"{self.checkpoint}/{BEST_DIR}", "step": step, **to_document(entry)}
        if self.roles is not None:
            record["roles"] = dict(self.roles)
        if self.servers:
            record["servers"] = [server.to_json() for server in self.servers]
        hyper = {name: {"schedule": str(value), "of": "step"} for name, value in self.defaults.items()}
        hyper |= {name: {"schedule": value, "of": "--set"} for name, value in self.settings.items()}
        if hyper:
            record["hyper"] = hyper
        if self.draws:
            drawn = {name: to_document(draw) for name, draw in self.draws.items()}
            record["draws"] = {"seed": self.seed, "inputs": drawn}
        if self.record is not None:
            record["record"] = str(self.record)
        return record
