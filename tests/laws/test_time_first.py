"""Steps whose batches have time in front: what is told of them is what is told of the same step with samples in front,
and one large batch joins the samples where they lie."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from helpers import Builder
from products import part

import gopt
from gopt.analysis.coupling import CouplingKind, find_couplings
from gopt.analysis.coupling.samples_axis import forward_swept
from gopt.artifact.manifest_entries import InputKind
from gopt.runtime.training.job import read_manifest
from gopt.verification.large_batch import LargeBatch

pytest.importorskip("onnx_ad", reason="needs pip install 'gopt[derive]'")

TIME, SAMPLES, WIDTH, ROWS = 5, 3, 4, 7
LOSSES = ("mean", "sum", "divided")


class Sequences:
    """A drawn forward of sequences; ``time``, ``samples``: the dimensions that hold them."""

    def __init__(self, seed: int, *, time_first: bool) -> None:
        self.b, self.dice = Builder(seed), random.Random(seed)
        self.time, self.samples = (0, 1) if time_first else (1, 0)

    def weight(self, *shape: int) -> str:
        return self.b.const(0.5 * self.b.generator.standard_normal(shape))

    def ints(self, *values: int) -> str:
        return self.b.const(values, "int64")

    def shape(self, time: int, *rest: int) -> list[int]:
        return [time, SAMPLES, *rest] if self.time == 0 else [SAMPLES, time, *rest]

    def linear(self, value: str) -> str:
        return self.b.op("Tanh", self.b.op("MatMul", value, self.weight(WIDTH, WIDTH)))

    def recurrent(self, value: str) -> str:
        """One place in time after another, from states of the batch's own."""
        b, turns = self.b, []
        hidden = b.op("Gather", b.input("h", self.shape(2, WIDTH)), b.const(1, "int64"), axis=self.time)
        for turn in range(TIME):
            here = b.op("Gather", value, b.const(turn, "int64"), axis=self.time)
            hidden = self.linear(b.op("Add", here, hidden))
            turns.append(b.op("Unsqueeze", hidden, self.ints(self.time)))
        return b.op("Concat", *turns, axis=self.time)

    def attention(self, value: str) -> str:
        """Two heads, folded into the dimension of samples as PyTorch folds them."""
        b, heads, size = self.b, 2, WIDTH // 2
        if self.time == 0:
            folded = b.op("Reshape", self.linear(value), self.ints(TIME, SAMPLES * heads, size))
            rows = b.op("Transpose", folded, perm=[1, 0, 2])
        else:
            folded = b.op("Reshape", self.linear(value), self.ints(SAMPLES, TIME, heads, size))
            turned = b.op("Transpose", folded, perm=[0, 2, 1, 3])
            rows = b.op("Reshape", turned, self.ints(SAMPLES * heads, TIME, size))
        scores = b.op("MatMul", rows, b.op("Transpose", rows, perm=[0, 2, 1]))
        mixed = b.op("MatMul", b.op("Softmax", scores, axis=-1), rows)
        if self.time == 0:
            return b.op("Reshape", b.op("Transpose", mixed, perm=[1, 0, 2]), self.ints(TIME, SAMPLES, WIDTH))
        back = b.op("Transpose", b.op("Reshape", mixed, self.ints(SAMPLES, heads, TIME, size)), perm=[0, 2, 1, 3])
        return b.op("Reshape", back, self.ints(SAMPLES, TIME, WIDTH))

    def summed(self, value: str) -> str:
        return self.b.op("CumSum", value, self.b.const(self.time, "int64"))

    def places(self, value: str) -> str:
        """A row for every place in time."""
        table = self.weight(TIME, WIDTH)
        return self.b.op("Add", value, self.b.op("Unsqueeze", table, self.ints(1)) if self.time == 0 else table)

    def target(self, value: str) -> str:
        """The difference from a target: a row for every place in time, all places in one dimension, or a sample's."""
        b, kind = self.b, self.dice.choice(["rows", "flat", "samples"])
        if kind == "samples":
            value = b.op("ReduceMean", value, self.ints(self.time, 2), keepdims=0)
            return b.op("Sub", value, b.input("y", [SAMPLES]))
        if kind == "rows":
            return b.op("Sub", value, b.input("y", self.shape(TIME, WIDTH)))
        value = b.op("ReduceMean", value, self.ints(2), keepdims=0)
        if self.time == 1:
            return b.op("Sub", value, b.input("y", self.shape(TIME)))
        return b.op("Sub", b.op("Reshape", value, self.ints(-1)), b.input("y", [TIME * SAMPLES]))

    def forward(self) -> onnx.ModelProto:
        b = self.b
        if self.dice.random() < 0.5:
            value = b.op("Gather", self.weight(ROWS, WIDTH), b.input("x", self.shape(TIME), "int64"))
        else:
            value = b.input("x", self.shape(TIME, WIDTH))
        steps = [self.attention, self.linear, self.summed, self.places]
        for step in [self.recurrent, *self.dice.sample(steps, 2)]:
            value = step(value)
        off = self.target(value)
        square, kind = b.op("Mul", off, off), self.dice.choice(LOSSES)
        loss = b.op("ReduceMean" if kind == "mean" else "ReduceSum", square, keepdims=0)
        if kind == "divided":
            loss = b.op("Div", loss, b.const(float(SAMPLES)))
        b.output("loss", loss, ())
        return b.model()


