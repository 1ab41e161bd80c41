"""The options of ``gopt derive``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from gopt.errors import OptionError
from gopt.frontends.derive.losses import LOSSES, Criterion
from gopt.frontends.derive.optimizers import OPTIMIZERS, Optimizer
from gopt.frontends.derive.schedules import SCHEDULES, ScheduleFormula
from gopt.options.records import check_least, check_types, spelled
from gopt.text.suggestions import did_you_mean

BATCHES = 3
"""Batches that are drawn for the check of gradients."""
DYNAMIC = "dynamic"
"""A loss scale that follows the overflows, as torch's GradScaler does."""
LARGEST = float(np.finfo(np.float32).max)
"""Of float32, in which a step computes scalars."""
CRITERION = ("class_axis", "ignore_index", "label_smoothing")
"""Options of an attached loss."""


class Norms(Enum):
    """Whether BatchNormalization and Dropout keep the inference form of the forward model, or train."""

    KEEP = "keep"
    TRAIN = "train"


@spelled
@dataclass(frozen=True, slots=True, kw_only=True)
class DeriveOptions:
    """Options of a derivation; raises OptionError for values making no step.

    ``loss``: a name in LOSSES, or a scalar output of the model. ``optimizer_options``, ``schedule_options``: such as
    ``{"eps": 1e-6}``; missing ones have their defaults. ``dims``: sizes of symbolic dimensions. ``trainable``,
    ``freeze``: patterns of names. ``seed``: of the batches of the check; ``data``: batches of the user instead, as
    ``gopt run`` reads them, or ''. ``values``: weights are stored values; else floating inputs, and nothing is
    confirmed.
    """

    loss: str
    optimizer: str
    lr: float | None = None
    optimizer_options: Mapping[str, float] = field(default_factory=dict)
    weight_decay: float | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    loss_scale: float | str | None = None
    schedule: str | None = None
    schedule_options: Mapping[str, float] = field(default_factory=dict)
    prediction: str = ""
    class_axis: int | None = None
    ignore_index: int | None = None
    label_smoothing: float | None = None
    batchnorm: Norms = Norms.KEEP
    dropout: Norms = Norms.KEEP
    trainable: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    dims: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    data: str = ""
    values: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        check_least(self, seed=0)
        for name, size in self.dims.items():
            if not 0 < size < 2**31:
                raise OptionError(f"--dim {name} cannot be {size}", "give a size, such as --dim batch=16")
        if self.optimizer not in OPTIMIZERS:
            hint = did_you_mean(self.optimizer, OPTIMIZERS) or f"there are {', '.join(OPTIMIZERS)}"
            raise OptionError(f"--optimizer {self.optimizer!r} is unknown", hint)
        _check_options(
            f"--optimizer {self.optimizer}", self.optimizer_options, self.rule.options, "--optimizer", OPTIMIZERS
        )
        if self.schedule is not None and self.schedule not in SCHEDULES:
            hint = did_you_mean(self.schedule, SCHEDULES) or f"there are {', '.join(SCHEDULES)}"
            raise OptionError(f"--schedule {self.schedule!r} is unknown", hint)
        scheduled = self.scheduled
        _check_options(
            f"--schedule {self.schedule}" if scheduled else "a step without --schedule", self.schedule_options,
            scheduled.options if scheduled else {}, "--schedule", SCHEDULES,
        )  # fmt: skip
        if scheduled:
            for name, value in scheduled.options.items():
                if value is None and name not in self.schedule_options:
                    raise OptionError(f"--schedule {self.schedule} needs {flag(name)}", f"give {flag(name)} 1000")
        self._check_criterion()
        self._check_numbers()

    def _check_criterion(self) -> None:
        """Raise OptionError for an unknown option of the loss, or a value out of range."""
        loss = LOSSES.get(self.loss)
        for name in CRITERION:
            if loss is not None and getattr(self, name) is not None and name not in loss.options:
                raise OptionError(f"--loss {self.loss} has no {flag(name)}", f"leave {flag(name)} out")
        share = self.label_smoothing
        if share is not None and not 0 <= share < 1:
            raise OptionError(f"--label-smoothing cannot be {share}", "give a number from 0 to below 1")
        if self.ignore_index is not None and not -(2**63) <= self.ignore_index < 2**63:
            raise OptionError(f"--ignore-index cannot be {self.ignore_index}", "give a label, such as -100")

    def _check_numbers(self) -> None:
        """Raise OptionError for numbers out of range, or beyond float32."""
        for name in ("clip_norm", "clip_value", "lr"):
            bound = getattr(self, name)
            if bound is not None and not (_is_held(bound) and bound > 0):
                raise OptionError(f"{flag(name)} cannot be {bound}", "give a number above 0 that float32 holds")
        if self.clip_norm is not None and self.clip_value is not None:
            raise OptionError("--clip-norm cannot be combined with --clip-value", "take one of them")
        decay = self.weight_decay
        if decay is not None and not (_is_held(decay) and decay >= 0):
            raise OptionError(f"--weight-decay cannot be {decay}", "give 0 or a number above that float32 holds")
        scale = self.loss_scale
        right = scale in (None, DYNAMIC) or (_is_number(scale) and float(scale) > 0 and _is_held(float(scale)))
        if not right:
            hint = "give dynamic, or a number above 0 that float32 holds"
            raise OptionError(f"--loss-scale cannot be {scale!r}", hint)

    @property
    def rule(self) -> Optimizer:
        return OPTIMIZERS[self.optimizer]

    @property
    def criterion(self) -> Criterion:
        return Criterion(self.class_axis, self.ignore_index, self.label_smoothing)

    @property
    def scheduled(self) -> ScheduleFormula | None:
        return None if self.schedule is None else SCHEDULES[self.schedule]

    @property
    def decay(self) -> float:
        return self.rule.weight_decay if self.weight_decay is None else self.weight_decay


def flag(name: str) -> str:
    """The flag of an option: ``clip_norm`` -> ``--clip-norm``. The two betas of Adam are one option."""
    return "--betas" if name in ("beta1", "beta2") else f"--{name.replace('_', '-')}"


def _check_options(
    owner: str, options_set: Mapping[str, float], accepted: Mapping[str, object], option: str,
    table: Mapping[str, Optimizer] | Mapping[str, ScheduleFormula],
) -> None:  # fmt: skip
    """Raise OptionError for an unknown option of ``owner``, or a value out of range. ``option``: selects the owner in
    ``table``."""
    for name, value in options_set.items():
        if name not in accepted:
            takers = " or ".join(owner_name for owner_name, rule in table.items() if name in rule.options)
            has = ", ".join(dict.fromkeys(map(flag, accepted))) or "none"
            raise OptionError(
                f"{owner} has no {flag(name)}",
                f"it has {has}" if accepted else f"leave {flag(name)} out, or take {option} {takers}",
            )
        low = name in ("total_steps", "step_size")
        share = name in ("beta1", "beta2", "alpha", "momentum")
        if (
            not abs(value) <= LARGEST
            or value < 0
            or (low and (value < 1 or value != int(value)))
            or (share and value >= 1)
        ):
            what = "a whole number from 1" if low else "a number from 0 to below 1" if share else "a number from 0"
            raise OptionError(f"{flag(name)} cannot be {value:g}", f"give {what}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_held(value: float) -> bool:
    """Return whether float32 holds a number: not as infinity, nor as zero unless zero."""
    return abs(value) <= LARGEST and (value == 0 or bool(np.float32(value)))
