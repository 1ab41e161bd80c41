"""The verifier names the first node that breaks a rule: node, operand, placement, and what was expected."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
from helpers import FIXTURES, Builder, perceptron
from plants import planted_pass

import gopt
from gopt.collectives.messages import MESSAGES
from gopt.errors import InvariantError
from gopt.ir.graph import COMM, Node
from gopt.ir.types import TensorType
from gopt.passes.pipeline import Pipeline, build_pipeline
from gopt.records.mesh import Mesh
from gopt.records.placements import (
    FLAG_COUNT,
    FULLY_REPLICATED,
    PER_MEMBER,
    REPLICATED,
    FlatShard,
    OnMember,
    Shard,
    Sharding,
)
from gopt.spmd.program import SpmdProgram
from gopt.spmd.verifier import ShardingInference, infer_shardings


def sharded(name: str, mesh: str, stage: int, *, accumulate: int = 1) -> SpmdProgram:
    source = gopt.load(FIXTURES / f"{name}.onnx")
    pipeline = build_pipeline(defaults={"shard": {"stage": stage}})
    return gopt.shard(source, Mesh.parse(mesh), accumulate=accumulate, pipeline=pipeline).program


def test_values_of_a_step():
    step = sharded("mlp_adamw", "dp=2,shard=3", 2)
    known = infer_shardings(step)
    assert known.axes == ("dp", "shard")
    assert known.of("x") == (PER_MEMBER, PER_MEMBER) == known.of(step.training.loss)
    scattered = next(node for node in step.graph.nodes if node.op_type == "ReduceScatter")
    cuts = FlatShard.whole(tuple(scattered.attributes["cuts"]))
    assert known.of(scattered.inputs[0]) == (PER_MEMBER, PER_MEMBER)
    assert known.of(scattered.outputs[0]) == (PER_MEMBER, cuts)
    outer = next(node for node in step.graph.nodes if node.op_type == "AllReduce")
    assert known.of(outer.outputs[0]) == (REPLICATED, cuts)
    assert known.of("fc1.weight_out") == (REPLICATED, REPLICATED)


def test_an_axis_of_one_member_is_none():
    step = sharded("mlp_adamw", "dp=1,shard=2", 2)
    assert infer_shardings(step).axes == ("shard",)


def plant(step: SpmdProgram, at: int, node: Node) -> None:
    """Put a node into a step, with a result that is shown: what nothing needs is not looked at."""
    step.graph.nodes.insert(at, node)
    step.training.metrics.append(node.outputs[0])


def planted(step: SpmdProgram, edit: Node, at: int) -> InvariantError:
    plant(step, at, edit)
    with pytest.raises(InvariantError) as caught:
        infer_shardings(step)
    return caught.value


def test_the_refusal_says_what_was_expected():
    step = sharded("mlp_mom_clip_sched", "shard=2", 2)
    place = next(place for place, node in enumerate(step.graph.nodes) if node.op_type == "Select")
    term = step.graph.nodes[place].outputs[0]
    error = planted(step, Node("Exp", [term], ["planted"], made_by="plant"), place + 1)
    assert error.message == f"Exp 'planted' reads {term!r}, which is a partial sum along shard"
    assert error.hints == ("it takes the value itself: Exp of terms is not a term of its result",)


def test_a_whole_tensor_beside_a_shard_is_refused():
    step = sharded("mlp_adamw", "shard=2", 2)
    place, node = next(
        (place, node) for place, node in enumerate(step.graph.nodes) if node.is_a("Sub") and node.sharding.by_axis
    )
    whole = next(name for name, type in step.training.graph.inputs.items() if name in step.training.gradients)
    add = Node("Add", [node.inputs[0], whole], ["planted"], made_by="plant", sharding=node.sharding)
    assert planted(step, add, place).message.startswith(f"Add 'planted' reads {whole!r}, which is replicated")


@pytest.mark.parametrize(("name", "mesh", "stage"), [("mlp_adamw", "shard=3", 1), ("gpt_adamw", "dp=2,shard=2", 3)])
def test_nodes_on_one_shard_have_the_placement_that_their_rule_gives(name, mesh, stage, monkeypatch):
    step = sharded(name, mesh, stage)
    found = infer_shardings(step).known
    monkeypatch.setattr(ShardingInference, "_shard_of", lambda *_: None)
    assert infer_shardings(step).known == found


def test_the_first_offender_is_named():
    step = sharded("mlp_mom_clip_sched", "shard=2", 2)
    place = next(place for place, node in enumerate(step.graph.nodes) if node.op_type == "Select")
    term = step.graph.nodes[place].outputs[0]
    plant(step, place + 1, Node("Exp", [term], ["second"], made_by="plant"))
    error = planted(step, Node("Sqrt", [term], ["first"], made_by="plant"), place + 1)
    assert error.message.startswith("Sqrt 'first'")


def test_every_pass_is_held_to_the_rules_when_asked():
    """With ``--verify-each`` the pass that broke a rule is named, though a later one would have hidden it."""

    def breaks(step: SpmdProgram) -> None:
        term = next(node.outputs[0] for node in step.graph.nodes if node.op_type == "Select")
        types = step.graph.types
        types["planted"] = types[term]
        plant(step, len(step.graph.nodes), Node("Sqrt", [term], ["planted"], made_by="plant"))

    def mends(step: SpmdProgram) -> None:
        step.graph.nodes.pop()
        step.training.metrics.pop()

    source = gopt.load(FIXTURES / "mlp_mom_clip_sched.onnx")
    whole = build_pipeline(defaults={"shard": {"stage": 2}})
    stages = (*whole.stages, planted_pass(breaks, "breaks"), planted_pass(mends, "mends"))
    gopt.shard(source, 2, pipeline=Pipeline(stages))
    with pytest.raises(InvariantError, match="pass breaks: Sqrt 'planted' reads"):
        gopt.shard(source, 2, pipeline=Pipeline(stages, verify_each=True))


NAMES = sorted(path.stem for path in FIXTURES.glob("*.onnx"))


@pytest.mark.parametrize("name", NAMES)
def test_no_pass_leaves_a_fixture_against_the_rules(name):
    source = gopt.load(FIXTURES / f"{name}.onnx")
    for mesh, stage in itertools.product(("shard=3", "dp=2,shard=2"), (0, 1, 2, 3)):
        pipeline = build_pipeline(defaults={"shard": {"stage": stage}}, verify_each=True)
        gopt.shard(source, Mesh.parse(mesh), pipeline=pipeline)


def test_a_value_that_is_sent_twice_has_two_results():
    step = sharded("mlp_mom_clip_sched", "dp=2,shard=2", 2)
    node = next(each for each in step.graph.nodes if each.op_type == "AllReduce" and each.attributes["group"] == "dp")
    node.inputs, node.outputs = [*node.inputs, node.inputs[0]], [*node.outputs, "twice"]
    known = infer_shardings(step)
    assert known.of("twice") == known.of(node.outputs[0]) != known.of("fc1.weight")


def refused(step: SpmdProgram) -> str:
    with pytest.raises(InvariantError) as caught:
        infer_shardings(step)
    return caught.value.message


def found(step: SpmdProgram, op_type: str) -> tuple[int, Node]:
    return next((place, node) for place, node in enumerate(step.graph.nodes) if node.op_type == op_type)


def test_the_shape_of_a_shard_is_each_members_own():
    step = sharded("mlp_mom_clip_sched", "shard=2", 2)
    place, node = found(step, "ReduceScatter")
    plant(step, place + 1, Node("Size", node.outputs, ["size"], made_by="plant"))
    plant(step, place + 2, Node("ConstantOfShape", ["size"], ["filled"], made_by="plant"))
    known = infer_shardings(step)
    assert known.of("size") == known.of("filled") == (PER_MEMBER,)
    assert known.of("x") == (PER_MEMBER,)


def test_a_guard_of_a_node_that_all_members_run_is_refused():
    """``specialise`` would take it for absent on all of them."""
    step = sharded("mlp_mom_clip_sched", "shard=2", 2)
    _, node = found(step, "Select")
    producer = next(each for each in step.graph.nodes if node.inputs[0] in each.outputs)
    producer.sharding = FULLY_REPLICATED
    assert "which is a partial sum" in refused(step) or "Select" in refused(step)


def test_a_random_node_takes_no_terms():
    step = sharded("mlp_mom_clip_sched", "shard=2", 2)
    place, node = found(step, "Select")
    plant(step, place + 1, Node("Dropout", node.outputs, ["planted"], made_by="plant"))
    assert refused(step).startswith("Dropout 'planted' reads")


def test_an_operator_of_another_domain_is_no_cast():
    step = sharded("mlp_mom_clip_sched", "shard=2", 2)
    place, node = found(step, "Select")
    like = Node("CastLike", [step.training.hyper[0], node.outputs[0]], ["planted"], domain="my", made_by="plant")
    plant(step, place + 1, like)
    assert refused(step).startswith("CastLike 'planted' reads")


def test_what_nothing_needs_is_not_looked_at():
    """Behind a pass, before ``prune``, an update that moved to its owner leaves its old nodes."""
    step = sharded("mlp_mom_clip_sched", "shard=2", 2)
    place, node = found(step, "Select")
    step.graph.nodes.insert(place + 1, Node("Exp", node.outputs, ["dead"], made_by="plant"))
    assert infer_shardings(step).of("dead") == (REPLICATED,)


def gated(folder: Path) -> SpmdProgram:
    """A step that leaves out an update where a gradient is not finite: flags, joined by a logical and."""
    b = Builder()
    net = perceptron(b)
    fine = [b.op("ReduceMin", b.op("Not", b.op("IsNaN", g)), keepdims=0) for g in net.gradients.values()]
    gate = functools.reduce(lambda one, other: b.op("And", one, other), fine)
    b.output("loss", net.loss, ())
    for name, shape in net.params.items():
        moved = b.op("Sub", name, b.op("Mul", net.gradients[name], b.const(0.1)))
        b.output(f"{name}_out", b.op("Where", gate, moved, name), shape)
    return gopt.shard(gopt.load(b.save(folder / "step.onnx")), 2).program


def test_a_flag_is_whether_members_set_it_and_not_how_many_did(tmp_path):
    step = gated(tmp_path)
    _, flag = found(step, "Equal")
    count, zero = flag.inputs
    assert infer_shardings(step).of(count) == (FLAG_COUNT,)
    assert infer_shardings(step).of(flag.outputs[0]) == (REPLICATED,)
    others = [
        Node("Cast", [count], ["as_a_number"], attributes={"to": 11}, made_by="plant"),
        Node("Mul", [count, step.training.hyper[0] if step.training.hyper else zero], ["times"], made_by="plant"),
        Node("Equal", [count, count], ["itself"], made_by="plant"),
    ]
    for node in others:
        step = gated(tmp_path)
        assert (
            "which is the number of members that set a flag along shard"
            in planted(step, node, len(step.graph.nodes)).message
        )


def test_a_flag_that_is_compared_with_another_number_is_refused(tmp_path):
    step = gated(tmp_path)
    place, flag = found(step, "Equal")
    one = Node("Constant", [], ["one"], attributes={"value_float": 1.0}, made_by="plant")
    step.graph.nodes.insert(place, one)
    flag.inputs[1] = "one"
    assert "which is the number of members that set a flag along shard" in refused(step)


def test_flags_that_are_counted_without_a_negation_are_refused(tmp_path):
    """All members' flags: their sum is as many as set it, and says nothing of those that did not."""
    step = gated(tmp_path)
    _, negated = found(step, "Cast")
    producer = next(node for node in step.graph.nodes if negated.inputs[0] in node.outputs)
    assert producer.op_type == "Not"
    negated.inputs = list(producer.inputs)
    assert refused(step).startswith("Cast ")


