"""A refolded optimizer: each state in its own slot, each new value to its own state; errors planted behind passes."""

from __future__ import annotations

from dataclasses import replace

import onnx
import pytest
from helpers import FIXTURES, source
from plants import Plant, planted_pipeline
from test_carried_values import exchanged

import gopt
from gopt.api import Sharded
from gopt.errors import GoptError, InvariantError
from gopt.ir.opaque.refold import RefoldedCall
from gopt.lower.refolded import check_refolded
from gopt.records.mesh import Mesh
from gopt.spmd.program import SpmdProgram
from gopt.verification.verify import Verifier


def sharded(plant: Plant, stage: int, partition: str = "flat", mesh: str = "shard=2") -> Sharded:
    pipeline = planted_pipeline(plant, stage, partition=partition) if stage else planted_pipeline(plant, stage)
    return gopt.shard(source("mlp_ort_adamw"), Mesh.parse(mesh), pipeline=pipeline)


def of_members(change, field: str, one: str, other: str) -> Plant:
    """The first weight of the call exchanges two of its slots."""

    def plant(step: SpmdProgram) -> None:
        node = next(node for node in step.graph.nodes if isinstance(node.origin, RefoldedCall))
        first, *rest = node.origin.members
        first = change(first, field, one, other)
        node.origin = replace(node.origin, members=(first, *rest))

    plant.__name__ = f"{field}-{one}-{other}"
    return plant


def exchange(member, field: str, one: str, other: str):
    values = dict(getattr(member, field))
    values[one], values[other] = values[other], values[one]
    return replace(member, **{field: values})


def exchange_both(member, field: str, one: str, other: str):
    return exchange(exchange(member, "inputs", one, other), "outputs", f"new_{one}", f"new_{other}")


MOMENT, SECOND = "fc2.weight.exp_avg", "fc2.weight.exp_avg_sq"
PLANTS = [
    exchanged("output", MOMENT, SECOND), of_members(exchange, "outputs", "new_moment_1", "new_moment_2"),
    of_members(exchange, "inputs", "moment_1", "moment_2"), of_members(exchange_both, "both", "moment_1", "moment_2"),
]  # fmt: skip
ROWS = [(plant, stage) for plant in PLANTS for stage in (1, 3)]


@pytest.mark.parametrize(("plant", "stage"), ROWS, ids=lambda value: getattr(value, "__name__", None))
def test_it_is_refused(plant, stage):
    with pytest.raises(InvariantError, match=r"takes '.*', the new value of|reads state '.*' as its moment_"):
        sharded(plant, stage)


@pytest.mark.parametrize(("plant", "stage"), ROWS, ids=lambda value: getattr(value, "__name__", None))
def test_it_is_an_error(plant, stage, tmp_path, monkeypatch):
    """Without the check, ranks train otherwise than the source."""
    monkeypatch.setattr("gopt.lower.lowering.check_refolded", lambda program: None)
    try:
        sharded(plant, stage).write(tmp_path / "out")
        equal = Verifier(tmp_path / "out").run(steps=2, confirm=False).equal
    except GoptError:
        equal = False
    assert not equal


def test_scalars_keep_their_slots():
    step = sharded(lambda step: None, 2).program
    node = next(node for node in step.graph.nodes if isinstance(node.origin, RefoldedCall))
    check_refolded(step)
    node.origin = replace(node.origin, scalars={"rate": "step", "count": "lr"})
    with pytest.raises(InvariantError, match="reads 'step' as its rate, and the source 'lr'"):
        check_refolded(step)


@pytest.mark.parametrize("partition", ["flat", "rows", "whole"])
@pytest.mark.parametrize("mesh", ["shard=2", "dp=2,shard=2"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_steps_of_the_passes_hold(stage, mesh, partition):
    sharded(lambda step: None, stage, partition, mesh)


def test_a_weight_may_have_one_state_in_two_slots(tmp_path):
    """The others of its call keep theirs."""
    model = onnx.load(FIXTURES / "mlp_ort_adamw.onnx")
    [second] = (node for node in model.graph.node if node.output[0] == "momentums_2")
    second.input[3] = "fc2.bias.exp_avg"
    onnx.save(model, tmp_path / "step.onnx")
    for stage in (0, 1):
        gopt.shard(tmp_path / "step.onnx", "shard=3", stage=stage)
