"""Every planted error is caught by verify: ranks that are wrong in one way, and in no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, Builder, calls, edit_manifest, edit_rank, edit_ranks, perceptron, rank_path, sgd
from onnx import ModelProto, helper, numpy_helper
from plants import attribute, gradient_calls, own_values, replace
from products import spread

import gopt
from gopt.errors import RunError
from gopt.ir.graph import Node
from gopt.ir.phase import Phase
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.operators.kinds import COMPARISONS
from gopt.passes.pipeline import build_pipeline
from gopt.verification.result import Outcome
from gopt.verification.variants import INFINITE, PLAIN, has_finite_check
from gopt.verification.verify import Verifier

Edit = Callable[[ModelProto], object]


def sharded(folder: Path, name: str, ranks: int = 3, **options: object) -> Path:
    """A fixture as ranks; casts are left where they are, so that every state stands alone."""
    items = [("shard", options), ("statistics", {}), ("prune", {})]
    pipeline = build_pipeline(items)
    gopt.shard(gopt.load(FIXTURES / f"{name}.onnx"), ranks, pipeline=pipeline).write(folder / "out")
    return folder / "out"


def equal(folder: Path) -> bool:
    """Whether no difference is seen; that something is not confirmed does not count as seen."""
    return Verifier(folder).run(steps=2, confirm=False).outcome is not Outcome.DIFFERENT


def test_nothing_planted(tmp_path):
    """The way the others are made is itself sound."""
    assert Verifier(sharded(tmp_path, "mlp_mom_clip_sched")).run(steps=2, confirm=False).equal


@pytest.mark.parametrize(("name", "stage"), spread(["mlp_sgd", "mlp_adamw", "mlp_mom_clip_sched"], [0, 1, 2]))
def test_no_reduction(tmp_path, name, stage):
    out = sharded(tmp_path, name, stage=stage)
    for rank in range(3):

        def drop(model: ModelProto, rank: int = rank) -> None:
            found = gradient_calls(model)
            assert found
            for node in found:
                replace(model, node, own_values(node, rank))

        edit_rank(out, rank, drop)
    assert not equal(out)


@pytest.mark.parametrize(
    ("name", "stage"),
    spread(["mlp_sgd", "mlp_adamw", "mlp_mom_clip_sched", "mlp_adamw_fp16_scaler", "mlp_muon"], [0, 2]),
)
def test_sum_for_mean(tmp_path, name, stage):
    """Adam hides a factor, and so does an active clip: the change of a state and an inactive clip show it."""
    out = sharded(tmp_path, name, stage=stage)

    def plant(model: ModelProto) -> None:
        for node in gradient_calls(model):
            attribute(node, "reduce").s = b"sum"

    edit_ranks(out, plant)
    assert not equal(out)


def test_one_gradient_of_many_is_not_reduced(tmp_path):
    out = sharded(tmp_path, "mlp_adamw", stage=0, **{"bucket-mb": 0.0})

    def plant(model: ModelProto) -> None:
        node = gradient_calls(model)[0]
        replace(model, node, own_values(node, 0))

    edit_ranks(out, plant)
    assert not equal(out)


def test_mean_of_squares(tmp_path):
    """Adam's second moment from a mean of squares in place of the square of the mean."""
    out = sharded(tmp_path, "mlp_adamw", stage=0)
    types = gopt.load(FIXTURES / "mlp_adamw.onnx").training.graph.types

    def plant(model: ModelProto) -> None:
        nodes = list(model.graph.node)
        call = gradient_calls(model)[0]
        local = dict(zip(call.output, call.input))
        producers = {name: node for node in nodes for name in node.output}
        scaled, square = next(
            (producers[node.input[0]], node) for node in nodes
            if node.op_type == "Mul" and node.input[1] in local and node.input[1] in producers[node.input[0]].input
        )  # fmt: skip
        gradient = local[square.input[1]]
        declare(model, "planted.square", types[gradient].dims)
        declare(model, square.output[0], types[gradient].dims)
        new = [
            helper.make_node("Mul", [gradient, scaled.input[1]], ["planted.scaled"]),
            helper.make_node("Mul", ["planted.scaled", gradient], ["planted.square"]),
            helper.make_node("AllReduce", ["planted.square"], list(square.output), domain="gopt.comm"),
        ]
        new[-1].attribute.extend(call.attribute)
        replace(model, square, new)

    edit_ranks(out, plant)
    assert not equal(out)


def declare(model: ModelProto, name: str, dims: tuple[int, ...]) -> None:
    """A value that crosses a call has its type in the file."""
    model.graph.value_info.append(helper.make_tensor_value_info(name, 1, dims))


