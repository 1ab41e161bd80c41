"""Gradients that take values of the forward for constants are found to be so, where samples meet; others are none."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from products import part
from whole_gen import kinds
from whole_gen.writer import Value, Writer

from gopt.analysis.training import State, StateKind, TrainingGraph
from gopt.ir.load import load
from gopt.verification.gradient_check import GradientCheck, Verdict, check_gradients

STEPS = sorted(name for name, step in kinds.load_all().items() if step.__module__ == "whole_gen.kinds_stops")
WRONG: dict[str, Callable[[Value], Value]] = {
    "times its size": lambda g: g * g.w.op("Abs", g),
    "clipped": lambda g: g.w.op("Clip", g, g.w.like(-0.01, g), g.w.like(0.01, g)),
    "by its norm": lambda g: g / (g * g).sum().sqrt(),
    "sign": lambda g: g.w.op("Sign", g),
    "of Adam": lambda g: g / ((g * g + 1e-4).sqrt()),
}


def checked(
    seed: int, folder, change: Callable[[Value], Value] | None = None
) -> tuple[Writer, dict[str, GradientCheck]]:
    w = Writer(seed, 5)
    kinds.KINDS[STEPS[seed % len(STEPS)]](w)
    named = {name: each.name for name, each in w.gradients.items()}
    if change:
        wrong = change(w.gradients["w0"])
        w.out("wrong", wrong)
        named["w0"] = wrong.name
    onnx.save(w.model(), folder / "step.onnx")
    graph = load(folder / "step.onnx", own=True)
    states = [State(name, w.states[name], StateKind.PARAMETER) for name in w.states]
    training = TrainingGraph(graph, ("loss",), states, named, list(w.batch), [], [], [])
    generator = np.random.default_rng(seed)
    held = {name: w.stored[name] for name in w.states}
    batches = [held | {name: draw(generator, w.inputs[name].shape) for name, draw in w.batch.items()} for _ in range(4)]
    return w, {each.parameter: each for each in check_gradients(training, batches, seed)}


@pytest.mark.parametrize("seed", part(range(80), 6))
def test_values_that_are_taken_for_constants_are_found(seed: int, tmp_path: Path) -> None:
    w, found = checked(seed, tmp_path)
    assert all(each.verdict is Verdict.CONFIRMED for each in found.values()), (w.said, found)
    assert found["w0"].stops and not found["w1"].stops


@pytest.mark.parametrize(("seed", "name"), part(product(range(20), WRONG), 2))
def test_what_is_no_gradient_is_none_with_any_constants(seed: int, name: str, tmp_path: Path) -> None:
    w, found = checked(seed, tmp_path, WRONG[name])
    assert found["w0"].verdict is Verdict.REFUTED, (name, w.said, found)
