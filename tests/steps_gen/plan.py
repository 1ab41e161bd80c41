"""A step in a few words, and how one is drawn."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace

NETWORKS = (
    "mlp", "tied", "elementwise", "embedding", "embedding-tied", "layer-norm", "batch-norm", "weight-norm",
    "reparametrised", "singles", "all-scalar", "attention", "convolution", "flat-buffer", "twins",
)  # fmt: skip
RULES = (
    "sgd", "momentum", "nesterov", "adam", "amsgrad", "soft-sign", "lion", "adagrad", "rms", "adamax", "rows",
    "centred", "trust", "normalised", "cautious", "kept", "delayed", "dual", "rprop", "muon", "flat-state",
    "turned-state", "schedule-free",
)  # fmt: skip
FORMS = ("sub", "add-neg", "exp", "relative", "lerp", "factor", "sum", "bounded")
GATES = ("none", "flag", "flag-number", "every", "finite", "small", "accumulate")
GATE_FORMS = ("where", "not-where", "lerp", "mix", "step")
TAILS = (
    "identity", "mul-one", "clip", "neg-neg", "cast", "wide-pair", "reshape", "flat-pair", "transpose-pair", "expand",
    "add-zero", "div-one", "project",
)  # fmt: skip
LAYOUTS = ("none", "identity", "reshape", "flat-pair", "transpose-pair", "cast", "mul-one", "joined")
CLIPS = ("none", "value", "norm", "global", "global-flat", "global-max")
DECAYS = ("none", "coupled", "decoupled", "absolute")
SCALES = ("none", "constant", "state", "dynamic")
PRECISIONS = ("single", "cast", "half", "master")
SCHEDULES = ("none", "warm-up", "integer", "table", "if", "if-captures")
MASKS = ("none", "update", "forward", "input", "input-update")
AVERAGES = ("none", "ema", "lookahead")
RATES = ("shared", "own", "rows")
TRAPS = ("none", "loss-rate", "count", "batch-mean")
"""Updates that read a rank's own batch past its gradients: none is right but a refusal."""


@dataclass(frozen=True)
class Plan:
    """What a step is made of. Every default is the plainest choice, so that a failing plan can be made smaller."""

    seed: int = 0
    network: str = "mlp"
    widths: tuple[int, ...] = (3, 4, 2)
    batch: int = 4
    bias: bool = True
    activation: str = "Tanh"
    loss: str = "squares"
    precision: str = "single"
    scale: str = "none"
    frozen: bool = False
    rules: tuple[str, ...] = ("sgd",)
    form: str = "sub"
    decay: str = "none"
    layout: str = "none"
    """What stands between a gradient and its update, and changes nothing."""
    clip: str = "none"
    clip_layout: str = "none"
    """The same, around the clip."""
    gate: str = "none"
    gate_form: str = "where"
    tail: tuple[str, ...] = ()
    """What stands between a new value and its output."""
    tail_on: str = "parameters"
    mask: str = "none"
    average: str = "none"
    schedule: str = "none"
    rates: str = "shared"
    metric: bool = False
    trap: str = "none"
    joint: bool = False
    """All parameters are updated as one row, with states of one row."""
    function: bool = False
    """The update of each parameter is a function of the model."""
    scrambled: bool = False
    """Random names, and a random order of nodes that do not depend on each other."""

    def told(self) -> str:
        """What is not the default, in one line."""
        plain = Plan()
        said = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(plain, field.name)
        ]
        return " ".join(said).replace("'", "").replace(", ", ",") or "plain"

    def smaller(self) -> list[Plan]:
        """The plans with one choice fewer."""
        plain = Plan()
        found = [
            replace(self, **{field.name: getattr(plain, field.name)})
            for field in fields(self)
            if getattr(self, field.name) != getattr(plain, field.name)
        ]
        found += [replace(self, rules=(rule,)) for rule in self.rules if len(self.rules) > 1]
        found += [replace(self, tail=(tail,)) for tail in self.tail if len(self.tail) > 1]
        return found


KEPT = (3, 4, 5, 6, 99)
"""How many choices of a drawn plan are kept: many together hide one another's faults."""


def draw(seed: int) -> Plan:
    """The plan of a seed: some choices at random, the rest plain."""
    r = random.Random(seed)
    full, plain = _full(r, seed), Plan()
    always = {"seed", "scrambled"}
    changed = [f.name for f in fields(full) if getattr(full, f.name) != getattr(plain, f.name) and f.name not in always]
    kept = set(r.sample(changed, min(len(changed), r.choice(KEPT)))) | always
    return replace(plain, **{name: getattr(full, name) for name in kept})


def _full(r: random.Random, seed: int) -> Plan:
    """Every choice at random; about half are plain."""

    def some(choices: tuple[str, ...], plain: float = 0.55) -> str:
        return choices[0] if r.random() < plain else r.choice(choices)

    network = some(NETWORKS, 0.3)
    width = r.choice([1, 2, 2, 3, 5])
    middle = r.choice([1, 2, 4, 4, 7])
    widths = (r.choice([1, 2, 3, 3, 6]), *([middle] * r.choice([0, 1, 1, 1, 2])), width)
    if network not in ("mlp", "elementwise"):
        widths = (widths[0], middle, max(width, 2))
    precision = some(PRECISIONS, 0.7)
    return Plan(
        seed=seed,
        network=network,
        widths=widths,
        batch=r.choice([1, 2, 4, 4, 4, 5]),
        bias=r.random() < 0.8,
        activation=r.choice(["Tanh", "Tanh", "Relu", "Sigmoid"]),
        loss="cross-entropy" if r.random() < 0.3 and widths[-1] > 1 else some(("squares", "sum"), 0.85),
        precision=precision,
        scale=some(SCALES, 0.75),
        frozen=r.random() < 0.1,
        rules=tuple(r.choice(RULES) for _ in range(r.choice([1, 1, 1, 2, 3]))),
        form=some(FORMS),
        decay=some(DECAYS),
        layout=some(LAYOUTS),
        clip=some(CLIPS),
        clip_layout=some(LAYOUTS[:-1]),
        gate=some(GATES),
        gate_form=some(GATE_FORMS, 0.4),
        tail=tuple(r.choice(TAILS) for _ in range(r.choice([0, 0, 0, 1, 1, 2, 3]))),
        tail_on=r.choice(["parameters", "all"]),
        mask=some(MASKS, 0.75),
        average=some(AVERAGES, 0.75),
        schedule=some(SCHEDULES, 0.6),
        rates=some(RATES, 0.8),
        metric=r.random() < 0.15,
        trap=some(TRAPS, 0.96),
        joint=precision == "single" and r.random() < 0.06,
        function=r.random() < 0.07,
        scrambled=r.random() < 0.7,
    )
