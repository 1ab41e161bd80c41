"""Updates that rounding makes more of than the tolerance, by sums that cancel or by halves inside: one step of source
and ranks is compared in float64 too."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import Builder, calls, edit_ranks, perceptron
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from plants import attribute, own_values, replace
from steps_gen.make import make
from steps_gen.plan import Plan

import gopt
from gopt.errors import RunError
from gopt.verification.result import Outcome, Verification
from gopt.verification.step_comparison import StepComparison
from gopt.verification.verify import Verifier

WIDE = ", in float64"


def failing(result: Verification) -> set[str]:
    """Names that differ."""
    return {entry.worst.name for entry in result.failing()}


def fails_in_float64(result: Verification) -> bool:
    return any(variant.endswith(WIDE) and worst.fails for variant, worst in result.worst.items())


# --- sums that cancel -------------------------------------------------------------------------------------------------


def cancelling(folder: Path, nearly: float = 1e-5) -> Path:
    """A step whose state d grows by the difference of two sums over all gradients, which are equal but for a share
    ``nearly``; d hardly moves the rate."""
    b = Builder()
    net = perceptron(b, (6, 8, 5))
    d = b.state("d", np.zeros((), np.float32))
    b.output("loss", net.loss, ())
    sums: dict[str, list[str]] = {"one": [], "two": []}
    for g in net.gradients.values():
        sums["one"].append(b.op("ReduceSum", b.op("Mul", g, g), keepdims=0))
        more = b.op("Add", g, b.op("Mul", g, b.const(nearly)))
        sums["two"].append(b.op("ReduceSum", b.op("Mul", g, more), keepdims=0))
    apart = b.op("Sub", b.op("Sum", *sums["two"]), b.op("Sum", *sums["one"]))
    new = b.op("Add", b.op("Mul", d, b.const(0.5)), b.op("Mul", apart, b.const(1e3)))
    b.output("d_out", new, ())
    rate = b.op("Mul", b.op("Add", b.op("Mul", new, b.const(1e-4)), b.const(1.0)), b.const(0.1))
    for name, shape in net.params.items():
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", net.gradients[name], rate)), shape)
    return b.save(folder / "step.onnx")


def cancelling_ranks(folder: Path, mesh: str, stage: int = 2) -> Path:
    gopt.shard(cancelling(folder), mesh, stage=stage).write(folder / "out")
    return folder / "out"


@pytest.mark.parametrize(("mesh", "stage"), [("shard=3", 2), ("shard=2", 3), ("dp=2,shard=2", 1), ("dp=2", 0)])
def test_a_difference_of_equal_sums_is_equal(mesh, stage, tmp_path):
    result = gopt.verify(cancelling_ranks(tmp_path, mesh, stage))
    assert result.equal, (failing(result), [*result.open()])


def verified(folder: Path) -> Iterator[Verification]:
    """The ranks of several meshes: where sums are as they are in the source, rounding moves nothing."""
    for mesh in ("shard=3", "shard=4", "shard=5"):
        yield Verifier(cancelling_ranks(folder, mesh)).run(confirm=False)
        shutil.rmtree(folder / "out")


def test_a_value_that_rounding_moves_is_compared_in_float64(tmp_path):
    results = [*verified(tmp_path)]
    assert all(result.equal for result in results)
    rounded = [result for result in results if any(variant.endswith(WIDE) for variant in result.worst)]
    assert rounded
    for result in rounded:
        assert any(note.endswith("of a step of d: allowed, and compared in float64 too") for note in result.notes)


def _grown(model: ModelProto) -> None:
    """What d grows by is a thousandth too much: less than rounding makes of it."""
    factor = next(t for t in model.graph.initializer if t.data_type == 1 and numpy_helper.to_array(t) == 1e3)
    factor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(factor) * 1.001, factor.name))


def _narrow(model: ModelProto) -> None:
    """The shares of the sums travel as halves."""
    for node in calls(model, "AllReduce"):
        halves = []
        for place, name in enumerate(node.input):
            half = f"{name}.half"
            halves += [
                helper.make_node("Cast", [name], [half], to=TensorProto.FLOAT16),
                helper.make_node("Cast", [half], [f"{half}.back"], to=TensorProto.FLOAT),
            ]
            node.input[place] = f"{half}.back"
        own = NodeProto()
        own.CopyFrom(node)
        replace(model, node, [*halves, own])


def _alone(model: ModelProto) -> None:
    """Every rank has its own share of the sums only."""
    for node in calls(model, "AllReduce"):
        replace(model, node, own_values(node, 0))


ERRORS: dict[str, tuple[Callable[[ModelProto], None], bool]] = {
    "an error below the rounding": (_grown, True),
    "halves on the wire": (_narrow, False),
    "shares that are not summed": (_alone, False),
}
"""Error -> its edit, and whether float64 has to show it."""


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_of_a_difference_of_equal_sums_is_different(error, tmp_path):
    edit, exact = ERRORS[error]
    folder = cancelling_ranks(tmp_path, "shard=3")
    edit_ranks(folder, edit)
    result = gopt.verify(folder)
    assert result.outcome is Outcome.DIFFERENT and "d" in failing(result)
    assert fails_in_float64(result) == exact


def test_a_value_that_cannot_be_compared_in_float64_is_not_confirmed(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise RunError("nothing runs it")

    monkeypatch.setattr(StepComparison, "_in_float64", refuse)
    results = [*verified(tmp_path)]
    assert {result.outcome for result in results} <= {Outcome.EQUAL, Outcome.UNCONFIRMED}
    open_ = [result for result in results if not result.equal]
    assert open_
    for result in open_:
        assert [doubt.name for doubt in result.open()] == ["d"]
        assert "nothing runs it" in result.reason()


# --- statistics -------------------------------------------------------------------------------------------------------


def centred(folder: Path) -> Path:
    """Two products of centred inputs: the mean over the batch is zero but for rounding, and a statistic follows it."""
    b, rows = Builder(), 16
    x, y, w, v = (
        b.input("x", (rows, 12)),
        b.input("y", (rows, 6)),
        b.parameter("w", (12, 32)),
        b.parameter("v", (32, 6)),
    )
    seen, axis = b.state("seen", np.zeros(6, np.float32)), b.const([0], "int64")
    c = b.op("Sub", x, b.op("ReduceMean", x, axis, keepdims=1))
    h = b.op("MatMul", c, w)
    z = b.op("MatMul", h, v)
    d = b.op("Sub", z, y)
    b.output("loss", b.op("ReduceMean", b.op("Mul", d, d), keepdims=0), ())
    dz = b.op("Mul", d, b.const(2 / (rows * 6)))
    dh = b.op("MatMul", dz, b.op("Transpose", v, perm=[1, 0]))
    gradients = {w: (c, dh, (12, 32)), v: (h, dz, (32, 6))}
    for name, (left, right, shape) in gradients.items():
        g = b.op("MatMul", b.op("Transpose", left, perm=[1, 0]), right)
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", g, b.const(0.1))), shape)
    mean = b.op("ReduceMean", z, axis, keepdims=0)
    b.output("seen_out", b.op("Add", b.op("Mul", seen, b.const(0.9)), b.op("Mul", mean, b.const(0.1))), (6,))
    return b.save(folder / "step.onnx")


def test_a_statistic_of_rounding_alone_is_equal(tmp_path):
    gopt.shard(centred(tmp_path), "tp=2").write(tmp_path / "out")
    result = Verifier(tmp_path / "out").run(confirm=False)
    assert not failing(result)


def test_an_error_of_a_statistic_of_rounding_alone_is_different(tmp_path):
    gopt.shard(centred(tmp_path), "tp=2").write(tmp_path / "out")

    def edit(model: ModelProto) -> None:
        node = next(node for node in model.graph.node if "seen_out" in node.output)
        model.graph.initializer.append(numpy_helper.from_array(np.full(6, 1e-4, np.float32), "more"))
        moved = helper.make_node(node.op_type, node.input, ["seen_before"])
        replace(model, node, [moved, helper.make_node("Add", ["seen_before", "more"], ["seen_out"])])

    edit_ranks(tmp_path / "out", edit)
    assert "seen" in failing(Verifier(tmp_path / "out").run(confirm=False))


# --- local gradients --------------------------------------------------------------------------------------------------


def met(folder: Path) -> Path:
    """Ranks of a step whose parameter c becomes w times v in the first step: behind it, all gradients are the rounding
    of a product, which the ranks sum in two terms."""
    b, rows = Builder(), 8
    x, w, v, c = (
        b.input("x", (rows, rows)),
        b.parameter("w", (rows, 32)),
        b.parameter("v", (32, 6)),
        b.parameter("c", (rows, 6)),
    )
    h = b.op("MatMul", x, w)
    d = b.op("Sub", b.op("MatMul", h, v), b.op("MatMul", x, c))
    b.output("loss", b.op("ReduceSum", b.op("Mul", d, d), keepdims=0), ())
    turned = b.op("Transpose", x, perm=[1, 0])
    dh = b.op("MatMul", d, b.op("Transpose", v, perm=[1, 0]))
    steps = {
        w: (b.op("MatMul", turned, dh), 1e-9, (rows, 32)),
        v: (b.op("MatMul", b.op("Transpose", h, perm=[1, 0]), d), 1e-9, (32, 6)),
        c: (b.op("Neg", b.op("MatMul", turned, d)), 1.0, (rows, 6)),
    }
    for name, (gradient, rate, shape) in steps.items():
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", gradient, b.const(rate))), shape)
    gopt.shard(b.save(folder / "step.onnx"), "tp=2").write(folder / "out")
    draw = np.random.default_rng(0)
    turns = [np.eye(rows)[draw.permutation(rows)] * draw.choice([-1, 1], (rows, 1)) for _ in range(3)]
    np.savez(folder / "samples.npz", x=np.concatenate(turns).astype(np.float32))  # each is its own inverse, turned
    return folder / "out"


def met_result(folder: Path) -> Verification:
    return Verifier(folder).run(confirm=False, data=str(folder.parent / "samples.npz"))


def test_a_local_gradient_of_rounding_alone_is_equal(tmp_path):
    result = met_result(met(tmp_path))
    assert result.equal, (failing(result), [*result.open()])
    assert "c" not in result.noise
    assert any("of the local gradients of c, v, w: allowed" in note for note in result.notes), result.notes


def test_an_error_of_a_local_gradient_below_its_rounding_is_different(tmp_path):
    folder = met(tmp_path)

    def edit(model: ModelProto) -> None:
        call = calls(model, "AllReduce")[0]
        model.graph.initializer.append(numpy_helper.from_array(np.float32(1 + 2.0**-23), "more"))
        term, call.input[0] = call.input[0], "term.more"
        own = NodeProto()
        own.CopyFrom(call)
        replace(model, call, [helper.make_node("Mul", [term, "more"], ["term.more"]), own])

    edit_ranks(folder, edit)
    result = met_result(folder)
    assert result.outcome is Outcome.DIFFERENT
    assert fails_in_float64(result)


# --- halves inside ----------------------------------------------------------------------------------------------------

NOISY = (1, 3, 7)
"""Seeds whose gradients have directions that are nothing, which the update makes as long as the others."""


def half_ranks(seed: int, folder: Path) -> Path:
    step = folder / "step.onnx"
    plan = Plan(seed=seed, widths=(6, 8, 5), batch=2, rules=("muon-half",))
    step.write_bytes(make(plan).model.SerializeToString())
    gopt.shard(step, "tp=2", prove=False).write(folder / "out")
    return folder / "out"


@pytest.mark.parametrize("seed", NOISY)
def test_ranks_that_round_halves_elsewhere_are_equal_without_them(seed: int, tmp_path: Path) -> None:
    result = gopt.verify(half_ranks(seed, tmp_path))
    assert result.equal and any("float64 too" in note for note in result.notes), result


@pytest.mark.parametrize("seed", NOISY)
def test_an_error_below_the_rounding_of_halves_is_found_without_them(seed: int, tmp_path: Path) -> None:
    folder = half_ranks(seed, tmp_path)

    def edit(model: ModelProto) -> None:
        last = [node for node in model.graph.node if node.op_type == "Gemm"][-1]
        attribute(last, "beta").f *= 1.01

    edit_ranks(folder, edit)
    result = gopt.verify(folder)
    assert result.outcome is Outcome.DIFFERENT
    assert fails_in_float64(result)
