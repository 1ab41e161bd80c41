"""Training steps in a few words: small networks with an update of any of many kinds, written out as ONNX."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
from helpers import Builder, Network, perceptron

NORMS = [
    "none", "sumsquare-chain", "mulsum-sum", "pow-concat", "l2-stack", "l2-concat-keepdims", "abs-max", "mean-square",
    "sqrt-then-square", "per-tensor", "l1-chain",
]  # fmt: skip
CHECKS = ["none", "isinf-any", "times-zero", "max-below-inf", "isnan-min", "concat-flags"]
DIRECTIONS = ["gradient", "momentum", "nesterov", "sign", "adam", "amsgrad", "adagrad", "rms-momentum", "adamax"]


@dataclass(frozen=True)
class Recipe:
    """A training step in a few words."""

    widths: tuple[int, ...] = (3, 5, 2)
    batch: int = 4
    bias: bool = True
    tied: bool = False
    half: bool = False
    loss_scale: bool = False
    frozen: int = -1
    """Number of the parameter that no update touches; -1 for none."""
    passed_on: bool = False
    """The frozen parameter has an output all the same."""
    norm: str = "none"
    check: str = "none"
    direction: tuple[str, ...] = ("adam",)
    """Update rules, dealt out to the parameters in turn."""
    clip_value: bool = False
    decay: str = "none"
    mask: bool = False
    ema: bool = False
    own_constants: bool = False
    """Every parameter has a learning rate of its own."""
    schedule: bool = False
    accumulate: bool = False
    lr_input: bool = True
    second_clip: bool = False
    """The finished directions are clipped by their global norm: a second level of scalar calls."""
    metric: bool = False
    """The norm of all gradients is an output."""
    trust: bool = False
    """A ratio of norms per tensor, as in LAMB."""
    rows: bool = False
    """A second moment per row: no elementwise update."""
    dynamic: bool = False
    """The loss scale follows the finite check."""
    loss: str = "mean"
    """How the loss is taken over samples (``helpers.perceptron``)."""


@dataclass
class Writer:
    """Writes the update of a recipe behind a network's gradients."""

    recipe: Recipe
    b: Builder
    net: Network
    states: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    """Name, new value and shape of every optimizer state."""
    gate: str = ""
    scale: str = ""

    def write(self) -> None:
        b, recipe = self.b, self.recipe
        frozen = recipe.frozen if len(self.net.params) > 1 else -1
        trained = [name for place, name in enumerate(self.net.params) if place != frozen]
        gradients = {name: self.net.gradients[name] for name in trained}
        rate = b.input("lr", ()) if recipe.lr_input else b.const(0.01)
        if recipe.schedule:
            step = b.state("step", np.float32(1))
            new = b.op("Add", step, b.const(1.0))
            rate = b.op("Mul", rate, b.op("Min", b.const(1.0), b.op("Div", new, b.const(10.0))))
            self.states.append((step, new, ()))
        if recipe.accumulate:
            gradients = self._accumulated(gradients)
        if recipe.check != "none":
            fine = self._finite(list(gradients.values()))
            self.gate = b.op("And", self.gate, fine) if self.gate else fine
        if self.scale:
            grown = b.op("Mul", self.scale, b.const(1.125))
            if recipe.dynamic and recipe.check != "none":
                grown = b.op("Where", fine, grown, b.op("Mul", self.scale, b.const(0.5)))
            self.states.append((self.scale, grown, ()))
        if recipe.norm != "none":
            gradients = self._clipped(gradients)
        b.output("loss", self.net.loss, ())
        if recipe.metric:
            squares = [b.op("ReduceSumSquare", g, keepdims=0) for g in gradients.values()]
            b.output("norm", b.op("Sqrt", squares[0] if len(squares) == 1 else b.op("Sum", *squares)), ())
        ways = {name: self._way(place, name, gradients[name]) for place, name in enumerate(trained)}
        if recipe.second_clip:
            ways = self._second_clip(ways)
        for place, name in enumerate(trained):
            self._update(place, name, ways[name], rate)
        if recipe.passed_on and 0 <= frozen < len(self.net.params):
            name = list(self.net.params)[frozen]
            b.output(f"{name}_out", b.op("Identity", name), self.net.params[name])
        for name, new, shape in self.states:
            b.output(f"{name}_out", new, shape)

    def _accumulated(self, gradients: dict[str, str]) -> dict[str, str]:
        b = self.b
        micro = b.state("micro", np.float32(1))
        count = b.op("Add", micro, b.const(1.0))
        self.gate = b.op("GreaterOrEqual", count, b.const(2.0))
        self.states.append((micro, b.op("Where", self.gate, b.const(0.0), count), ()))
        used = {}
        for name, gradient in gradients.items():
            shape = self.net.params[name]
            held = b.small(f"{name}.acc", shape)
            total = b.op("Add", held, gradient)
            zero = b.const(np.zeros(shape))
            self.states.append((held, b.op("Where", self.gate, zero, total), shape))
            used[name] = b.op("Mul", total, b.const(0.5))
        return used

    def _finite(self, gradients: list[str]) -> str:
        b, way = self.b, self.recipe.check
        if way == "times-zero":
            parts = [b.op("ReduceSum", b.op("Mul", g, b.const(0.0)), keepdims=0) for g in gradients]
            total = parts[0]
            for part in parts[1:]:
                total = b.op("Add", total, part)
            return b.op("Equal", total, b.const(0.0))
        if way == "max-below-inf":
            parts = [b.op("ReduceMax", b.op("Abs", g), keepdims=0) for g in gradients]
            top = parts[0] if len(parts) == 1 else b.op("Max", *parts)
            return b.op("Less", top, b.const(np.inf))
        if way == "isnan-min":
            fine = None
            for g in gradients:
                good = b.op("Not", b.op("Or", b.op("IsNaN", g), b.op("IsInf", g)))
                least = b.op("Cast", b.op("ReduceMin", b.op("Cast", good, to=1), keepdims=0), to=9)
                fine = least if fine is None else b.op("And", fine, least)
            assert fine is not None
            return fine
        flags = [b.op("ReduceMax", b.op("Cast", b.op("IsInf", g), to=1), keepdims=0) for g in gradients]
        if way == "concat-flags":
            rows = [b.op("Unsqueeze", flag, b.const([0], "int64")) for flag in flags]
            total = b.op("ReduceSum", b.op("Concat", *rows, axis=0), keepdims=0)
        else:
            total = flags[0] if len(flags) == 1 else b.op("Sum", *flags)
        return b.op("Equal", total, b.const(0.0))

    def _clipped(self, gradients: dict[str, str]) -> dict[str, str]:
        b, way = self.b, self.recipe.norm
        values = list(gradients.values())
        bound, one, tiny = b.const(0.3), b.const(1.0), b.const(1e-6)

        def chain(parts: list[str], start: str) -> str:
            for part in parts:
                start = b.op("Add", start, part)
            return start

        def stack(parts: list[str]) -> str:
            return b.op("Concat", *(b.op("Unsqueeze", part, b.const([0], "int64")) for part in parts), axis=0)

        def coefficient(norm: str) -> str:
            return b.op("Min", one, b.op("Div", bound, b.op("Add", norm, tiny)))

        if way == "per-tensor":
            return {name: b.op("Mul", g, coefficient(b.op("ReduceL2", g, keepdims=0))) for name, g in gradients.items()}
        if way == "sumsquare-chain":
            norm = b.op("Sqrt", chain([b.op("ReduceSumSquare", g, keepdims=0) for g in values], b.const(0.0)))
        elif way == "mulsum-sum":
            norm = b.op("Sqrt", b.op("Sum", *(b.op("ReduceSum", b.op("Mul", g, g), keepdims=0) for g in values)))
        elif way == "pow-concat":
            squares = [b.op("ReduceSum", b.op("Pow", g, b.const(2.0)), keepdims=0) for g in values]
            norm = b.op("Sqrt", b.op("ReduceSum", stack(squares), keepdims=0))
        elif way == "l2-stack":
            norm = b.op("ReduceL2", stack([b.op("ReduceL2", g, keepdims=0) for g in values]), keepdims=0)
        elif way == "l2-concat-keepdims":
            one_d = b.const([1], "int64")
            rows = [b.op("Reshape", b.op("ReduceL2", g, keepdims=1), one_d) for g in values]
            norm = b.op("ReduceL2", b.op("Concat", *rows, axis=0), keepdims=0)
        elif way == "abs-max":
            tops = [b.op("ReduceMax", b.op("Abs", g), keepdims=0) for g in values]
            norm = tops[0]
            for top in tops[1:]:
                norm = b.op("Max", norm, top)
        elif way == "mean-square":
            norm = b.op("Sqrt", chain([b.op("ReduceMean", b.op("Mul", g, g), keepdims=0) for g in values], tiny))
        elif way == "sqrt-then-square":
            norms = [b.op("Sqrt", b.op("ReduceSumSquare", g, keepdims=0)) for g in values]
            norm = b.op("Sqrt", chain([b.op("Mul", n, n) for n in norms], b.const(0.0)))
        else:
            norm = chain([b.op("ReduceL1", g, keepdims=0) for g in values], b.const(0.0))
        scale = coefficient(norm)
        return {name: b.op("Mul", g, scale) for name, g in gradients.items()}

    def _second_clip(self, ways: dict[str, str]) -> dict[str, str]:
        b = self.b
        total = b.const(np.zeros((1, 1)))
        for way, shape in zip(ways.values(), (self.net.params[name] for name in ways)):
            axes = b.const(list(range(len(shape))), "int64")
            square = b.op("ReduceSum", b.op("Mul", way, way), axes, keepdims=1)
            total = b.op("Add", total, square if len(shape) == 2 else b.op("Reshape", square, b.const([1, 1], "int64")))
        scale = b.op("Reciprocal", b.op("Max", b.const(1.0), b.op("Sqrt", total)))
        flat = b.op("Reshape", scale, b.const([1], "int64"))
        return {name: b.op("Mul", way, flat) for name, way in ways.items()}

    def _kept(self, name: str, new: str, shape: tuple[int, ...]) -> None:
        """A state's new value, gated."""
        self.states.append((name, self._gated(new, name), shape))

    def _gated(self, new: str, old: str) -> str:
        return self.b.op("Where", self.gate, new, old) if self.gate else new

    def _way(self, place: int, name: str, gradient: str) -> str:
        """Where a parameter is to go, before its learning rate."""
        b, recipe, shape = self.b, self.recipe, self.net.params[name]
        if recipe.clip_value:
            gradient = b.op("Clip", gradient, b.const(-0.1), b.const(0.1))
        if recipe.decay == "coupled":
            gradient = b.op("Add", gradient, b.op("Mul", name, b.const(0.02)))
        if recipe.rows and len(shape) == 2:
            square = b.op("ReduceMean", b.op("Mul", gradient, gradient), b.const([1], "int64"), keepdims=1)
            held = b.small(f"{name}.row", (shape[0], 1))
            new = b.op("Add", b.op("Mul", held, b.const(0.9)), b.op("Mul", square, b.const(0.1)))
            self._kept(held, new, (shape[0], 1))
            way = b.op("Div", gradient, b.op("Sqrt", b.op("Add", new, b.const(1e-3))))
        else:
            way = self._direction(recipe.direction[place % len(recipe.direction)], name, gradient, shape)
        if recipe.mask:
            way = b.op("Mul", way, b.const((b.generator.random(shape) < 0.7).astype(np.float32)))
        if recipe.trust:
            norms = b.op("ReduceL2", name, keepdims=0), b.op("ReduceL2", way, keepdims=0)
            way = b.op("Mul", way, b.op("Div", norms[0], b.op("Add", norms[1], b.const(1e-2))))
        return way

    def _update(self, place: int, name: str, way: str, rate: str) -> None:
        b, recipe, shape = self.b, self.recipe, self.net.params[name]
        if recipe.own_constants:
            rate = b.op("Mul", rate, b.const(1.0 + 0.25 * place))
        held = name
        if recipe.decay == "decoupled":
            held = b.op("Mul", name, b.op("Sub", b.const(1.0), b.op("Mul", rate, b.const(0.1))))
        new = self._gated(b.op("Sub", held, b.op("Mul", way, rate)), name)
        b.output(f"{name}_out", new, shape)
        if recipe.ema:
            copy = b.parameter(f"{name}.ema", shape)
            mixed = b.op("Add", b.op("Mul", copy, b.const(0.9)), b.op("Mul", new, b.const(0.1)))
            self.states.append((copy, mixed, shape))

    def _direction(self, way: str, name: str, gradient: str, shape: tuple[int, ...]) -> str:
        b = self.b
        if way == "gradient":
            return gradient
        if way == "adagrad":
            total = b.small(f"{name}.sum", shape)
            new = b.op("Add", total, b.op("Mul", gradient, gradient))
            self._kept(total, new, shape)
            return b.op("Div", gradient, b.op("Add", b.op("Sqrt", new), b.const(1e-3)))
        first = b.small(f"{name}.m", shape)
        if way in ("momentum", "nesterov"):
            new = b.op("Add", b.op("Mul", first, b.const(0.9)), gradient)
            self._kept(first, new, shape)
            return new if way == "momentum" else b.op("Add", gradient, b.op("Mul", new, b.const(0.9)))
        mixed = b.op("Add", b.op("Mul", first, b.const(0.9)), b.op("Mul", gradient, b.const(0.1)))
        if way == "sign":
            self._kept(first, mixed, shape)
            # A soft sign: one that flips with the last bit would be no difference worth the name.
            return b.op("Div", mixed, b.op("Add", b.op("Abs", mixed), b.const(1e-2)))
        second = b.small(f"{name}.v", shape)
        if way == "adamax":
            top = b.op("Max", b.op("Mul", second, b.const(0.99)), b.op("Abs", gradient))
            self._kept(first, mixed, shape)
            self._kept(second, top, shape)
            return b.op("Div", mixed, b.op("Add", top, b.const(1e-2)))
        square = b.op("Mul", gradient, gradient)
        spread = b.op("Add", b.op("Mul", second, b.const(0.95)), b.op("Mul", square, b.const(0.05)))
        self._kept(second, spread, shape)
        if way == "rms-momentum":
            step = b.op("Div", gradient, b.op("Add", b.op("Sqrt", spread), b.const(1e-2)))
            new = b.op("Add", b.op("Mul", first, b.const(0.9)), step)
            self._kept(first, new, shape)
            return new
        self._kept(first, mixed, shape)
        if way == "amsgrad":
            top = b.small(f"{name}.vmax", shape)
            spread = b.op("Max", top, spread)
            self._kept(top, spread, shape)
        return b.op("Div", mixed, b.op("Add", b.op("Sqrt", spread), b.const(1e-2)))


def build(recipe: Recipe) -> onnx.ModelProto:
    b = Builder(seed=1)
    scale = ""
    if recipe.loss_scale:
        scale = b.state("scale", np.float32(8))
    net = perceptron(
        b, recipe.widths, batch=recipe.batch, bias=recipe.bias, tied=recipe.tied, half=recipe.half, scale=scale,
        loss=recipe.loss,
    )  # fmt: skip
    writer = Writer(recipe, b, net)
    if scale:
        writer.scale = scale
    writer.write()
    return b.model()
