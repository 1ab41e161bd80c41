"""Errors planted in the buckets of fixtures: elements taken for another parameter's (``gopt.spmd.bucket_order``).

More of them are in ``tests/lower/test_agreement.py``: each is refused here, and an unequal step there.
"""

from __future__ import annotations

import pytest
from helpers import FIXTURES
from recipes import Recipe, build

import gopt
from gopt.analysis.training import Phase
from gopt.errors import InvariantError
from gopt.ir.graph import COMM, Node
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.records.placements import FlatShard, Sharding
from gopt.spmd.bucket_order import check_bucket_order
from gopt.spmd.program import SpmdProgram
from gopt.spmd.verifier import infer_shardings


def sharded(name: str, stage: int, mesh: str = "shard=2", **options: object) -> SpmdProgram:
    pipeline = build_pipeline(defaults={"shard": {"stage": stage, **options}})
    return gopt.shard(gopt.load(FIXTURES / f"{name}.onnx"), Mesh.parse(mesh), pipeline=pipeline).program


def refused(step: SpmdProgram) -> str:
    with pytest.raises(InvariantError) as caught:
        infer_shardings(step)
        check_bucket_order(step)
    return caught.value.message


def first(step: SpmdProgram, op_type: str) -> Node:
    return next(node for node in step.graph.nodes if node.op_type == op_type)


def test_a_gather_in_another_order():
    step = sharded("mlp_adamw", 2)
    gather = first(step, "AllGather")
    gather.outputs[0], gather.outputs[1] = gather.outputs[1], gather.outputs[0]
    assert refused(step).startswith("AllGather 'fc2.")
    gather.outputs[0], gather.outputs[1] = gather.outputs[1], gather.outputs[0]
    gather.attributes["shapes"] = gather.attributes["shapes"][::-1]
    assert " of a bucket as elements of 'fc" in refused(step)


def test_whole_tensors_of_owners_in_another_order():
    """Each is brought into its own shape; the gather joins them as they lie in the bucket."""
    step = sharded("mlp_muon", 2)
    concat = first(step, "LocalConcat")
    concat.inputs.reverse()
    concat.attributes["sizes"].reverse()
    concat.sharding = Sharding()
    assert refused(step)


def test_an_owner_that_takes_another_tensors_gradient():
    step = sharded("gpt_adamw", 2, partition="whole", style="broadcast")
    types, call = step.graph.types, first(step, "Reduce")
    names = call.outputs
    one, other = next((a, b) for b in range(len(names)) for a in range(b) if types[names[a]] == types[names[b]])
    names[one], names[other] = names[other], names[one]
    assert " reads " in refused(step)


def test_a_run_of_a_class_beside_another():
    """A class whose gradient lies in front of its states by one tensor of the same size."""
    step = sharded("cnn_mom_fp16", 2)
    node = next(each for each in step.graph.nodes if each.op_type == "LocalSlice" and len(each.inputs) > 2)
    node.inputs = [*node.inputs[1:2], node.inputs[0], *node.inputs[2:]]
    assert " beside elements " in refused(step)


def test_two_tensors_in_one_place_of_a_slice():
    step = sharded("mlp_adamw", 2)
    node = next(each for each in step.graph.nodes if each.op_type == "LocalSlice" and len(each.inputs) > 2)
    node.attributes["starts"] = [node.attributes["starts"][0], *node.attributes["starts"][:-1]]
    assert refused(step).startswith(f"LocalSlice {node.label!r} reads elements ")


def test_what_is_no_parameters_says_nothing():
    """A mask that is cut like the parameters: whose it is, is not known."""
    step = sharded("mlp_adamw", 2)
    node = first(step, "LocalSlice")
    flat = node.sharding.flat
    assert flat is not None and isinstance(flat[1], FlatShard)
    types = step.graph.types
    for place, name in enumerate(list(node.inputs)):
        types[f"mask{place}"] = types[name]
        shape = Node("Shape", [name], [f"shape{place}"], made_by="plant")
        mask = Node("ConstantOfShape", [f"shape{place}"], [f"mask{place}"], made_by="plant")
        step.graph.nodes[:0] = [shape, mask]
        node.inputs[place] = f"mask{place}"
    cuts, shapes = list(flat[1].cuts), [str(flat[1].cuts[-1])]
    types["row"] = types[node.outputs[0]]
    row = Node(
        "AllGather", node.outputs, ["row"], domain=COMM, attributes={"group": "shard", "cuts": cuts, "shapes": shapes}
    )
    row.made_by = "plant"
    step.graph.nodes.insert(step.graph.nodes.index(node) + 1, row)
    step.training.metrics.append("row")
    check_bucket_order(step)


def test_statistics_in_another_order():
    """A running mean and a running variance of one shape change places in the call that averages them."""
    step = sharded("cnn_mom_fp16", 2)
    call = next(node for node in step.graph.nodes if "bn1.running_mean_out" in node.outputs)
    one, other = (call.outputs.index(f"bn1.running_{name}_out") for name in ("mean", "var"))
    call.inputs[one], call.inputs[other] = call.inputs[other], call.inputs[one]
    assert "makes 'bn1.running_mean_out' of elements of 'bn1.running_var'" in refused(step)


def other_values(step: SpmdProgram, gradient: str) -> list[str]:
    """Values of the backward in front of a gradient, of the same type, that are no gradients."""
    types, gradients = step.graph.types, set(step.training.gradients.values())
    nodes = [node for node in step.training.graph.nodes if node.phase is Phase.BACKWARD]
    names = [name for node in nodes for name in node.outputs]
    before = names[: names.index(gradient)] if gradient in names else []
    return [name for name in before if types.get(name) == types[gradient] and name not in gradients]


def test_a_call_that_reads_another_value_than_the_gradient():
    """Its result stands for the gradient in the update."""
    step = sharded("mlp_adamw_fp16_scaler", 0, "dp=2,shard=2")
    call = first(step, "AllReduce")
    call.inputs[0] = other_values(step, call.inputs[0])[0]
    assert "these are elements of no parameter that is known" in refused(step)


def test_a_bucket_that_holds_another_value_than_a_gradient():
    step = sharded("cnn_mom_fp16", 3)
    calls = [node for node in step.graph.nodes if node.op_type == "ReduceScatter" and len(node.inputs) > 1]
    found = [
        (call, at, other) for call in calls for at, name in enumerate(call.inputs) for other in other_values(step, name)
    ]
    call, place, other = found[0]
    call.inputs[place] = other
    said = f"ReduceScatter {call.label!r} reads {other!r} in a bucket of gradients: it is no parameter's"
    assert refused(step) == said


def test_a_gather_in_another_order_of_a_bucket_of_several_classes(tmp_path):
    """The shards of the classes are joined in front of the gather."""
    path = tmp_path / "step.onnx"
    path.write_bytes(build(Recipe(widths=(4, 4, 4), direction=("adam", "momentum"))).SerializeToString())
    step = gopt.shard(gopt.load(path), 2).program
    node = next(each for each in step.graph.nodes if each.op_type == "AllGather")
    assert any(each.op_type == "LocalConcat" and each.outputs == node.inputs for each in step.graph.nodes)
    a, b = (node.outputs.index(f"{name}_out") for name in ("w0", "w1"))
    node.outputs[a], node.outputs[b] = node.outputs[b], node.outputs[a]
    assert refused(step).startswith(f"AllGather {node.label!r} makes ")