def test_a_shard_of_a_dimension_goes_through_no_operator_without_a_rule():
    """It would be taken for the member's own value of that shape."""
    for op_type in ("Softmax", "Relu", "MatMul"):
        step = sharded("mlp_adamw", "shard=2", 0)
        name = next(iter(step.training.gradients.values()))
        place, _ = found(step, "AllReduce")
        rows = step.graph.types[name].dims[0]
        attributes = {"group": "shard", "reduce": "mean", "axis": 0, "sizes": [rows - 1, 1]}
        step.graph.types["part"] = step.graph.types[name]
        part = Node("ReduceScatter", [name], ["part"], domain=COMM, attributes=attributes, made_by="plant")
        plant(step, place, part)
        assert infer_shardings(step).of("part") == (Shard(0, (rows - 1, 1)),)
        plant(step, place + 1, Node(op_type, ["part"], ["planted"], made_by="plant"))
        assert refused(step).startswith(f"{op_type} 'planted' reads 'part', which is sharded along dimension 0")


def test_random_numbers_are_each_members_own():
    """Though no operand differs: a rank draws for itself."""
    step = sharded("mlp_adamw", "shard=2", 0)
    plant(step, 0, Node("RandomNormal", [], ["noise"], attributes={"shape": [4]}, made_by="plant"))
    assert infer_shardings(step).of("noise") == (PER_MEMBER,)


