"""The options of ``gopt export``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from gopt.errors import OptionError
from gopt.options.records import check_types

MOST_STEPS = 1_000_000
"""Steps for which a schedule may be written down."""
DYNAMIC = "dynamic"
"""A loss scale that follows the overflows, as torch's GradScaler does."""


class Autocast(Enum):
    """The type in which ``torch.autocast`` runs the forward."""

    FP16 = "fp16"
    BF16 = "bf16"


class Schedules(Enum):
    """Where the learning rate of a scheduler is computed."""

    AUTO = "auto"
    """In the graph where the scheduler has a closed form, else outside: the rate is the input ``lr``."""
    GRAPH = "graph"
    INPUT = "input"


class Draws(Enum):
    """Where random numbers, such as dropout's, come from."""

    INPUTS = "inputs"
    """Inputs ``draw_0``, ``draw_1``, … with what they are drawn from: ``gopt run`` draws them by a seed."""
    NODES = "nodes"
    """Random nodes without a seed: each run draws others. ``gopt verify`` makes inputs of them."""


class Dynamic(Enum):
    """The dimension the exported step leaves open."""

    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of an export; raises OptionError for values making no step.

    ``clip_norm``, ``clip_value``: clips over the gradients of all optimizers. ``loss_scale``: a number, or DYNAMIC.
    ``ema``: the decay of averaged parameters. ``hyper``: group options that become inputs beside ``lr``. ``check``:
    steps compared with eager PyTorch. ``schedule_steps``: for how many a schedule outside of the graph is written down.
    ``outputs``: keep what the module returns; ``outputs_of``: what submodules return. ``values``: False for shapes
    alone, which cannot be compared. ``dynamic``: the number of samples is left open. ``evaluation``: write the forward
    in evaluation mode too.
    """

    clip_norm: float | None = None
    clip_value: float | None = None
    autocast: Autocast | None = None
    loss_scale: float | str | None = None
    ema: float | None = None
    schedules: Schedules = Schedules.AUTO
    draws: Draws = Draws.INPUTS
    hyper: tuple[str, ...] = ()
    seed: int = 0
    check: int = 3
    schedule_steps: int = 10_000
    outputs: bool = False
    outputs_of: tuple[str, ...] = ()
    values: bool = True
    dynamic: Dynamic | None = None
    evaluation: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("clip_norm", "clip_value"):
            bound = getattr(self, name)
            if bound is not None and not (math.isfinite(bound) and bound > 0):
                raise OptionError(f"--{name.replace('_', '-')} cannot be {bound}", "give a number above 0")
        if self.clip_norm is not None and self.clip_value is not None:
            raise OptionError("--clip-norm and --clip-value cannot be combined", "take one of them")
        scale = self.loss_scale
        if isinstance(scale, str) and scale != DYNAMIC:
            raise OptionError(f"--loss-scale cannot be {scale!r}", "give dynamic, or a number above 0")
        if isinstance(scale, float | int) and not (math.isfinite(scale) and scale > 0):
            raise OptionError(f"--loss-scale cannot be {scale}", "give dynamic, or a number above 0")
        if self.ema is not None and not 0 < self.ema < 1:
            raise OptionError(f"--ema cannot be {self.ema}", "give a decay between 0 and 1, such as 0.999")
        if self.dynamic is not None and not self.values:
            raise OptionError(
                "--dynamic cannot be combined with --no-values",
                "only a comparison shows what holds for any size",
            )
        if self.evaluation and not self.values:
            raise OptionError("--eval cannot be combined with --no-values", "only a comparison shows that it is right")
        if self.dynamic is not None and self.draws is Draws.NODES:
            raise OptionError(
                "--dynamic cannot be combined with --random nodes", "random nodes have one shape: take --random inputs"
            )
        if not 1 <= self.schedule_steps <= MOST_STEPS:
            raise OptionError(
                f"--schedule-steps cannot be {self.schedule_steps}", f"give a number from 1 to {MOST_STEPS}"
            )
        if self.check < 1:
            raise OptionError(f"--check cannot be {self.check}", "every export is compared for at least one step")

    @property
    def scales_loss(self) -> bool:
        return self.loss_scale is not None
