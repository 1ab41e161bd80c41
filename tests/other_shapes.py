"""Shapes of as many elements, drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np


def other_shape(draw: random.Random, dims: Sequence[int]) -> list[int]:
    """Another shape of as many elements: with a 1 more or less, two dimensions in one, flat, or exchanged."""
    new = list(dims)
    for _ in range(draw.choice([1, 1, 2])):
        kind = draw.choice(["more", "less", "join", "flat", "turn", "cut"])
        if kind == "more":
            new.insert(draw.randrange(len(new) + 1), 1)
        elif kind == "less" and 1 in new:
            new.pop(draw.choice([at for at, size in enumerate(new) if size == 1]))
        elif kind == "join" and len(new) > 1:
            at = draw.randrange(len(new) - 1)
            new[at : at + 2] = [new[at] * new[at + 1]]
        elif kind == "flat" and new:
            new = [int(np.prod(new))]
        elif kind == "turn" and len(new) > 1:
            draw.shuffle(new)
        elif kind == "cut" and new:
            at = draw.randrange(len(new))
            new[at : at + 1] = [2, new[at] // 2] if new[at] and new[at] % 2 == 0 else [new[at]]
    return new