def test_a_members_own_value_beside_terms_is_refused():
    """The sum of both would be neither: reduced, it counts the member's own value once for each member."""
    step = sharded("mlp_mom_clip_sched", "shard=2", 2)
    place, node = found(step, "Select")
    plant(step, place + 1, Node("Add", [step.training.loss, node.outputs[0]], ["planted"], made_by="plant"))
    assert refused(step).startswith(f"Add 'planted' reads {step.training.loss!r}, which is each member's own")


def test_the_other_operand_of_a_cast_gives_its_type_alone():
    step = sharded("mlp_adamw", "shard=2", 0)
    plant(step, 0, Node("CastLike", ["fc1.weight", "x"], ["planted"], made_by="plant"))
    plant(step, len(step.graph.nodes), Node("CastLike", ["fc1.weight", step.training.loss], ["later"], made_by="plant"))
    known = infer_shardings(step)
    assert known.of("planted") == known.of("later") == (REPLICATED,)


def test_a_cast_to_the_type_of_a_shard_is_no_shard():
    step = sharded("mlp_adamw", "shard=2", 2)
    place, node = next(
        (place, node) for place, node in enumerate(step.graph.nodes) if node.is_a("Sub") and node.sharding.by_axis
    )
    step.graph.types["one"] = TensorType("float32", ())
    cast = Node("CastLike", ["one", node.inputs[0]], ["planted"], made_by="plant", sharding=node.sharding)
    plant(step, place, cast)
    assert infer_shardings(step).of("planted") == (REPLICATED,)


