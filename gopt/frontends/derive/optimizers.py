"""The optimizers, a record each, with PyTorch's formulas and defaults (the pages of ``torch.optim``).

An update is an ONNX function of a parameter. Computations on scalars alone, such as the bias corrections of Adam, are a
second function, in float64 like PyTorch's Python numbers; all parameters share the results. ``p``, ``g``: parameter and
gradient; ``lr``: the learning rate; ``t``: the number of this update, from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Decay(Enum):
    """How weight decay acts: COUPLED adds it to the gradient, DECOUPLED shrinks the parameter first."""

    COUPLED = "coupled"
    DECOUPLED = "decoupled"


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One optimizer.

    ``lr``: the default learning rate. ``update``: a function (the results of ``scalars``, else lr; p; g; states) ->
    (new p, new states), with the options as attributes. ``states``: tensors of each parameter, zero before the first
    step. ``scalars``: a function (lr, t, ``carried``) -> (results, new ``carried``), or ''. ``carried``: scalar states
    with the first values. ``options``: names of options with the defaults.
    """

    lr: float
    update: str
    states: tuple[str, ...] = ()
    scalars: str = ""
    results: tuple[str, ...] = ("lr",)
    carried: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, float] = field(default_factory=dict)
    decay: Decay = Decay.COUPLED
    weight_decay: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether the update depends on the number of steps."""
        return bool(self.scalars)


COUPLED_DECAY = """coupled <weight_decay> (p, g) => (new)
{
  w = Constant <value: tensor = @weight_decay> ()
  penalty = Mul (w, p)
  new = Add (g, penalty)
}"""
"""g + w p: the gradient of w ‖p‖² / 2 added."""

DECOUPLED_DECAY = """decoupled <weight_decay, one> (lr, p) => (new)
{
  w = Constant <value: tensor = @weight_decay> ()
  one = Constant <value: tensor = @one> ()
  share = Mul (lr, w)
  rest = Sub (one, share)
  new = Mul (p, rest)
}"""
"""p (1 - lr w)."""

_SGD = """sgd (lr, p, g) => (new)
{
  moved = Mul (lr, g)
  new = Sub (p, moved)
}"""

_MOMENTUM = """momentum <momentum> (lr, p, g, buffer) => (new, new_buffer)
{
  mu = Constant <value: tensor = @momentum> ()
  kept = Mul (mu, buffer)
  new_buffer = Add (kept, g)
  moved = Mul (lr, new_buffer)
  new = Sub (p, moved)
}"""

_NESTEROV = """nesterov <momentum> (lr, p, g, buffer) => (new, new_buffer)
{
  mu = Constant <value: tensor = @momentum> ()
  kept = Mul (mu, buffer)
  new_buffer = Add (kept, g)
  ahead = Mul (mu, new_buffer)
  along = Add (g, ahead)
  moved = Mul (lr, along)
  new = Sub (p, moved)
}"""

_MOMENTS = """
  b1 = Constant <value: tensor = @beta1> ()
  b2 = Constant <value: tensor = @beta2> ()
  r1 = Constant <value: tensor = @rest1> ()
  r2 = Constant <value: tensor = @rest2> ()
  kept_m = Mul (b1, m)
  added_m = Mul (r1, g)
  new_m = Add (kept_m, added_m)
  kept_v = Mul (b2, v)
  square = Mul (g, g)
  added_v = Mul (r2, square)
  new_v = Add (kept_v, added_v)
