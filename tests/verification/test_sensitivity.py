"""Gradients that are zero but for rounding: noise that becomes full steps is not a difference, and hides none."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from gopt.cli.main import main
from helpers import Builder, edit_rank, edit_ranks
from onnx import ModelProto, NodeProto, helper, numpy_helper
from plants import attribute, gradient_calls, own_values, replace
from products import spread

import gopt
from gopt.passes.pipeline import build_pipeline
from gopt.verification.reference_step import LocalResults, ReferenceProgram
from gopt.verification.result import Outcome, Verification
from gopt.verification.sensitivity import RUNS
from gopt.verification.step_comparison import StepComparison
from gopt.verification.variants import PLAIN, Variant
from gopt.verification.verify import Verifier

HALF, WIDE = 10, 1
RULES = ("adam", "sgd")
ROWS, GROUPS, CLASSES = 8, 3, 5


def softmax_step(path: Path, rule: str, half: bool = False, started: bool = False) -> Path:
    """Logits x w + c, c the same for all classes of a group, a softmax over them, squared error. The derivative to c is
    zero. ``half``: forward and backward in float16; ``started``: c does not begin at zero."""
    b = Builder()

    def narrow(name: str) -> str:
        return b.op("Cast", name, to=HALF) if half else name

    def const(value: float) -> str:
        return b.const(value, "float16" if half else "float32")

    x, y = narrow(b.input("x", (ROWS, 4))), narrow(b.input("y", (ROWS, GROUPS, CLASSES)))
    w = b.parameter("w", (4, GROUPS * CLASSES))
    c = b.state("c", np.full((GROUPS, 1), 0.3 if started else 0.0, np.float32))
    shape = b.const([ROWS, GROUPS, CLASSES], "int64")
    logits = b.op("Add", b.op("Reshape", b.op("MatMul", x, narrow(w)), shape), narrow(c))
    p = b.op("Softmax", logits, axis=-1)
    d = b.op("Sub", p, y)
    loss = b.op("ReduceMean", b.op("Mul", d, d), keepdims=0)
    dp = b.op("Mul", d, const(2.0 / (ROWS * GROUPS * CLASSES)))
    inner = b.op("ReduceSum", b.op("Mul", dp, p), b.const([2], "int64"), keepdims=1)
    dz = b.op("Mul", p, b.op("Sub", dp, inner))
    flat = b.op("Reshape", dz, b.const([ROWS, GROUPS * CLASSES], "int64"))
    gradients = {
        w: b.op("MatMul", b.op("Transpose", x, perm=[1, 0]), flat),
        c: b.op("Reshape", b.op("ReduceSum", dz, b.const([0, 2], "int64"), keepdims=0), b.const([GROUPS, 1], "int64")),
    }
    b.output("loss", b.op("Cast", loss, to=WIDE) if half else loss, ())
    for name, g in gradients.items():
        dims = (4, GROUPS * CLASSES) if name == w else (GROUPS, 1)
        g = b.op("Cast", g, to=WIDE) if half else g
        step = g
        if rule == "adam":
            m, v = (b.state(f"{name}.{each}", np.zeros(dims, np.float32)) for each in "mv")
            m1 = b.op("Add", b.op("Mul", m, b.const(0.9)), b.op("Mul", g, b.const(0.1)))
            v1 = b.op("Add", b.op("Mul", v, b.const(0.99)), b.op("Mul", b.op("Mul", g, g), b.const(0.01)))
            step = b.op("Div", m1, b.op("Add", b.op("Sqrt", v1), b.const(1e-15)))
            b.output(f"{name}.m_out", m1, dims)
            b.output(f"{name}.v_out", v1, dims)
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", step, b.const(0.1))), dims)
    return b.save(path / "step.onnx")


def sharded(path: Path, rule: str, stage: int = 2, **options: bool) -> Path:
    out = path / "out"
    pipeline = build_pipeline([("shard", {"stage": stage, "bucket-mb": 0.0}), ("statistics", {})])
    gopt.shard(gopt.load(softmax_step(path, rule, **options)), 3, pipeline=pipeline).write(out)
    return out


def run(out: Path, **options: object) -> Verification:
    return Verifier(out).run(confirm=False, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rule", "stage", "half", "started"), spread(RULES, [0, 2, 3], [False, True], [False, True]))
def test_noise_is_no_difference(tmp_path, rule, stage, half, started):
    result = run(sharded(tmp_path, rule, stage, half=half, started=started))
    assert result.equal, result.to_json()
    assert "c" in result.noise and "w" not in result.noise
    assert any("rounding noise" in note and " c " in note for note in result.notes)


def test_without_the_second_look_it_would_be_one(tmp_path, monkeypatch):
    """The steps above are such that values alone would raise an alarm."""
    out = sharded(tmp_path, "adam")
    monkeypatch.setattr(StepComparison, "_compare_from_own_states", lambda self, ledger, names: ledger)
    result = run(out)
    assert result.outcome is Outcome.DIFFERENT
    assert {each.name for each in result.worst.values() if each.fails} <= {"c", "c.m", "c.v"}


def noisy_call(out: Path, model: ModelProto) -> NodeProto:
    """The call that reduces the gradient of c."""
    gradient = Verifier(out).training.gradients["c"]
    return next(node for node in gradient_calls(model) if list(node.input) == [gradient])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("rule", RULES)
def test_noise_that_is_not_reduced_is_seen(tmp_path, rule, stage, half):
    """Every rank goes on with its own noise: they drift apart, or each has a part of its own."""
    out = sharded(tmp_path, rule, stage, half=half)
    for rank in range(3):

        def drop(model: ModelProto, rank: int = rank) -> None:
            node = noisy_call(out, model)
            replace(model, node, own_values(node, rank))

        edit_rank(out, rank, drop)
    result = run(out)
    assert result.outcome is Outcome.DIFFERENT
    assert any(each.fails and each.name.startswith("c") for each in result.worst.values())


@pytest.mark.parametrize("rule", RULES)
def test_noise_that_is_summed_is_seen(tmp_path, rule):
    out = sharded(tmp_path, rule)

    def plant(model: ModelProto) -> None:
        attribute(noisy_call(out, model), "reduce").s = b"sum"

    edit_ranks(out, plant)
    assert run(out).outcome is Outcome.DIFFERENT


@pytest.mark.parametrize("rule", RULES)
def test_an_update_of_noise_at_another_rate_is_seen(tmp_path, rule):
    """One rank's step of c is twice as long."""
    out = sharded(tmp_path, rule, stage=0)

    def plant(model: ModelProto) -> None:
        last = next(node for node in model.graph.node if "c_out" in node.output)
        step = next(node for node in model.graph.node if last.input[1] in node.output)
        step.op_type, step.input[1] = "Add", step.input[0]

    edit_rank(out, 1, plant)
    assert run(out).outcome is Outcome.DIFFERENT