def test_a_gradient_that_is_none(tmp_path):
    """A role map that calls g·|g| the gradient is refused by value: it is not a change of the loss."""
    b = Builder()
    net = perceptron(b, (3, 2), bias=False)
    gradient = net.gradients["w0"]
    bent = b.op("Mul", gradient, b.op("Abs", gradient))
    net.gradients["w0"] = bent
    sgd(b, net)
    path = b.save(tmp_path / "step.onnx")
    from gopt.analysis.roles import RoleMap

    assert main(["shard", str(path), "--ranks", "2", "-o", str(tmp_path / "good")]) == 0
    assert gopt.verify(tmp_path / "good").equal
    gopt.shard(gopt.load(path, roles=RoleMap(params={"w0": bent})), 2).write(tmp_path / "bad")
    result = gopt.verify(tmp_path / "bad")
    assert not result.equal
    assert [each.parameter for each in result.gradients if not each.holds] == ["w0"]


def test_pieces_are_swapped_in_the_manifest(tmp_path):
    """The manifest has a rank's pieces in another order than the rank."""
    out = sharded(tmp_path, "mlp_adamw", 2)
    swapped = 0

    def plant(record: dict) -> None:
        nonlocal swapped
        for rank in record["ranks"]:
            for state in rank["state"]:
                swapped += len(state["pieces"]) > 1
                state["pieces"].reverse()

    edit_manifest(out, plant)
    assert swapped
    assert not equal(out)


def test_pieces_are_swapped_in_a_rank_file(tmp_path):
    """A rank joins its part of the parameters in another order."""
    out = sharded(tmp_path, "emb_adamw", 2)
    swapped = 0

    def plant(model: ModelProto) -> None:
        nonlocal swapped
        for node in model.graph.node:
            if node.op_type == "Concat" and node.output[0].endswith(".parameter") and len(node.input) > 1:
                node.input[:] = reversed(node.input)
                swapped += 1

    edit_rank(out, 1, plant)
    assert swapped
    assert not equal(out)


@pytest.mark.parametrize("by", [1, 16])
def test_a_piece_is_shifted(tmp_path, by):
    """A rank cuts its parameter a few elements too early."""
    out = sharded(tmp_path, "mlp_adamw", 3)
    shifted = 0

    def plant(model: ModelProto) -> None:
        nonlocal shifted
        for tensor in model.graph.initializer:
            if "parameter" in tensor.name and tensor.name.endswith((".start", ".stop")):
                value = numpy_helper.to_array(tensor)
                if tensor.name.endswith(".start") and value[0] < by:
                    return
                shifted += 1
                tensor.CopyFrom(numpy_helper.from_array(value - by, tensor.name))

    edit_rank(out, 1, plant)
    assert shifted
    assert not equal(out)


def test_parts_of_a_tensor_on_an_axis_of_data(tmp_path):
    """Uneven parts of heads, of an axis that the manifest says has data."""
    gopt.shard(FIXTURES / "gpt_adamw.onnx", "tp=3").write(tmp_path / "out")
    edit_manifest(tmp_path / "out", lambda manifest: manifest["mesh"].setdefault("kinds", {}).update(tp="data"))
    with pytest.raises(gopt.InputError, match="of the gradient"):
        gopt.verify(tmp_path / "out", steps=1, confirm=False)


def test_a_manifest_that_contradicts_a_rank_file(tmp_path):
    out = sharded(tmp_path, "mlp_adamw", 2)

    def plant(record: dict) -> None:
        one, other = (rank["state"] for rank in record["ranks"])
        for left, right in zip(one, other):
            left["pieces"], right["pieces"] = right["pieces"], left["pieces"]

    edit_manifest(out, plant)
    assert main(["verify", str(out), "--no-confirm"]) in (1, 3)


@pytest.mark.parametrize("name", ["mlp_mom_clip_sched", "gpt_adamw_clip_sched_fp16"])
def test_a_local_norm(tmp_path, name):
    out = sharded(tmp_path, name, 2)
    edit_ranks(out, drop_scalar_calls)
    assert not equal(out)


def drop_scalar_calls(model: ModelProto) -> None:
    found = [node for node in calls(model, "AllReduce") if node.output[0].startswith("gopt.shard.scalars.")]
    assert found, "the step has a scalar call"
    for node in found:
        new = own_values(node, 0)
        if attribute(node, "reduce").s == b"max":  # a rank that has no part of a tensor says -inf
            new = [
                each for old, name in zip(node.input, node.output)
                for each in (
                    helper.make_node("Sub", [old, old], [f"{name}.nothing"]),
                    helper.make_node("Max", [old, f"{name}.nothing"], [name]),
                )
            ]  # fmt: skip
        replace(model, node, new)