"""
"""Averages of gradients and of their squares."""

_ADAM_SCALARS = """adam_scalars <beta1, beta2> (lr, t) => (rate, correction)
{
  b1 = Constant <value: tensor = @beta1> ()
  b2 = Constant <value: tensor = @beta2> ()
  one = Constant <value: tensor = double {1}> ()
  p1 = Pow (b1, t)
  c1 = Sub (one, p1)
  p2 = Pow (b2, t)
  c2 = Sub (one, p2)
  rate = Div (lr, c1)
  correction = Sqrt (c2)
}"""

_ADAM = f"""adam <beta1, beta2, rest1, rest2, eps> (rate, correction, p, g, m, v) => (new, new_m, new_v)
{{{_MOMENTS}
  e = Constant <value: tensor = @eps> ()
  root = Sqrt (new_v)
  scaled = Div (root, correction)
  below = Add (scaled, e)
  along = Div (new_m, below)
  moved = Mul (rate, along)
  new = Sub (p, moved)
}}"""

_ADAGRAD = """adagrad <eps> (lr, p, g, sum) => (new, new_sum)
{
  e = Constant <value: tensor = @eps> ()
  square = Mul (g, g)
  new_sum = Add (sum, square)
  root = Sqrt (new_sum)
  below = Add (root, e)
  along = Div (g, below)
  moved = Mul (lr, along)
  new = Sub (p, moved)
}"""

_RMSPROP = """rmsprop <alpha, rest_alpha, eps> (lr, p, g, v) => (new, new_v)
{
  a = Constant <value: tensor = @alpha> ()
  r = Constant <value: tensor = @rest_alpha> ()
  e = Constant <value: tensor = @eps> ()
  kept = Mul (a, v)
  square = Mul (g, g)
  added = Mul (r, square)
  new_v = Add (kept, added)
  root = Sqrt (new_v)
  below = Add (root, e)
  along = Div (g, below)
  moved = Mul (lr, along)
  new = Sub (p, moved)
}"""

_ADAMAX_SCALARS = """adamax_scalars <beta1> (lr, t) => (rate)
{
  b1 = Constant <value: tensor = @beta1> ()
  one = Constant <value: tensor = double {1}> ()
  p1 = Pow (b1, t)
  c1 = Sub (one, p1)
  rate = Div (lr, c1)
}"""

_ADAMAX = """adamax <beta1, beta2, rest1, eps> (rate, p, g, m, u) => (new, new_m, new_u)
{
  b1 = Constant <value: tensor = @beta1> ()
  b2 = Constant <value: tensor = @beta2> ()
  r1 = Constant <value: tensor = @rest1> ()
  e = Constant <value: tensor = @eps> ()
  kept_m = Mul (b1, m)
  added_m = Mul (r1, g)
  new_m = Add (kept_m, added_m)
  kept_u = Mul (b2, u)
  size = Abs (g)
  raised = Add (size, e)
  new_u = Max (kept_u, raised)
  along = Div (new_m, new_u)
  moved = Mul (rate, along)
  new = Sub (p, moved)
}"""

_NADAM_SCALARS = """nadam_scalars <beta1, beta2, momentum_decay>
(lr, t, product) => (gradient_rate, moment_rate, correction, new_product)
{
  b1 = Constant <value: tensor = @beta1> ()
  b2 = Constant <value: tensor = @beta2> ()
  psi = Constant <value: tensor = @momentum_decay> ()
  one = Constant <value: tensor = double {1}> ()
  half = Constant <value: tensor = double {0.5}> ()
  base = Constant <value: tensor = double {0.96}> ()
  p2 = Pow (b2, t)
  c2 = Sub (one, p2)
  correction = Sqrt (c2)
  next_t = Add (t, one)
  here = Mul (t, psi)
  there = Mul (next_t, psi)
  power = Pow (base, here)
  next_power = Pow (base, there)
  half_power = Mul (half, power)
  half_next = Mul (half, next_power)
  share = Sub (one, half_power)
  next_share = Sub (one, half_next)
  mu = Mul (b1, share)
  next_mu = Mul (b1, next_share)
  new_product = Mul (product, mu)
  next_product = Mul (new_product, next_mu)
  rest_mu = Sub (one, mu)
  rest_product = Sub (one, new_product)
  rest_next = Sub (one, next_product)
  top = Mul (lr, rest_mu)
  gradient_rate = Div (top, rest_product)
  moment_top = Mul (lr, next_mu)
  moment_rate = Div (moment_top, rest_next)
}"""

_NADAM = f"""nadam <beta1, beta2, rest1, rest2, eps>
(gradient_rate, moment_rate, correction, p, g, m, v) => (new, new_m, new_v)
{{{_MOMENTS}
  e = Constant <value: tensor = @eps> ()
  root = Sqrt (new_v)
  scaled = Div (root, correction)
  below = Add (scaled, e)
  gradient_part = Mul (gradient_rate, g)
  moment_part = Mul (moment_rate, new_m)
  both = Add (gradient_part, moment_part)
  moved = Div (both, below)
  new = Sub (p, moved)
}}"""

_LION = """lion <beta1, beta2, rest1, rest2> (lr, p, g, m) => (new, new_m)
{
  b1 = Constant <value: tensor = @beta1> ()
  b2 = Constant <value: tensor = @beta2> ()
  r1 = Constant <value: tensor = @rest1> ()
  r2 = Constant <value: tensor = @rest2> ()
  kept = Mul (b1, m)
  added = Mul (r1, g)
  mixed = Add (kept, added)
  along = Sign (mixed)
  moved = Mul (lr, along)
  new = Sub (p, moved)
  kept_m = Mul (b2, m)
  added_m = Mul (r2, g)
  new_m = Add (kept_m, added_m)
}"""
"""Chen and others, Symbolic Discovery of Optimization Algorithms (2023), algorithm 2."""

_ADAM_OPTIONS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
_MOMENT_STATES = ("exp_avg", "exp_avg_sq")

OPTIMIZERS: Mapping[str, Optimizer] = {
    "sgd": Optimizer(1e-3, _SGD),
    "momentum": Optimizer(1e-3, _MOMENTUM, ("momentum_buffer",), options={"momentum": 0.9}),
    "nesterov": Optimizer(1e-3, _NESTEROV, ("momentum_buffer",), options={"momentum": 0.9}),
    "adam": Optimizer(1e-3, _ADAM, _MOMENT_STATES, _ADAM_SCALARS, ("rate", "correction"), options=_ADAM_OPTIONS),
    "adamw": Optimizer(
        1e-3, _ADAM, _MOMENT_STATES, _ADAM_SCALARS, ("rate", "correction"), options=_ADAM_OPTIONS,
        decay=Decay.DECOUPLED, weight_decay=1e-2,
    ),
    "adagrad": Optimizer(1e-2, _ADAGRAD, ("sum",), options={"eps": 1e-10}),
    "rmsprop": Optimizer(1e-2, _RMSPROP, ("square_avg",), options={"alpha": 0.99, "eps": 1e-8}),
    "adamax": Optimizer(2e-3, _ADAMAX, ("exp_avg", "exp_inf"), _ADAMAX_SCALARS, ("rate",), options=_ADAM_OPTIONS),
    "nadam": Optimizer(
        2e-3, _NADAM, _MOMENT_STATES, _NADAM_SCALARS, ("gradient_rate", "moment_rate", "correction"),
        carried={"mu_product": 1.0}, options={**_ADAM_OPTIONS, "momentum_decay": 4e-3},
    ),
    "lion": Optimizer(
        1e-4, _LION, ("exp_avg",), options={"beta1": 0.9, "beta2": 0.99}, decay=Decay.DECOUPLED,
    ),
}  # fmt: skip
"""By the name that ``--optimizer`` takes."""


def attributes(options: Mapping[str, float]) -> dict[str, float]:
    """Each option, and 1 minus the option, rounded once: 1 - beta in float64."""
    rests = {"beta1": "rest1", "beta2": "rest2", "alpha": "rest_alpha"}
    return {**options, **{rests[name]: 1 - value for name, value in options.items() if name in rests}}
