"""Errors planted in the computation of fixtures, behind the pass that splits it (``gopt.spmd.kept_nodes``).

Each planted error is refused; with the check left out, the ranks that are written are unequal to the source.
"""

from __future__ import annotations

import pytest
from helpers import FIXTURES
from plants import Case, change_attributes, hand_on, planted_pass, planted_pipeline, substitute
from products import part

import gopt
from gopt.errors import InvariantError
from gopt.ir.graph import COMM, Node
from gopt.ir.phase import Phase
from gopt.passes.pipeline import Pipeline, build_pipeline
from gopt.records.mesh import Mesh
from gopt.spmd.kept_nodes import check_kept_nodes
from gopt.spmd.program import SpmdProgram
from gopt.verification.verify import Verifier

SPLIT = frozenset({"tp", "cp", "ep", "sp", "h"})


def split_calls(step: SpmdProgram, op_type: str = "AllReduce") -> list[Node]:
    """The calls along axes that split the computation."""
    found = [
        node for node in step.graph.nodes
        if node.domain == COMM and node.op_type == op_type and not SPLIT.isdisjoint(node.attributes["group"].split("+"))
    ]  # fmt: skip
    assert found, f"the step has no {op_type} along an axis that splits it"
    return found


def dropped(step: SpmdProgram) -> None:
    """The terms of a value are taken for their sum."""
    hand_on(step, split_calls(step)[0])


def dropped_maximum(step: SpmdProgram) -> None:
    """The loss subtracts the maximum of a member's classes."""
    hand_on(step, next(node for node in split_calls(step) if node.attributes["reduce"] == "max"))


def twice(step: SpmdProgram) -> None:
    """A sum is summed again."""
    node = split_calls(step)[0]
    results, once = node.outputs, [f"{name}.once" for name in node.outputs]
    step.graph.types.update({new: step.graph.types[name] for new, name in zip(once, results)})
    node.outputs = once
    again = Node("AllReduce", once, results, domain=COMM, attributes=dict(node.attributes), made_by="plant")
    substitute(step, node, [node, again])


def over_samples(step: SpmdProgram) -> None:
    """Terms of other samples are added to those of an activation."""
    node = split_calls(step)[0]
    change_attributes(step, node, group="+".join(name for name, size in step.mesh.axes if size > 1))


def exchanged(step: SpmdProgram) -> None:
    """Two sums of one shape take each other's terms."""
    types = step.graph.types
    for node in split_calls(step):
        first: dict[object, int] = {}
        for place, name in enumerate(node.inputs):
            other = first.setdefault(types[name], place)
            if other != place:
                node.inputs[place], node.inputs[other] = node.inputs[other], node.inputs[place]
                return
    raise AssertionError("no call has two tensors of one shape")


def mean_in_backward(step: SpmdProgram) -> None:
    """A node of the backward reads the mean of a gradient."""
    mean = next(node for node in step.graph.nodes if node.domain == COMM and "dp" in node.attributes["group"])
    types, name = step.graph.types, mean.outputs[0]
    reader = Node("Neg", [name], ["planted"], made_by="plant", sharding=mean.sharding)
    types["planted"], mean.phase, reader.phase = types[name], Phase.UPDATE, Phase.BACKWARD
    substitute(step, mean, [mean, reader])


def gradient_over_members(step: SpmdProgram) -> None:
    """Gradients of parts of a weight are averaged over the members that have other parts."""
    axes = "+".join(name for name, size in step.mesh.axes if size > 1)
    gradients = set(step.training.gradients.values())
    node = next(each for each in step.graph.nodes if each.domain == COMM and not gradients.isdisjoint(each.inputs))
    change_attributes(step, node, group=axes)


def other_activation(step: SpmdProgram) -> None:
    """A node of the backward reads an activation of another layer."""
    types = step.graph.types
    forward = [name for node in step.graph.nodes if node.phase is Phase.FORWARD for name in node.outputs]
    for node in step.graph.nodes:
        for place, name in enumerate(node.inputs if node.phase is Phase.BACKWARD else ()):
            other = next((each for each in forward if each != name and types.get(each) == types.get(name)), None)
            if name in forward and other is not None and types[name].elements > 1:
                node.inputs[place] = other
                return
    raise AssertionError("no node reads an activation of which there are two")


def other_operator(step: SpmdProgram) -> None:
    node = next(each for each in step.graph.nodes if each.phase is Phase.FORWARD and each.is_a("Relu", "Gelu", "Add"))
    node.op_type, node.proto = "Sub" if node.op_type == "Add" else "Abs", None


def replaced_activation(step: SpmdProgram) -> None:
    """A pass makes a value of the forward from another one."""
    node = next(each for each in step.graph.nodes if each.phase is Phase.FORWARD and each.is_a("Relu", "Add"))
    substitute(step, node, [Node("Neg", node.inputs[:1], node.outputs, made_by="plant")])


