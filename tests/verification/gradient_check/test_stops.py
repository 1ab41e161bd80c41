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
from whole_gen.derivatives import detached, gradients
from whole_gen.forwards import parameter
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
    seed: int, folder, change: Callable[[Value], Value] | None = None,
    step: Callable[[Writer], None] | None = None, name: str = "w0", samples: int = 5,
) -> tuple[Writer, dict[str, GradientCheck]]:  # fmt: skip
    """The verdicts on a step's gradients, that of ``name`` changed."""
    w = Writer(seed, samples)
    (step or kinds.KINDS[STEPS[seed % len(STEPS)]])(w)
    named = {name: each.name for name, each in w.gradients.items()}
    if change:
        wrong = change(w.gradients[name])
        w.out("wrong", wrong)
        named[name] = wrong.name
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


@pytest.mark.rest
@pytest.mark.parametrize(("seed", "name"), part(product(range(20), WRONG), 2))
def test_what_is_no_gradient_is_none_with_any_constants(seed: int, name: str, tmp_path: Path) -> None:
    w, found = checked(seed, tmp_path, WRONG[name])
    assert found["w0"].verdict is Verdict.REFUTED, (name, w.said, found)


def rivals(w: Writer) -> None:
    """A critic that takes what a maker draws for a constant, and a maker that takes the critic for one; each of many
    layers with kinks, normalised over the batch."""

    def through(x: Value, layers: list[Value]) -> Value:
        for layer in layers[:-1]:
            a = x @ layer
            off = a - a.mean(0, keep=True)
            x = w.op("Relu", off / ((off * off).mean(0, keep=True) + 1e-2).sqrt())
        return x @ layers[-1]

    def softplus(x: Value) -> Value:
        return w.op("Log", w.op("Exp", x) + 1.0).mean()

    widths = [(6, 8), *[(8, 8)] * 4, (8, 1)]
    critic = [parameter(w, f"critic{k}", *width) for k, width in enumerate(widths)]
    maker = [parameter(w, f"maker{k}", *width) for k, width in enumerate([*widths[:-1], (8, 6)])]
    made = through(w.fed("noise", [6]), maker)
    wise = softplus(-through(w.fed("real", [6]), critic)) + softplus(through(detached(w, made), critic))
    loss = wise + softplus(-through(made, [detached(w, each) for each in critic]))
    found = gradients(loss, [*critic, *maker])
    w.out("loss", loss)
    for each, g in zip([*critic, *maker], found):
        w.becomes(each, each - g * 0.1)
    copies = {node.output[0]: node.input[0] for node in w.nodes if node.op_type == "Identity"}
    for node in w.nodes:
        node.input[:] = [copies.get(name, name) for name in node.input]


@pytest.mark.rest
def test_what_one_search_finds_the_other_parameters_do_not_search(tmp_path: Path) -> None:
    _, found = checked(0, tmp_path, step=rivals, samples=32)
    assert all(each.verdict is Verdict.CONFIRMED for each in found.values()), found
    sets = {each.stops for each in found.values()}
    assert len(sets) <= 3 and all(sets), sets  # of twelve parameters


@pytest.mark.rest
@pytest.mark.parametrize("name", part(["critic0", "maker3"], 1))
def test_what_is_no_gradient_is_none_beside_others_with_constants(name: str, tmp_path: Path) -> None:
    _, found = checked(0, tmp_path, WRONG["clipped"], rivals, name, samples=32)
    assert [each.parameter for each in found.values() if each.verdict is Verdict.REFUTED] == [name], found