def test_a_local_finite_check(tmp_path):
    """Without an infinite gradient nobody would notice; with one, some ranks skip the step and others do not."""
    out = sharded(tmp_path, "mlp_adamw_fp16_scaler", 3)
    edit_ranks(out, drop_scalar_calls)
    verifier = Verifier(out)
    assert verifier.run(steps=2, confirm=False, variants=[PLAIN]).equal
    assert verifier.run(steps=2, confirm=False, variants=[INFINITE]).outcome is Outcome.DIFFERENT
    assert verifier.run(steps=2, confirm=False).outcome is Outcome.DIFFERENT


@pytest.mark.parametrize("stage", [0, 2])
def test_moments_are_swapped(tmp_path, stage):
    out = sharded(tmp_path, "mlp_adamw", 2, stage=stage)
    pair = ("fc1.weight.exp_avg", "fc1.weight.exp_avg_sq") if stage == 0 else _state_inputs(out)

    def plant(model: ModelProto) -> None:
        table = {pair[0]: pair[1], pair[1]: pair[0]}
        assert set(table) <= {value.name for value in model.graph.input}
        for node in model.graph.node:
            node.input[:] = [table.get(name, name) for name in node.input]

    edit_rank(out, 1, plant)
    assert not equal(out)


def _state_inputs(out: Path) -> tuple[str, str]:
    model = onnx.load(rank_path(out, 1), load_external_data=False)
    names = [value.name for value in model.graph.input if value.name.startswith("gopt.shard.")]
    return names[0], names[1]


def test_a_stale_parameter(tmp_path):
    """One rank keeps its old parameter."""
    out = sharded(tmp_path, "mlp_sgd", 2, stage=0)

    def plant(model: ModelProto) -> None:
        target = "fc1.weight_out"
        node = next(node for node in model.graph.node if target in node.output)
        replace(model, node, [helper.make_node("Identity", ["fc1.weight"], [target])])

    edit_rank(out, 1, plant)
    assert not equal(out)


def test_statistics_are_left_apart(tmp_path):
    out = sharded(tmp_path, "cnn_sgd", 2)

    def plant(model: ModelProto) -> None:
        for node in calls(model, "AllReduce"):
            if any(name.startswith("gopt.statistics.") for name in node.input):
                replace(model, node, own_values(node, 0))

    edit_ranks(out, plant)
    assert not equal(out)


def test_a_reduced_gradient_in_the_backward(tmp_path):
    """BatchNorm's bias gradient feeds the backward, which must keep the local one: each rank sees its own loss."""
    out = sharded(tmp_path, "cnn_sgd", 2, stage=0)
    source = gopt.load(FIXTURES / "cnn_sgd.onnx").training
    users = source.graph.users()
    backward = {id(n) for n in source.graph.nodes if n.phase.value == "backward"}
    shared = [g for g in source.gradients.values() if any(id(n) in backward for n in users.get(g, ()))]
    assert shared, "the fixture has such a gradient"

    def plant(model: ModelProto) -> None:
        table = {}
        for node in gradient_calls(model):
            table.update({old: new for old, new in zip(node.input, node.output) if old in shared})
        # One more call of its own, so that the value is there before the backward reads it.
        nodes = list(model.graph.node)
        group = list(gradient_calls(model)[0].attribute)
        fresh = []
        for name in table:
            declare(model, f"planted.{name}", source.graph.types[name].dims)
            call = helper.make_node("AllReduce", [name], [f"planted.{name}"], domain="gopt.comm")
            call.attribute.extend(group)
            fresh.append((name, call))
        del model.graph.node[:]
        made = {}
        for node in nodes:
            if node.domain != "gopt.comm":
                node.input[:] = [made.get(name, name) for name in node.input]
            model.graph.node.append(node)
            for name, call in fresh:
                if name in node.output:
                    model.graph.node.append(call)
                    made[name] = call.output[0]

    edit_ranks(out, plant)
    assert not equal(out)


@pytest.mark.parametrize("what", ["order", "layout", "operator"])
def test_calls_differ_between_ranks(tmp_path, what):
    out = sharded(tmp_path, "mlp_adamw", 2, **{"bucket-mb": 0.0})

    def plant(model: ModelProto) -> None:
        nodes = list(model.graph.node)
        places = [place for place, node in enumerate(nodes) if node.op_type == "ReduceScatter"]
        first, second = places[:2]
        if what == "order":
            late = nodes[first]
            del nodes[first]
            nodes.insert(second, late)
        elif what == "layout":
            cuts = attribute(nodes[first], "cuts").ints
            cuts[1] -= 1
        else:
            attribute(nodes[first], "reduce").s = b"max"
        del model.graph.node[:]
        model.graph.node.extend(nodes)

    edit_rank(out, 1, plant)
    with pytest.raises(RunError, match=r"rank 0 .*rank 1 "):
        Verifier(out).run(steps=1, confirm=False)


