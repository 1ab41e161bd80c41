"""A CNN that reads scikit-learn's handwritten digits (8x8 pixels; 1,437 to learn from, 360 to judge by)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
from sklearn.datasets import load_digits

BATCH = 8
STEPS = 300
LR = "linear:0.03:0.003:{steps}"
LEARN = 1437

Array = np.ndarray
Forward = Callable[[Array], Array]


@functools.cache
def images() -> tuple[Array, Array]:
    """All pictures in a mixed order, float32[1797,1,8,8] from 0 to 1, and what they show."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return (pixels[order].reshape(-1, 1, 8, 8) / 16).astype(np.float32), labels[order].astype(np.int64)


def batches(part: int, parts: int) -> Iterator[dict[str, Array]]:
    """Every ``parts``-th batch from ``part`` on; what is in one follows from its number alone.

    ``x`` is float32[8,1,8,8], ``y`` int64[8]; a pass over the pictures leaves out what fills no batch.
    """
    x, y = images()
    for number in itertools.count(part, parts):
        turn, place = divmod(number, LEARN // BATCH)
        rows = np.random.default_rng([0, turn]).permutation(LEARN)[place * BATCH : (place + 1) * BATCH]
        yield {"x": x[rows], "y": y[rows]}


def initial(name: str, shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """The first value of a state."""
    if name.endswith((".bias", ".momentum_buffer")):
        return np.zeros(shape, np.float32)
    return random.normal(0, math.sqrt(2 / math.prod(shape[1:])), shape).astype(np.float32)


def judge(forward: Forward) -> str:
    """The share of pictures read rightly."""
    x, y = images()
    padded = np.concatenate([x, np.zeros_like(x[: -len(x) % BATCH])])
    read = np.concatenate([forward(each).argmax(1) for each in padded.reshape(-1, BATCH, 1, 8, 8)])[: len(y)]
    right = read == y
    return f"reads {right[:LEARN].mean():.1%} of the digits it learned from, {right[LEARN:].mean():.1%} of the others"


def show(forward: Forward) -> str:
    """The first pictures that it had not seen, and what it takes them for."""
    x = images()[0][LEARN : LEARN + BATCH, 0]
    rows = [" ".join("".join(" ░▒▓█"[round(4 * float(p))] for p in row) for row in line) for line in x.swapaxes(0, 1)]
    return "\n".join([*rows, " ".join(f"{each:^8}" for each in forward(x[:, None]).argmax(1))])