CASES = [
    Case(twice, "gpt_adamw", "tp=2", 0, r"AllReduce .* makes '.*' of '.*\.once' over tp"),
    Case(other_activation, "mlp_adamw", "shard=2", 2, r"reads '.*' for '.*', which no pass may replace"),
    Case(gradient_over_members, "gpt_adamw", "dp=2,tp=2", 0, r"AllReduce .* sends '.*' along tp"),
    Case(dropped, "cnn_sgd", "h=2", 0, r"Identity '.*' makes '.*'"),
    Case(dropped_maximum, "gpt_adamw", "dp=2,tp=2", 1, r"Identity '.*max.*' makes '.*'"),
    Case(twice, "gpt_adamw", "dp=2,cp=2", 0, r"AllReduce .* over cp"),
    Case(over_samples, "gpt_adamw", "dp=2,tp=2", 0, r"AllReduce .* over dp\+tp"),
    Case(over_samples, "families/moe_adamw", "shard=2,ep=2", 2, r"AllReduce .* over shard\+ep"),
    Case(exchanged, "gpt_adamw", "shard=2,cp=2", 2, r"AllReduce .* makes '.*' of '.*' over cp"),
    Case(exchanged, "gpt_adamw", "sp=2", 2, r"AllReduce .* makes '.*' of '.*' over sp"),
    Case(other_operator, "mlp_adamw", "shard=2", 0, r"is not the \w+ of the step any more"),
    Case(replaced_activation, "mlp_adamw", "shard=2", 3, r"Neg '.*' makes '.*'"),
]


@pytest.mark.parametrize("case", part(CASES, 1), ids=str)
def test_it_is_refused(case):
    with pytest.raises(InvariantError, match=case.match):
        case.shard()


@pytest.mark.parametrize("case", part(CASES, 1), ids=str)
def test_it_is_an_error(case, tmp_path, monkeypatch):
    """What the check refuses would have trained on other values."""
    monkeypatch.setattr("gopt.lower.lowering.check_kept_nodes", lambda program: None)
    case.shard().write(tmp_path / "out")
    assert not gopt.prove(tmp_path / "out").proven
    assert not Verifier(tmp_path / "out").run(steps=2, confirm=False).equal


def test_the_pass_is_named_when_every_pass_is_verified():
    default = build_pipeline(defaults={"shard": {"stage": 0}})
    stages = (*default.stages, planted_pass(twice, "breaks"))
    with pytest.raises(InvariantError, match="pass breaks: AllReduce"):
        gopt.shard(
            gopt.load(FIXTURES / "gpt_adamw.onnx"), Mesh.parse("tp=2"), pipeline=Pipeline(stages, verify_each=True)
        )


def test_sums_over_two_axes_may_be_one_call():
    """``fuse-collectives`` joins a sum over one axis and then over another."""
    source = gopt.load(FIXTURES / "gpt_adamw.onnx")
    pipeline = build_pipeline(defaults={"tensor-parallel": {"sequence": True}}, verify_each=True)
    program = gopt.shard(source, Mesh.parse("cp=2,tp=2"), pipeline=pipeline).program
    joined = next(node for node in split_calls(program) if node.attributes["group"] == "cp+tp")
    check_kept_nodes(program)
    change_attributes(program, joined, group="cp")
    with pytest.raises(InvariantError, match="over cp"):
        check_kept_nodes(program)


def test_synchronised_values_stand_for_the_steps():
    source = gopt.load(FIXTURES / "cnn_mom_fp16.onnx")
    pipeline = build_pipeline(defaults={"statistics": {"statistics": "sync"}}, verify_each=True)
    program = gopt.shard(source, 2, pipeline=pipeline).program
    assert program.synchronised.points
    program.synchronised = type(program.synchronised)()
    with pytest.raises(InvariantError, match="which no pass may replace"):
        check_kept_nodes(program)


def test_a_mean_of_what_micro_steps_left_stands_for_the_call_of_the_step():
    """Statistics of split channels are gathered in each micro-step, and averaged once after the last."""
    source = gopt.load(FIXTURES / "cnn_sgd.onnx")
    program = gopt.shard(source, "shard=2,tp=2", accumulate=2).program
    assert program.loop_carried and program.split
    program.loop_carried = {}
    with pytest.raises(InvariantError, match="makes 'bn"):
        check_kept_nodes(program)


def test_the_backward_reads_nothing_of_the_update():
    with pytest.raises(InvariantError, match="Neg 'planted' of the backward reads"):
        gopt.shard(FIXTURES / "mlp_sgd.onnx", "dp=2", pipeline=planted_pipeline(mean_in_backward, 0))