def test_a_rank_makes_one_call_less(tmp_path):
    out = sharded(tmp_path, "mlp_mom_clip_sched", 3)
    edit_rank(out, 2, drop_scalar_calls)
    with pytest.raises(RunError, match="rank"):
        Verifier(out).run(steps=1, confirm=False)


def test_the_command_says_so(tmp_path, capsys):
    out = sharded(tmp_path, "mlp_adamw", 2)
    assert main(["verify", str(out), "--steps", "1", "--no-confirm"]) == 0

    def plant(model: ModelProto) -> None:
        for node in gradient_calls(model):
            attribute(node, "reduce").s = b"sum"

    edit_ranks(out, plant)
    assert main(["verify", str(out), "--steps", "1", "--no-confirm"]) == 1
    assert "exp_avg" in capsys.readouterr().out


def test_ranks_begin_with_the_same_memory_and_nothing_of_a_step_is_held_beyond_the_run(tmp_path):
    """Copies for each rank, and results kept for steps that are over, are what a large model has no room for."""
    verifier = Verifier(sharded(tmp_path, "mlp_adamw", 2, stage=0))
    one, twin = verifier.all_ranks.held(verifier._start(0))
    assert one.keys() == twin.keys() and all(np.shares_memory(one[name], twin[name]) for name in one)
    with pytest.raises(ValueError, match="read-only"):
        next(iter(one.values()))[...] = 1
    assert verifier.run(steps=1).equal
    assert not verifier.reference._kept and not any(rank.first_runs for rank in verifier.ranks)


def test_a_rank_is_fed_something_else(tmp_path):
    out = sharded(tmp_path, "mlp_adamw", 2)

    def tamper(rank: int, feeds: dict[str, np.ndarray]) -> None:
        if rank == 1:
            feeds["x"] = feeds["x"] * 1.01

    assert Verifier(out).run(steps=1, confirm=False, tamper=tamper).outcome is Outcome.DIFFERENT


@pytest.mark.parametrize("default", [None, {"schedule": "0.95"}, {"table": [0.95, 0.9]}])
def test_a_hyper_parameter_begins_at_its_own_value(tmp_path, default):
    """A mean that torch computes in two ways, by the size of beta, and corrects: at a beta of 1 that divides by 0."""
    b = Builder()
    x, beta, w = b.input("x", (4, 3)), b.input("beta", ()), b.parameter("w", (3,))
    m = b.state("m", np.zeros(3, np.float32))
    product = b.op("Mul", x, w)
    b.output("loss", b.op("ReduceMean", b.op("Mul", product, product), keepdims=0), ())
    g = b.op("ReduceSum", b.op("Mul", b.op("Mul", product, x), b.const(2 / 12)), b.const([0], "int64"), keepdims=0)
    share, change = b.op("Sub", b.const(1.0), beta), b.op("Sub", g, m)
    small = b.op("Less", b.op("Abs", share), b.const(0.5))
    ways = b.op("Add", m, b.op("Mul", change, share)), b.op("Sub", g, b.op("Mul", change, beta))
    m1 = b.op("Where", small, *ways)
    b.output("m_out", m1, (3,))
    b.output("w_out", b.op("Sub", w, b.op("Mul", b.op("Div", m1, share), b.const(0.1))), (3,))
    model = b.model()
    if default is not None:
        roles = {"loss": "", "states": {}, "params": {}, "batch": [], "hyper": {"beta": default}}
        helper.set_model_props(model, {"gopt.roles": json.dumps(roles)})
    onnx.save(model, tmp_path / "step.onnx")
    gopt.shard(gopt.load(tmp_path / "step.onnx"), 2).write(tmp_path / "out")
    result = Verifier(tmp_path / "out").run(confirm=False)
    assert result.equal, result.to_json()
    starts = [name for name in result.worst if name.startswith("beta = ")]
    assert starts == (["beta = 1"] if default is None else ["beta = 0.5"])
    assert any("not finite" in note for note in result.notes) == (default is None)


@pytest.mark.parametrize("operator", sorted(COMPARISONS))
def test_every_comparison_with_infinity_is_a_finite_check(operator):
    """``inf >= |gradient|`` and its mirror are as good a test as ``==``."""
    for limit, looks in ((np.inf, True), (1.0, False)):
        node = Node(operator, ["gradient", "limit"], ["flag"])
        node.phase = Phase.UPDATE
        limits = {"limit": Tensor(TensorType("float32", ()), array=np.array(limit, np.float32))}
        graph = SimpleNamespace(nodes=[node], initializers=limits)
        training: Any = SimpleNamespace(graph=graph, gradients={"weight": "gradient"})
        assert has_finite_check(training) is looks