def derived(seed: int, folder: Path, *, time_first: bool) -> Path:
    path = folder / f"{seed}.{time_first}.onnx"
    onnx.save(Sequences(seed, time_first=time_first).forward(), folder / "forward.onnx")
    gopt.derive(folder / "forward.onnx", path, gopt.DeriveOptions(loss="loss", optimizer="sgd"))
    return path


@pytest.mark.parametrize("seed", part(range(16), 8))
def test_time_in_front_changes_nothing_that_is_told(seed, tmp_path):
    steps = [gopt.load(derived(seed, tmp_path, time_first=first)).training for first in (False, True)]
    plain, turned = ({each.kind for each in find_couplings(step)} for step in steps)
    assert plain - {CouplingKind.UNKNOWN} <= turned <= plain
    marks = [forward_swept(step).marks for step in steps]
    assert [mark["x"].axis for mark in marks] == [0, 1]
    assert marks[0]["loss"].kind is marks[1]["loss"].kind


@pytest.mark.parametrize("seed", range(8))
def test_the_large_batch_joins_the_samples(seed, tmp_path):
    step = derived(seed, tmp_path, time_first=True)
    summed = CouplingKind.SUMMED in {each.kind for each in find_couplings(gopt.load(step).training)}
    rule = "sum" if summed else "mean"
    folder = gopt.shard(step, 2, loss_reduction=rule)
    found = gopt.verify(folder, steps=1, confirm=False).large_batch
    assert found.outcome is LargeBatch.EQUAL, found.line()


def test_a_run_counts_the_samples_and_takes_whole_batches(tmp_path):
    folder = tmp_path / "ranks"
    gopt.shard(derived(1, tmp_path, time_first=True), 2).write(folder)
    inputs = [entry.type for entry in read_manifest(folder)[0].inputs_of(InputKind.BATCH)]
    names = [entry.name for entry in read_manifest(folder)[0].inputs_of(InputKind.BATCH)]
    random = np.random.default_rng(0)
    stacked = {name: random.integers(0, ROWS, (4, *type.dims)).astype(type.dtype) for name, type in zip(names, inputs)}
    rows = {name: values.reshape(-1, *values.shape[2:]) for name, values in stacked.items()}
    columns = {name: np.concatenate(values, axis=min(1, values.ndim - 2)) for name, values in stacked.items()}
    for kind, arrays in (("stacked", stacked), ("rows", rows), ("columns", columns)):
        np.savez(tmp_path / f"{kind}.npz", **arrays)
    settings = {"lr": 0.01}
    found = gopt.run(folder, tmp_path / "stacked.npz", 2, settings=settings, shuffle=1)
    assert {step.samples for step in found.steps} == {2 * SAMPLES}
    gopt.run(folder, tmp_path / "rows.npz", 2, settings=settings)
    for data, shuffle in (("columns", None), ("rows", 1)):
        with pytest.raises(gopt.InputError) as caught:
            gopt.run(folder, tmp_path / f"{data}.npz", 2, settings=settings, shuffle=shuffle)
        assert f"[batches, {TIME}, {SAMPLES}" in caught.value.hints[0], caught.value


