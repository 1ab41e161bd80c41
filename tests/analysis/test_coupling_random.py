"""Drawn forwards: what is called fine is the mean of the ranks' losses, whatever moved the samples about."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from forwards import TOKENS, WIDTH, axes, follows, graph_of, reading
from helpers import Builder

SEEDS = range(int(os.environ.get("GOPT_DRAWN", "60")))
Dims = list[tuple[int, bool]]
"""Sizes of a value, each with whether it is multiplied by the number of samples."""


class Drawn:
    """One forward, drawn from a seed; the same for every number of samples."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, b: Builder, n: int) -> str:
        self.b, self.n, self.dice, self.made = b, n, random.Random(self.seed), 0
        value, dims = b.input("x", (n, TOKENS, WIDTH)), [(1, True), (TOKENS, False), (WIDTH, False)]
        self.first: Dims = list(dims)
        for _ in range(self.dice.randint(2, 7)):
            move = self.dice.choice(MOVES)
            value, dims = move(self, value, dims)
        value = b.op("Mul", value, value)
        return self.reduced(value, dims)

    def sizes(self, dims: Dims) -> list[int]:
        return [size * (self.n if many else 1) for size, many in dims]

    def reduced(self, value: str, dims: Dims) -> str:
        b, end = self.b, self.dice.choice(["mean", "mean", "mean", "divided", "sum", "root", "stages"])
        if end == "divided":
            return b.op("Div", b.op("ReduceSum", value, keepdims=0), b.const(float(np.prod(self.sizes(dims)))))
        if end == "sum":
            return b.op("ReduceSum", value, keepdims=0)
        if end == "stages" and len(dims) > 1:
            value = b.op("ReduceMean", value, axes(b, self.dice.randrange(len(dims))), keepdims=0)
        made = b.op("ReduceMean", value, keepdims=0)
        return b.op("Sqrt", made) if end == "root" else made

    # --- moves ------------------------------------------------------------------------------------------------------

    def turned(self, value: str, dims: Dims) -> tuple[str, Dims]:
        order = list(range(len(dims)))
        self.dice.shuffle(order)
        return self.b.op("Transpose", value, perm=order), [dims[place] for place in order]

    def merged(self, value: str, dims: Dims) -> tuple[str, Dims]:
        if len(dims) < 2:
            return value, dims
        place = self.dice.randrange(len(dims) - 1)
        (one, many), (other, more) = dims[place : place + 2]
        if many and more:
            return value, dims
        dims = [*dims[:place], (one * other, many or more), *dims[place + 2 :]]
        return self.b.op("Reshape", value, axes(self.b, *self.sizes(dims))), dims

    def split(self, value: str, dims: Dims) -> tuple[str, Dims]:
        """Takes a factor out of a dimension without samples, or out of the inner end of one with them."""
        fits = [place for place, (size, _) in enumerate(dims) if size > 1]
        if not fits or len(dims) > 4:
            return value, dims
        place = self.dice.choice(fits)
        size, many = dims[place]
        factor = next(each for each in (2, 3, 5, size) if size % each == 0)
        dims = [*dims[:place], (size // factor, many), (factor, False), *dims[place + 1 :]]
        return self.b.op("Reshape", value, axes(self.b, *self.sizes(dims))), dims

    def centred(self, value: str, dims: Dims) -> tuple[str, Dims]:
        place = self.dice.randrange(len(dims))
        mean = self.b.op(self.dice.choice(["ReduceMean", "ReduceMax"]), value, axes(self.b, place), keepdims=1)
        return self.b.op("Sub", value, mean), dims

    def soft(self, value: str, dims: Dims) -> tuple[str, Dims]:
        return self.b.op("Softmax", value, axis=self.dice.randrange(len(dims))), dims

    def linear(self, value: str, dims: Dims) -> tuple[str, Dims]:
        size, many = dims[-1]
        if many:
            return value, dims
        self.made += 1
        return self.b.op("MatMul", value, self.b.parameter(f"w{self.made}", (size, 4))), [*dims[:-1], (4, False)]

    def gram(self, value: str, dims: Dims) -> tuple[str, Dims]:
        """The last two dimensions against each other."""
        if len(dims) < 2:
            return value, dims
        order = [*range(len(dims) - 2), len(dims) - 1, len(dims) - 2]
        made = self.b.op("MatMul", value, self.b.op("Transpose", value, perm=order))
        if all(many for _, many in (dims[-2], dims[-2])):
            return self.b.op("MatMul", self.b.op("Tanh", made), value), dims
        return made, [*dims[:-1], dims[-2]]

    def bent(self, value: str, dims: Dims) -> tuple[str, Dims]:
        return self.b.op(self.dice.choice(["Tanh", "Sigmoid", "Neg"]), value), dims

    def doubled(self, value: str, dims: Dims) -> tuple[str, Dims]:
        place = self.dice.randrange(len(dims))
        size, many = dims[place]
        made = self.b.op("Concat", value, self.b.op("Tanh", value), axis=place)
        return made, [*dims[:place], (2 * size, many), *dims[place + 1 :]]

    def picked(self, value: str, dims: Dims) -> tuple[str, Dims]:
        place = self.dice.randrange(len(dims))
        if len(dims) < 2:
            return value, dims
        return self.b.op("Gather", value, self.b.const(0, "int64"), axis=place), [*dims[:place], *dims[place + 1 :]]

    def shifted(self, value: str, dims: Dims) -> tuple[str, Dims]:
        """A parameter along the last dimension."""
        size, many = dims[-1]
        self.made += 1
        return (value, dims) if many else (self.b.op("Add", value, self.b.parameter(f"b{self.made}", (size,))), dims)


MOVES = [
    Drawn.turned, Drawn.merged, Drawn.merged, Drawn.split, Drawn.centred, Drawn.soft, Drawn.linear, Drawn.gram,
    Drawn.bent, Drawn.doubled, Drawn.picked, Drawn.shifted,
]  # fmt: skip


@pytest.mark.parametrize("batch", (4, 1))
def test_what_is_called_fine_is_the_mean(batch: int, tmp_path: Path) -> None:
    told: dict[bool, int] = {True: 0, False: 0}
    for seed in SEEDS:
        graph, _ = graph_of(Drawn(seed), batch, tmp_path)
        large, _ = graph_of(Drawn(seed), 3 * batch, tmp_path)
        found = reading(graph)
        fine = not found.couplings
        told[fine] += 1
        holds = all(follows(graph, large, "mean", "", other) for other in (seed, seed + 1000))
        assert holds or not fine, f"seed {seed} is called fine"
        if found.couplings and all(each.kind.value == "summed_loss" for each in found.couplings):
            assert follows(graph, large, "sum", "", seed), f"seed {seed} is called a sum"
    assert told[False] > len(SEEDS) // 10 and (batch == 1 or told[True] > len(SEEDS) // 10), told