@pytest.mark.parametrize(("half", "factor"), [(False, 1.01), (True, 1.3)])
@pytest.mark.parametrize("rule", RULES)
def test_a_wrong_gradient_beside_noise_is_seen(tmp_path, rule, half, factor):
    """One rank's backward is off: its own gradients do not stand for the source's, and no floor hides that."""
    out = sharded(tmp_path, rule, half=half)
    wanted = 2.0 / (ROWS * GROUPS * CLASSES)

    def plant(model: ModelProto) -> None:
        for tensor in model.graph.initializer:
            value = numpy_helper.to_array(tensor) if tensor.HasField("raw_data") else np.zeros(2)
            if value.size == 1 and value.dtype.kind == "f" and np.isclose(float(value), wanted, rtol=1e-3):
                tensor.CopyFrom(numpy_helper.from_array(np.asarray(value * factor, value.dtype), tensor.name))
                return
        raise AssertionError("the constant is there")

    edit_rank(out, 1, plant)
    assert run(out).outcome is Outcome.DIFFERENT


def test_the_command_names_them(tmp_path, capsys):
    out = sharded(tmp_path, "adam")
    assert main(["verify", str(out), "--no-confirm"]) == 0
    assert re.search(r"note: rounding noise is the whole gradient of c ", capsys.readouterr().out)


# --- terms that cancel in single elements -----------------------------------------------------------------------------