def unmoved(b: Builder) -> str:
    """Samples in front that meet: halves of the batch are views of one sample."""
    value = b.input("x", (4, TIME, WIDTH))
    one, other = b.op("Split", value, outputs=2, num_outputs=2, axis=0)
    return b.op("Sub", one, other)


def crossed(b: Builder) -> str:
    """Rows of another batch beside them, of other samples."""
    value, more = b.input("x", (4, WIDTH)), b.input("more", (6, WIDTH))
    return b.op("MatMul", b.op("MatMul", value, b.const(np.eye(WIDTH))), b.op("Transpose", more, perm=[1, 0]))


def spread(b: Builder) -> str:
    """Tokens that meet and samples that do."""
    rows = b.op("Gather", b.const(np.ones((ROWS, WIDTH))), b.input("x", (SAMPLES, TIME), "int64"))
    tokens = b.op("Sub", rows, b.op("ReduceMean", rows, b.const([1], "int64")))
    return b.op("Mul", tokens, b.op("Gather", tokens, b.const([2, 0, 1], "int64"), axis=0))


def turned(b: Builder, *, recurs: bool) -> str:
    """Floats alone, of one form: each place of dimension 0 by itself, behind the place before or without."""
    value, weight, rows, before = b.input("x", (TIME, SAMPLES, WIDTH)), b.const(np.eye(WIDTH) / 2), [], None
    for turn in range(TIME):
        here = b.op("Gather", value, b.const(turn, "int64"), axis=0)
        before = b.op("Tanh", b.op("MatMul", b.op("Add", here, before) if before and recurs else here, weight))
        rows.append(b.op("Unsqueeze", before, b.const([0], "int64")))
    return b.op("Sub", b.op("Concat", *rows, axis=0), b.input("y", (TIME, SAMPLES, WIDTH)))


@pytest.mark.parametrize("recurs", [True, False])
def test_a_recurrence_over_floats_of_one_form_runs_through_time(recurs, tmp_path):
    b = Builder()
    value = turned(b, recurs=recurs)
    b.output("loss", b.op("ReduceMean", b.op("Mul", value, value), keepdims=0), ())
    onnx.save(b.model(), tmp_path / "forward.onnx")
    gopt.derive(tmp_path / "forward.onnx", tmp_path / "step.onnx", gopt.DeriveOptions(loss="loss", optimizer="sgd"))
    training = gopt.load(tmp_path / "step.onnx").training
    assert forward_swept(training).marks["x"].axis == recurs and bool(find_couplings(training)) != recurs


@pytest.mark.parametrize("forward", [unmoved, crossed, spread])
def test_samples_in_front_stay_there(forward, tmp_path):
    b = Builder()
    value = b.op("Mul", forward(b), b.const(0.5 * np.ones(1)))
    b.output("loss", b.op("ReduceMean", b.op("Mul", value, value), keepdims=0), ())
    onnx.save(b.model(), tmp_path / "forward.onnx")
    gopt.derive(tmp_path / "forward.onnx", tmp_path / "step.onnx", gopt.DeriveOptions(loss="loss", optimizer="sgd"))
    training = gopt.load(tmp_path / "step.onnx").training
    assert forward_swept(training).marks["x"].axis == 0 and find_couplings(training)


def counting(model: onnx.ModelProto, term: str) -> onnx.ModelProto:
    """The step with a state that each step adds ``term`` to."""
    text = f"""<ir_version: 10, opset_import: ["" : 20]> g (int64[1] seen) => (int64[1] counted)
    <int64[1] seen = {{0}}> {{ term = {term} counted = Add(seen, term) }}"""
    added = onnx.parser.parse_model(text).graph
    for name in ("node", "input", "output", "initializer"):
        getattr(model.graph, name).extend(getattr(added, name))
    return model


@pytest.mark.parametrize("term, counted", [
    ("Shape<start = 1, end = 2>(x)", {"seen"}), ("Shape<start = 0, end = 1>(x)", set()),
    (f"Constant<value_ints = [{SAMPLES}]>()", None),
])  # fmt: skip
def test_a_counter_counts_the_samples(term, counted, tmp_path):
    path = derived(1, tmp_path, time_first=True)
    onnx.save(counting(onnx.load(path), term), path)
    if counted is None:
        with pytest.raises(gopt.UnsupportedError, match="which is the size of a batch"):
            _ = gopt.load(path).training
    else:
        assert {*gopt.load(path).training.counted} == counted
