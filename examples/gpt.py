"""A small GPT that learns the characters of gopt's own documentation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
BATCH, TOKENS = 8, 64
STEPS = 300
LR = "cosine:6e-3:3e-4:{steps}"
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
PROMPT = "Every rank "

Array = np.ndarray
Forward = Callable[[Array], Array]


@functools.cache
def text() -> tuple[Array, Array]:
    """Characters by number, to learn from and (the last tenth) to judge by: 1-D int64 each."""
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
    whole = "\n".join(path.read_text(encoding="utf-8") for path in files)
    ids = np.array([ALPHABET.index(each) for each in whole if each in ALPHABET])
    return ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]


def batches(part: int, parts: int) -> Iterator[dict[str, Array]]:
    """Every ``parts``-th batch from ``part`` on; what is in one follows from its number alone.

    ``x`` and ``y``, the characters and those after them, are int64[8,64].
    """
    ids, _ = text()
    for number in itertools.count(part, parts):
        starts = np.random.default_rng([0, number]).integers(len(ids) - TOKENS, size=BATCH)
        window = ids[starts[:, None] + np.arange(TOKENS + 1)]
        yield {"x": window[:, :-1], "y": window[:, 1:]}


def initial(name: str, shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """The first value of a state."""
    if name == "step" or name.endswith(("ln1.weight", "ln2.weight", "ln_f.weight")):
        return np.ones(shape, np.float32)
    if name.endswith((".exp_avg", ".exp_avg_sq", ".bias")):
        return np.zeros(shape, np.float32)
    scale = 0.1 if name.startswith("w") else shape[1] ** -0.5
    if name.endswith(("proj.weight", "down.weight")):
        scale /= 10  # what a block adds to the embeddings starts small
    return random.normal(0, scale, shape).astype(np.float32)


def judge(forward: Forward) -> str:
    """The mean loss over the text held out."""
    _, ids = text()
    windows = ids[: len(ids) // (TOKENS + 1) * (TOKENS + 1)].reshape(-1, TOKENS + 1)
    windows = windows[: len(windows) // BATCH * BATCH]
    losses = []
    for batch in windows.reshape(-1, BATCH, TOKENS + 1):
        logits = forward(batch[:, :-1]).astype(np.float64)
        chosen = np.take_along_axis(logits, batch[:, 1:].reshape(-1, 1), 1)[:, 0]
        losses.append(np.log(np.exp(logits).sum(1)) - chosen)
    return f"loss {np.mean(losses):.4f} on {windows.size} characters held out"


def show(forward: Forward, length: int = 240) -> str:
    """What the model writes after the prompt."""
    random = np.random.default_rng(1)
    ids = [ALPHABET.index(each) for each in PROMPT]
    for _ in range(length):
        seen = ids[-TOKENS:]
        batch = np.zeros((BATCH, TOKENS), np.int64)
        batch[0, : len(seen)] = seen
        logits = forward(batch)[len(seen) - 1].astype(np.float64) / 0.7
        chances = np.exp(logits - logits.max())
        ids.append(int(random.choice(len(ALPHABET), p=chances / chances.sum())))
    return "".join(ALPHABET[each] for each in ids)
