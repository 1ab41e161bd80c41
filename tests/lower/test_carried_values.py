"""A sum over micro-steps adds up, and a state follows its own old value: errors planted behind all passes.

Every shard and every average in these steps is as it should be. Without the check each of them trains otherwise.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import source
from onnx import helper
from plants import Plant, planted_pipeline

import gopt
from gopt.api import Sharded
from gopt.errors import GoptError, InvariantError
from gopt.ir.graph import Node
from gopt.lower.carried_values import check_carried_values
from gopt.passes.shard.gradient_reduction import GradientReduction
from gopt.records.mesh import Mesh
from gopt.spmd.program import ShardedState, SpmdProgram
from gopt.verification.verify import Verifier


def sharded(
    plant: Plant,
    name: str = "mlp_adamw",
    mesh: str = "shard=2",
    *,
    stage: int = 2,
    accumulate: int = 1,
    **options: object,
) -> Sharded:
    pipeline = planted_pipeline(plant, stage, **options)
    return gopt.shard(source(name), Mesh.parse(mesh), accumulate=accumulate, pipeline=pipeline, prove=False)


def maker(step: SpmdProgram, name: str) -> Node:
    return next(node for node in step.graph.nodes if name in node.outputs)


def states_of(step: SpmdProgram, tensor: str) -> tuple[int, ShardedState]:
    """The record that lists a tensor of the source, and its place."""
    found = (at for at, state in enumerate(step.states) if tensor in {each.tensor for each in state.slices})
    at = next(at for at in found if not step.states[at].copy)
    return at, step.states[at]


# --- what is planted --------------------------------------------------------------------------------------------------


def last_term_alone(step: SpmdProgram) -> None:
    """Micro-steps overwrite the sum: the update sees the last of them."""
    held = step.accumulators[0]
    term = next(name for name in maker(step, held.added).inputs if name != held.input)
    step.accumulators[0] = replace(held, added=term)


def doubled(step: SpmdProgram) -> None:
    """A micro-step adds the sum to itself."""
    held = step.accumulators[0]
    maker(step, held.added).inputs = [held.input, held.input]


def zeros_of_another(step: SpmdProgram) -> None:
    """Two accumulators of other lengths change zeros: the next micro-step is fed the wrong shape."""
    first, *_, last = step.accumulators
    step.accumulators[0], step.accumulators[-1] = (
        replace(first, output=last.output), replace(last, output=first.output),
    )  # fmt: skip


def exchanged(field: str, one: str, other: str) -> Plant:
    """The records of two states change their old or new values."""

    def plant(step: SpmdProgram) -> None:
        (a, first), (b, second) = states_of(step, one), states_of(step, other)
        assert first.sharding == second.sharding
        step.states[a] = replace(first, **{field: getattr(second, field)})
        step.states[b] = replace(second, **{field: getattr(first, field)})

    plant.__name__ = f"exchanged-{field}-{other}"
    return plant


def inner_value(step: SpmdProgram) -> None:
    """A moment takes a value on the way to a new parameter for its own new value."""
    at, state = states_of(step, SECOND)
    types, new = step.graph.types, {each.output for each in step.states}
    name = next(
        name for node in reversed(step.graph.nodes) for name in node.outputs
        if name not in new and types.get(name) == types[state.input]
    )  # fmt: skip
    step.states[at] = replace(state, output=name)


def gathered_gradients(step: SpmdProgram) -> None:
    """Ranks gather the reduced gradients, which are shards of the same elements, for the new parameters."""
    made = next(node for node in step.graph.nodes if node.op_type == "ReduceScatter")
    gather = next(node for node in step.graph.nodes if node.op_type == "AllGather")
    gather.inputs = list(made.outputs)


def cast_of_another_value(step: SpmdProgram) -> None:
    """The narrow copy that ranks gather is the cast of the old master, and not of the new one."""
    node = next(node for node in step.graph.nodes if node.outputs[0].endswith(".narrow0"))
    node.inputs = [name.removesuffix("_out") for name in node.inputs]


def no_mark_of_one(step: SpmdProgram) -> None:
    """Nothing says what a micro-step makes of one statistic of two that one call averages."""
    del step.loop_carried["bn1.running_mean"]


MOMENT, SECOND = "fc2.weight.exp_avg", "fc2.weight.exp_avg_sq"
CASES = [
    (last_term_alone, {"accumulate": 2}, "does not add up: 'gopt.shard.b0.scattered' is not what it was plus one term"),
    (last_term_alone, {"accumulate": 2, "stage": 0}, "does not add up: .* is not what it was plus one term"),
    (doubled, {"accumulate": 2}, "does not add up"),
    (zeros_of_another, {"name": "cnn_mom_fp16", "accumulate": 2}, r"is float32\[\d+\], and '.*' is float32\[\d+\]"),
    (exchanged("output", MOMENT, SECOND), {}, "of state '.*exp_avg' does not follow '.*exp_avg'"),
    (exchanged("input", MOMENT, SECOND), {}, "of state '.*exp_avg' does not follow '.*exp_avg'"),
    (exchanged("output", "fc2.weight", MOMENT), {"stage": 3}, "of state 'fc.*' does not follow 'fc"),
    (exchanged("output", MOMENT, SECOND), {"stage": 0}, f"state '{MOMENT}' is held as '{SECOND}_out', a value"),
    (exchanged("input", MOMENT, SECOND), {"stage": 0}, f"state '{MOMENT}' is held as '{SECOND}', a value of state"),
    (inner_value, {"stage": 0}, f"state '{SECOND}' takes '.*', which is not its new value in the source"),
    (gathered_gradients, {}, "the new value 'fc.*_out' of state 'fc.*' does not follow 'fc"),
    (cast_of_another_value, {"name": "mlp_adamw_fp16_scaler"}, "of state 'fc.*' does not follow 'gopt.*_out'"),
    (no_mark_of_one, {"name": "cnn_mom_fp16", "accumulate": 2}, "statistic 'bn1.running_mean' is made by a call"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "options", "match"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_it_is_refused(plant, options, match):
    with pytest.raises(InvariantError, match=match):
        sharded(plant, **options)


@pytest.mark.parametrize(("plant", "options", "match"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_it_is_an_error(plant, options, match, tmp_path, monkeypatch):
    """Without the check, ranks train otherwise than the source, or do not run."""
    monkeypatch.setattr("gopt.lower.lowering.check_carried_values", lambda program: None)
    try:
        sharded(plant, **options).write(tmp_path / "out")
        equal = Verifier(tmp_path / "out").run(steps=2, confirm=False).equal
    except GoptError:
        equal = False
    assert not equal


def test_a_sum_in_a_step_without_micro_steps_is_refused(monkeypatch, tmp_path):
    """As a pass would make it that asks the wrong question: the update would read zeros in the first step."""
    monkeypatch.setattr(GradientReduction, "micro", True)
    with pytest.raises(InvariantError, match=r"accumulator '.*' is in a step without micro-steps"):
        sharded(lambda step: None)
    monkeypatch.setattr("gopt.lower.lowering.check_carried_values", lambda program: None)
    sharded(lambda step: None).write(tmp_path / "out")
    assert not gopt.prove(tmp_path / "out").proven
    assert not Verifier(tmp_path / "out").run(steps=2, confirm=False).equal


NAMES = ("mlp_adamw", "mlp_lamb", "mlp_muon", "cnn_mom_fp16", "mlp_ort_adamw", "mlp_adamw_bf16")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("stage", "accumulate"), [(0, 2), (1, 1), (2, 2), (3, 1)])
def test_steps_of_the_passes_hold(name, stage, accumulate):
    for mesh in ("shard=2", "dp=2,shard=2"):
        check_carried_values(sharded(lambda step: None, name, mesh, stage=stage, accumulate=accumulate).program)


def test_zeros_are_zeros_in_every_form():
    step = sharded(lambda step: None, "cnn_mom_fp16", stage=1, accumulate=2).program
    check_carried_values(step)
    held = step.accumulators[0]
    at, producer = next((at, node) for at, node in enumerate(step.graph.nodes) if held.output in node.outputs)
    for attributes in ({"value_floats": [1.0] * 4}, {"value": helper.make_tensor("v", 10, [1], [1.0])}, {}):
        step.graph.nodes[at] = Node("Constant", [], [held.output], attributes=attributes, sharding=producer.sharding)
        with pytest.raises(InvariantError, match="is not zero again"):
            check_carried_values(step)
