"""Scalars of packed calls that are exchanged: each is a norm, and a norm of another parameter is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers import FIXTURES
from plants import planted_pipeline

import gopt
from gopt.errors import InvariantError
from gopt.ir.graph import COMM, Node
from gopt.records.mesh import Mesh
from gopt.spmd.program import SpmdProgram

SOURCE = "mlp_lamb"


def call(step: SpmdProgram) -> Node:
    return next(node for node in step.graph.nodes if node.domain == COMM and node.op_type == "AllReduce")


def outputs(step: SpmdProgram) -> None:
    node = call(step)
    node.outputs[0], node.outputs[3] = node.outputs[3], node.outputs[0]


def outputs_of_one_parameter(step: SpmdProgram) -> None:
    """Its own norm, and that of its step."""
    node = call(step)
    node.outputs[0], node.outputs[1] = node.outputs[1], node.outputs[0]


def operands(step: SpmdProgram) -> None:
    node = call(step)
    node.inputs[2], node.inputs[5] = node.inputs[5], node.inputs[2]


def readers(step: SpmdProgram) -> None:
    """What gives two results the source's names reads the other one."""
    results = call(step).outputs
    one, other = (next(each for each in step.graph.nodes if results[place] in each.inputs) for place in (1, 2))
    one.inputs, other.inputs = other.inputs, one.inputs


def sharded(plant: Callable[[SpmdProgram], None], mesh: str = "shard=2", stage: int = 2) -> None:
    source = gopt.load(FIXTURES / f"{SOURCE}.onnx")
    gopt.shard(source, Mesh.parse(mesh), pipeline=planted_pipeline(plant, stage))


@pytest.mark.parametrize("plant", [outputs, outputs_of_one_parameter, operands, readers])
@pytest.mark.parametrize("stage", [1, 3])
def test_exchanged_scalars_are_named(plant, stage):
    with pytest.raises(InvariantError, match=r"makes 'sum_\d+' of 'sum_\d+'") as caught:
        sharded(plant, stage=stage)
    assert "the source makes it of" in caught.value.hints[0]


def test_a_term_with_the_other_sign_is_found():
    def plant(step: SpmdProgram) -> None:
        joined = next(node for node in step.graph.nodes if ".joined" in node.outputs[0])
        joined.op_type = "Sub"

    pipeline = planted_pipeline(plant, 2, **{"bucket-mb": 0.0001})
    with pytest.raises(InvariantError, match=r"makes 'add_3' of 'sum_6', .* -'sum_9'"):
        gopt.shard(gopt.load(FIXTURES / "mlp_mom_clip_sched.onnx"), 2, pipeline=pipeline)


@pytest.mark.parametrize("name", ["mlp_lamb", "mlp_mom_clip_sched", "mlp_adamw_fp16_scaler", "optim/clip_each"])
@pytest.mark.parametrize(("mesh", "partition"), [("dp=2,shard=2", "flat"), ("shard=3", "whole"), ("shard=2", "rows")])
def test_what_passes_make_holds(name, mesh, partition):
    gopt.shard(gopt.load(FIXTURES / f"{name}.onnx"), mesh, stage=2, partition=partition)
