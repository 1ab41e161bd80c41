"""Write the step of a seed: forward, backward and update, cut at the gradients where its truth is known."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
from onnx import ModelProto
from steps_gen.tape import Tape, backward

from mesh_gen import losses, streams
from mesh_gen.losses import LOSSES
from mesh_gen.streams import BLOCKS, Batch, Stream

BESIDE = ("dense", "mlp", "attention", "norm", "positions")
"""Blocks that a block is drawn among."""
FEWER = (
    "dense", "mlp", "attention", "norm", "fold", "merge", "class", "drop", "mixer", "soft", "turned", "gram", "same",
    "batch-norm", "shared", "positions",
)  # fmt: skip
"""Blocks that tokens are left behind after. A roll, and a mean of all elements, are unproven: docs/proving.md."""


@dataclass(frozen=True)
class Recipe:
    """What a step is made of."""

    seed: int
    sizes: tuple[int, int, int, int]
    """Samples, tokens, features, heads."""
    begin: str
    blocks: tuple[str, ...]
    loss: str
    rule: str

    @classmethod
    def draw(cls, seed: int) -> Recipe:
        r = random.Random(seed)
        among = r.choice([[2, 4], [2, 3, 4], [1, 2, 4], [4, 6], [3, 5, 6], [4]])
        sizes = tuple(r.choice(among) for _ in range(4))
        blocks = tuple(r.choice(list(BLOCKS)) for _ in range(r.randint(1, 4)))
        return cls(
            seed, (*sizes[:3], sizes[3]), r.choice(["floats", "ids", "ids+positions"]), blocks,
            r.choice(list(LOSSES)), r.choice(["sgd", "momentum", "adam", "adam+clip"]),
        )  # fmt: skip

    @classmethod
    def with_block(cls, block: str, seed: int, draw: random.Random) -> Recipe:
        """The recipe of a seed, with a block among up to two others instead of its own."""
        blocks = [draw.choice(BESIDE) for _ in range(draw.randint(0, 2))]
        blocks.insert(draw.randint(0, len(blocks)), block)
        return replace(cls.draw(seed), blocks=tuple(blocks))

    @classmethod
    def dropped(cls, seed: int) -> Recipe:
        """The recipe of a seed, with fewer tokens behind a block."""
        draw = random.Random(seed)
        blocks = [draw.choice(FEWER) for _ in range(draw.randint(1, 3))]
        blocks.insert(draw.randint(1, len(blocks)), "drop")
        recipe = cls.draw(seed)
        loss = "weighted" if recipe.loss == "pooled" else recipe.loss
        sizes = draw.choice([2, 3, 4]), draw.choice([4, 5, 6, 8]), draw.choice([2, 3, 4, 8]), draw.choice([2, 4])
        return replace(recipe, loss=loss, blocks=tuple(blocks), sizes=sizes)

    def told(self) -> str:
        return f"{self.seed}: {self.sizes} {self.begin} | {' '.join(self.blocks)} | {self.loss} {self.rule}"


@dataclass(frozen=True)
class Step:
    """A step, and all that its truth needs."""

    recipe: Recipe
    model: ModelProto
    gradients: dict[str, str]
    """Parameter -> its gradient."""
    states: dict[str, str]
    """State -> its new value."""
    statistics: list[str]
    batch: Batch
    known: dict[str, np.ndarray]
    loss: str = "loss"

    @property
    def plain(self) -> ModelProto:
        return self.model


def _begun(s: Stream, recipe: Recipe) -> str:
    b, n, d, _ = recipe.sizes
    if recipe.begin == "floats":
        return s.feed("x", (b, n, d))
    rows = s.r.choice([2, 5, 7, 8])
    h = s.t.op("Gather", s.param(rows, d), s.feed("ids", (b, n), "int64", rows))
    if recipe.begin == "ids+positions":
        h = s.t.op("Add", h, s.t.op("Gather", s.param(n + 1, d), s.t.const(np.arange(n), "int64")))
    return h


def _update(t: Tape, rule: str, gradients: dict[str, str]) -> dict[str, str]:
    new: dict[str, str] = {}
    rate = t.const(0.05)
    if rule.endswith("clip"):
        squares = [t.op("ReduceSum", t.op("Mul", g, g), keepdims=0) for g in gradients.values()]
        total = squares[0]
        for each in squares[1:]:
            total = t.op("Add", total, each)
        bound = t.op("Min", t.const(1.0), t.op("Div", t.const(0.3), t.op("Sqrt", t.op("Add", total, t.const(1e-6)))))
        gradients = {name: t.op("Mul", g, bound) for name, g in gradients.items()}
    for name, g in gradients.items():
        way = g
        if rule != "sgd":
            old = t.state(f"{name}.m", t.generator.uniform(1e-3, 1e-2, t.shape(name)).astype(np.float32))
            way = new[old] = t.op("Add", t.op("Mul", old, t.const(0.9)), t.op("Mul", g, t.const(0.1)))
        if rule.startswith("adam"):
            old = t.state(f"{name}.v", t.generator.uniform(1e-2, 1e-1, t.shape(name)).astype(np.float32))
            square = new[old] = t.op(
                "Add", t.op("Mul", old, t.const(0.99)), t.op("Mul", t.op("Mul", g, g), t.const(0.01))
            )
            way = t.op("Div", way, t.op("Add", t.op("Sqrt", square), t.const(1e-2)))
        new[name] = t.op("Sub", name, t.op("Mul", way, rate))
    return new


def make(recipe: Recipe) -> Step:
    t = Tape(seed=recipe.seed % 1000)
    s = Stream(t, random.Random(recipe.seed + 1), recipe.sizes[3])
    h = _begun(s, recipe)
    for name in recipe.blocks:
        h = streams.ALL[name](s, h)
    if not s.params:
        h = s.t.op("Mul", h, s.param(1, around=1.0))
    loss, start, adjoint = losses.ALL[recipe.loss](s, h)
    gradients = backward(t, start, adjoint, set(s.params))
    gradients = {name: gradients[name] for name in s.params}
    t.output("loss", loss, ())
    states = {}
    for state, value in {**s.statistics, **_update(t, recipe.rule, gradients)}.items():
        states[state] = t.output(f"{state}_new", value, t.shape(value))
    model = t.model()
    real = {name: t.renamed.get(value, value) for name, value in gradients.items()}
    known = {t.renamed.get(name, name): value for name, value in t.values.items()}
    return Step(recipe, model, real, states, list(s.statistics), s.batch, known)