def cancelling(path: Path, stage: int) -> tuple[Path, Path]:
    """Adam on the mean of rows x b, which has x's means as gradient, and rows whose sum in float32 has no first element
    or the smallest of its terms, by the order."""
    ranks, width = 4, 8
    b = Builder()
    x, w = b.input("x", (2, width)), b.parameter("w", (width,))
    rows = b.op("ReduceSum", b.op("Mul", x, w), b.const([1], "int64"), keepdims=0)
    b.output("loss", b.op("ReduceMean", rows, keepdims=0), ())
    g = b.op("Mul", b.op("ReduceSum", x, b.const([0], "int64"), keepdims=0), b.const(0.5))
    m, v = (b.state(f"w.{each}", np.zeros(width, np.float32)) for each in "mv")
    m1 = b.op("Add", b.op("Mul", m, b.const(0.9)), b.op("Mul", g, b.const(0.1)))
    v1 = b.op("Add", b.op("Mul", v, b.const(0.99)), b.op("Mul", b.op("Mul", g, g), b.const(0.01)))
    step = b.op("Div", m1, b.op("Add", b.op("Sqrt", v1), b.const(1e-9)))
    b.output("w_out", b.op("Sub", w, b.op("Mul", step, b.const(0.1))), (width,))
    b.output("w.m_out", m1, (width,))
    b.output("w.v_out", v1, (width,))
    data = np.random.default_rng(0).standard_normal((ranks, width)).astype(np.float32)
    data[:, 0] = 1, 2.0**-26, -1, 0
    np.savez(path / "samples.npz", x=np.repeat(data, 2, axis=0))
    out = path / "out"
    pipeline = build_pipeline([("shard", {"stage": stage, "bucket-mb": 0.0})])
    gopt.shard(gopt.load(b.save(path / "step.onnx")), ranks, pipeline=pipeline).write(out)
    return out, path / "samples.npz"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_element_that_the_order_of_summation_decides_is_no_difference(tmp_path, stage):
    out, data = cancelling(tmp_path, stage)
    result = run(out, data=str(data), steps=1)
    assert result.equal, result.to_json()
    assert any("in elements of w (1 in all)" in note for note in result.notes), result.notes


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("error", [1e-6, -1e-6])
def test_an_error_in_that_element_beyond_rounding_is_seen(tmp_path, stage, error):
    """It is within the tolerance of every other element."""
    out, data = cancelling(tmp_path, stage)

    def plant(model: ModelProto) -> None:
        node = gradient_calls(model)[0]
        mean = node.output[0]
        for reader in model.graph.node:
            reader.input[:] = ["planted" if name == mean else name for name in reader.input]
        more = helper.make_node("Constant", [], ["more"], value_float=error)
        replace(model, node, [node, more, helper.make_node("Add", [mean, "more"], ["planted"])])

    edit_ranks(out, plant)
    result = run(out, data=str(data), steps=1, variants=[PLAIN])
    assert result.outcome is Outcome.DIFFERENT
    assert {each.name for each in result.worst.values() if each.fails} == {"w"}


# --- how much is run --------------------------------------------------------------------------------------------------


def plain_step(path: Path, clipped: bool = False) -> Path:
    """Least squares by gradient descent; ``clipped``: elements of the gradient to [-1, 1], which is a condition."""
    b = Builder()
    x, y, w = b.input("x", (ROWS, 4)), b.input("y", (ROWS, 6)), b.parameter("w", (4, 6))
    d = b.op("Sub", b.op("MatMul", x, w), y)
    g = b.op("MatMul", b.op("Transpose", x, perm=[1, 0]), b.op("Mul", d, b.const(2.0 / (ROWS * 6))))
    b.output("loss", b.op("ReduceMean", b.op("Mul", d, d), keepdims=0), ())
    step = b.op("Clip", g, b.const(-1.0), b.const(1.0)) if clipped else g
    b.output("w_out", b.op("Sub", w, b.op("Mul", step, b.const(0.1))), (4, 6))
    return b.save(path / "step.onnx")


@pytest.fixture
def backwards(monkeypatch):
    """One entry for each time that the source's forward and backward ran on the batches of all ranks."""
    made: list[str] = []
    local = ReferenceProgram.local

    def counted(self: ReferenceProgram, variant: Variant, *given: object) -> LocalResults:
        made.append(variant.name)
        return local(self, variant, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(ReferenceProgram, "local", counted)
    return made


@pytest.mark.parametrize("clipped", [False, True])
def test_no_more_is_run_than_tells_something(tmp_path, backwards, clipped):
    """One disturbed run where no gradient is near rounding; other sizes take the plain first step's gradients, and go
    on behind it where a condition may turn."""
    out = tmp_path / "out"
    gopt.shard(gopt.load(plain_step(tmp_path, clipped)), 2).write(out)
    assert run(out, steps=3).equal
    assert backwards.count("gradients as they are") == 3 + 1
    assert backwards.count("gradients × 64") == (2 if clipped else 0)


def test_gradients_near_rounding_are_measured_in_full(tmp_path, backwards):
    assert run(sharded(tmp_path, "sgd"), steps=1, variants=[PLAIN]).equal
    assert len(backwards) == 1 + RUNS, "the step, and disturbed; from the ranks' own states, its start, it is known"


def test_an_update_that_is_wrong_for_large_gradients_alone_is_seen_in_their_one_step(tmp_path):
    """A rank clips what the source does not."""
    out = tmp_path / "out"
    gopt.shard(gopt.load(plain_step(tmp_path)), 2, pipeline=build_pipeline([("shard", {"stage": 0})])).write(out)

    def plant(model: ModelProto, bound: float = 0.5) -> None:
        last = next(node for node in model.graph.node if "w_out" in node.output)
        low, high = (helper.make_node("Constant", [], [f"bound{sign}"], value_float=sign * bound) for sign in (-1, 1))
        clip = helper.make_node("Clip", [last.input[1], *low.output, *high.output], ["clipped"])
        last.input[1] = "clipped"
        replace(model, last, [low, high, clip, last])

    edit_rank(out, 1, plant)
    assert run(out, steps=3, variants=[PLAIN]).equal
    assert run(out, steps=3).outcome is Outcome.DIFFERENT
