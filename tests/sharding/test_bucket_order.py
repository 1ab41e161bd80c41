"""Whose the elements of a bucket are: the sweep follows them from operands to results, and names the first mistake.

Errors planted in fixtures are in ``tests/lower/test_agreement.py``: each is refused here, and an unequal step there.
"""

from __future__ import annotations

import pytest
from helpers import FIXTURES

import gopt
from gopt.errors import InvariantError
from gopt.ir.graph import Node
from gopt.mesh import Mesh
from gopt.pipeline import build_pipeline
from gopt.program import SpmdProgram
from gopt.sharding.placements import FlatShard, Sharding
from gopt.sharding.verifier import infer_shardings


def sharded(name: str, stage: int, mesh: str = "shard=2", **options: object) -> SpmdProgram:
    pipeline = build_pipeline(defaults={"shard": {"stage": stage, **options}})
    return gopt.shard(gopt.load(FIXTURES / f"{name}.onnx"), Mesh.parse(mesh), pipeline=pipeline).program


def refused(step: SpmdProgram) -> str:
    with pytest.raises(InvariantError) as caught:
        infer_shardings(step)
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
    assert " of a bucket as those of 'fc" in refused(step)


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
    infer_shardings(step)