@pytest.mark.parametrize(
    ("size", "placement"), [(6, REPLICATED), ("N", PER_MEMBER), ("found", PER_MEMBER), (None, PER_MEMBER)]
)
def test_the_shape_of_a_members_own_value(size, placement):
    """Batches of an open number of samples have a size of their own, and so has what a NonZero finds."""
    step = sharded("mlp_adamw", "shard=2", 0)
    inputs = step.training.graph.inputs
    inputs["x"] = TensorType("float32", ("N", 32))
    inputs["fc1.weight"] = TensorType("float32", None)  # nothing is known of another
    step.graph.types["own"] = TensorType("float32", (size,))
    plant(step, 0, Node("Identity", ["x"], ["own"], made_by="plant"))
    plant(step, 1, Node("Shape", ["own"], ["shape"], made_by="plant"))
    assert infer_shardings(step).of("shape") == (placement,)


def test_an_operator_of_another_domain_is_no_message():
    step = sharded("mlp_adamw", "shard=2", 0)
    place, node = found(step, "AllReduce")
    for number, op_type in enumerate(sorted(MESSAGES)):
        plant(step, place, Node(op_type, node.inputs[:1], [f"planted{number}"], domain="my", made_by="plant"))
        assert infer_shardings(step).of(f"planted{number}") == (PER_MEMBER,)


def test_a_call_of_values_that_lie_otherwise_along_another_axis_is_refused():
    """One is on a single member of dp, the other on all: the bucket of both would be on no members at all."""
    step = sharded("mlp_adamw", "dp=2,shard=2", 0)
    step.graph.types["alone"] = type = step.graph.types["fc1.weight"]
    there = Sharding.along("dp", OnMember(0))
    plant(step, 0, Node("Identity", ["fc1.weight"], ["alone"], sharding=there, made_by="plant"))
    attributes = {"group": "shard", "reduce": "mean", "cuts": [0, type.elements, 2 * type.elements]}
    call = Node("ReduceScatter", ["alone", "fc1.weight"], ["planted"], domain=COMM, attributes=attributes)
    call.made_by = "plant"
    plant(step, 1, call)
    assert refused(step).startswith("ReduceScatter 'planted' reads 'fc1.weight', which is replicated along dp")
