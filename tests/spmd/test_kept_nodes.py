"""Passes behind the one that splits the computation must keep its calls, and forward and backward as they are.

One rule at a time, on a step of a few nodes. Errors planted in fixtures are in ``test_kept_steps.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers import FIXTURES
from small_steps import node, program

import gopt
from gopt.analysis.synchronised_values import CorrectedConstant, SynchronisedValues
from gopt.errors import InvariantError
from gopt.ir.graph import COMM, SPMD, Node
from gopt.spmd.kept_nodes import check_kept_nodes

TP, SUM = {"group": "tp"}, {"group": "tp", "reduce": "sum"}
SPLIT_PASS = "tensor-parallel"


def step_nodes() -> list[Node]:
    """A product whose terms are summed over ``tp``, its backward, an update, and a running statistic."""
    return [
        node("F Cast w -> w16"),
        node("F MatMul x w16 -> terms"),
        node("F Abs x -> y"),
        node("F AllReduce terms y -> h z", SPLIT_PASS, **SUM),
        node("F Identity h -> h_again"),
        node("F Identity h_again -> h_third"),
        node("F Mul h_third c -> loss", axis=0),
        node("F Cast h -> h16"),
        node("F Abs w -> w_abs"),
        node("F Mul h16 c -> shown"),
        node("B MatMul loss z -> dw"),
        node("B Shape w -> size"),
        node("U Mul run h -> run_own"),
        node("U AllReduce run_own -> run_new", SPLIT_PASS, **SUM),
        node("U Sub w dw -> w_mid"),
        node("U Sub w_mid dw -> w_new"),
    ]


def small(nodes: list[Node] | None = None, **more: Any) -> Any:
    roles: dict[str, Any] = {"states": {"w": "w_new"}, "statistics": {"run": "run_new"}, "gradients": {"w": "dw"}}
    return program(step_nodes() if nodes is None else nodes, **roles, split=("tp",), **more)


def maker(step: Any, name: str) -> int:
    return next(place for place, each in enumerate(step.graph.nodes) if name in each.outputs)


def reads(step: Any, result: str, old: str, new: str) -> None:
    """The node that makes ``result`` reads one value for another."""
    each = step.graph.nodes[maker(step, result)]
    each.inputs = [new if name == old else name for name in each.inputs]


def put(step: Any, name: str, *made: Node) -> None:
    """Nodes of a pass stand where the step makes a value."""
    place = maker(step, name)
    step.graph.nodes[place : place + 1] = made


def verdict(step: Any) -> str:
    try:
        check_kept_nodes(step)
    except InvariantError as error:
        return f"{error.message} ({' '.join(error.hints)})"
    return ""


def renamed(step: Any, old: str, new: str) -> None:
    each = step.graph.nodes[maker(step, old)]
    each.outputs = [new if name == old else name for name in each.outputs]


@pytest.mark.parametrize(
    ("result", "old", "new", "fine"),
    [
        ("w_mid", "dw", "gopt.reduced", True),  # a gradient, for which a pass made another value
        ("terms", "w16", "gopt.gathered", True),  # the cast of a state
        ("w16", "w", "gopt.gathered", True),
        ("size", "w", "w16", True),
        ("w16", "w", "h", False),  # any value of the step is none of those
        ("loss", "h_third", "h_again", True),  # the operand of an Identity for its result
        ("loss", "h_third", "h", True),  # and of two
        ("loss", "h_third", "z", False),
        ("h_again", "h", "h_again", False),  # not the other way round
        ("loss", "h_third", "gopt.made", False),
        ("loss", "c", "gopt.made", False),
        ("dw", "loss", "gopt.made", False),
        ("w_new", "w_mid", "gopt.made", True),  # what the update makes
        ("w_new", "w_mid", "h", False),
        ("run_own", "h", "gopt.made", False),
        ("shown", "h16", "gopt.made", False),  # a cast of something else
        ("y", "x", "h", False),
        ("dw", "loss", "h_again", False),
    ],
)
def test_what_a_node_may_read_instead(result, old, new, fine):
    step = small()
    reads(step, result, old, new)
    found = verdict(step)
    assert (found == "") == fine, found
    assert fine or f"reads {new!r} for {old!r}, which no pass may replace" in found


def test_what_the_update_sends_is_kept():
    """A value that a call of the step made is none that a pass may replace, though it is of the update."""
    nodes = [*step_nodes(), node("U Mul run_new c -> told")]
    step = small(nodes)
    reads(step, "told", "run_new", "gopt.made")
    assert "reads 'gopt.made' for 'run_new', which no pass may replace" in verdict(step)
    step = small(nodes)
    reads(step, "told", "run_new", "run_own")
    assert "reads 'run_own' for 'run_new', which no pass may replace" in verdict(step)


def test_a_constant_of_the_batchs_size_is_corrected_for_one_node():
    corrected = SynchronisedValues(corrected=(CorrectedConstant("loss", "c", 0.5),))
    step = small(synchronised=corrected)
    reads(step, "loss", "c", "gopt.larger")
    assert verdict(step) == ""
    reads(step, "loss", "h_third", "gopt.larger")
    assert "for 'h_third'" in verdict(step)
    step = small(nodes=[*step_nodes(), node("F Mul h c -> other")], synchronised=corrected)
    reads(step, "other", "c", "gopt.larger")
    assert "Mul 'other' reads 'gopt.larger' for 'c'" in verdict(step)
    step = small(nodes=[node("F Split x c -> part loss")], synchronised=corrected)
    reads(step, "loss", "c", "gopt.larger")
    assert verdict(step) == ""


@pytest.mark.parametrize(
    "change",
    [
        lambda each: setattr(each, "op_type", "Div"),
        lambda each: setattr(each, "domain", "my"),
        lambda each: setattr(each, "encoded", b"another"),
        lambda each: each.attributes.update(axis=1),
        lambda each: setattr(each, "inputs", each.inputs[:1]),
        lambda each: setattr(each, "inputs", [*each.inputs, "c"]),
        lambda each: setattr(each, "outputs", [*each.outputs, "more"]),
    ],
)
def test_a_node_that_is_another(change):
    step = small()
    change(step.graph.nodes[maker(step, "loss")])
    assert verdict(step).startswith("Mul 'loss' is not the Mul") or "'loss' is not the Mul" in verdict(step)


def test_a_node_of_the_file_is_known_by_its_message():
    """Attributes are decoded when they are asked for; the same bytes say the same."""
    nodes = step_nodes()
    nodes[6].encoded = b"as it came"
    step = small(nodes)
    step.graph.nodes[6].attributes.clear()
    assert verdict(step) == ""
    step.graph.nodes[6].encoded = None
    assert "is not the Mul of the step any more" in verdict(step)


def test_a_value_may_have_another_name():
    step = small()
    renamed(step, "loss", "loss.own")
    reads(step, "dw", "loss", "loss.own")
    assert verdict(step) == ""
    reads(step, "dw", "z", "loss.own")
    assert "reads 'loss.own' for 'z'" in verdict(step)


@pytest.mark.parametrize(
    ("name", "made", "fine"),
    [
        ("loss", node("F Mul h_third c -> loss", "plant"), False),
        ("y", node("F Identity x -> y", "plant"), False),
        ("w16", node("F Cast gopt.gathered -> w16", "plant"), True),  # the cast of a state
        ("size", node("B Shape gopt.gathered -> size", "plant"), True),
        ("w_new", node("U Sub w dw -> w_new", "plant"), True),  # the update
        ("run_new", node("U Mul run_own c -> run_new", "plant"), False),  # but not its calls
        ("h", node("F Identity terms -> h", "plant"), False),
        ("loss", node("F AllReduce h_third -> loss", "plant", group="dp"), False),
        ("h16", node("F Cast y -> h16", "plant"), False),
        ("w_abs", node("F Neg w -> w_abs", "plant"), False),
    ],
    ids=lambda each: str(each),
)
def test_what_a_pass_may_make(name, made, fine):
    step = small()
    put(step, name, made)
    if name == "h":
        step.graph.nodes.insert(0, node("F Neg x -> z", "plant"))
    found = verdict(step)
    assert (found == "") == fine, found
    assert fine or f" makes {name!r}" in found or " makes 'z'" in found


def test_an_identity_gives_a_renamed_value_its_name_again():
    step = small()
    renamed(step, "loss", "loss.own")
    step.graph.nodes.insert(maker(step, "loss.own") + 1, node("F Identity loss.own -> loss", "plant"))
    assert verdict(step) == ""
    step.graph.nodes[maker(step, "loss")].inputs = ["z"]
    assert "Identity 'loss' makes 'loss' (in the step Mul 'loss' makes it)" in verdict(step)
    step.graph.nodes[maker(step, "loss")] = node("F Neg loss.own -> loss", "plant")
    assert "Neg 'loss' makes 'loss'" in verdict(step)


PACK = "F AllReduce terms y -> h z"


@pytest.mark.parametrize(
    ("text", "attributes", "said"),
    [
        (PACK, SUM, ""),
        ("F AllReduce y terms -> z h", TP, ""),  # a sum by default
        ("F AllReduce x terms y -> more h z", SUM, ""),
        ("F AllReduce y terms -> h z", SUM, "makes 'h' of 'y' over tp (the step makes it of 'terms'"),
        (PACK, {"group": "dp+tp", "reduce": "sum"}, "over dp+tp"),
        (PACK, {"group": "dp", "reduce": "sum"}, "over dp "),
        (PACK, {"group": "tp", "reduce": "max"}, "makes 'h' of 'terms'"),
        ("F Reduce terms y -> h z", {**SUM, "root": 0}, "makes 'h' of 'terms'"),
        ("F AllGather terms y -> h z", TP, "makes 'h' of 'terms'"),
    ],
)
def test_a_call_that_packs_those_of_the_step(text, attributes, said):
    step = small()
    put(step, "h", node(text, "plant", **attributes))
    found = verdict(step)
    assert said in found and (said or found == ""), found


@pytest.mark.parametrize("op_type", ["Reduce", "Broadcast"])
def test_a_call_with_a_root(op_type):
    nodes = [node("F Abs x -> a"), node(f"F {op_type} a -> b", SPLIT_PASS, **TP, root=1)]
    for root, said in ((1, ""), (0, "makes 'b' of 'a'")):
        step = small(nodes)
        put(step, "b", node(f"F {op_type} a -> b", "plant", **SUM, root=root))
        assert said in verdict(step) and (said or verdict(step) == "")


def test_what_a_gather_of_the_split_is():
    """Calls that do not keep tensors apart must have all attributes alike; those of the source are not followed."""
    for made_by, cuts, fine in ((SPLIT_PASS, [0, 1], True), (SPLIT_PASS, [0, 2], False), ("", [0, 2], True)):
        nodes = [node("F Abs x -> a"), node("F AllGather a -> b", made_by, **TP, cuts=[0, 1])]
        step = small(nodes)
        put(step, "b", node("F AllGather a -> b", "plant", **TP, cuts=cuts))
        assert (verdict(step) == "") == fine
        put(step, "b", node("F Slice a -> b", "plant"))
        assert (verdict(step) == "") == (made_by == "")
        put(step, "b", node("F AllToAll a -> b", "plant", **TP, cuts=[0, 1]))
        assert (verdict(step) == "") == (made_by == "")


@pytest.mark.parametrize("op_type", ["Reduce", "Broadcast", "AllReduce"])
def test_calls_of_the_source_may_become_others(op_type):
    """A Reduce and a Broadcast that are one AllReduce; but no other operator, and not of another value."""
    nodes = [node("F Abs x -> a"), node(f"F {op_type} a -> b", **TP, root=0)]
    step = small(nodes)
    other = "AllReduce" if op_type != "AllReduce" else "Reduce"
    put(step, "b", node(f"F {other} a -> b", "plant", **SUM))
    assert verdict(step) == ""
    put(step, "b", node("F Neg a -> b", "plant"))
    assert "Neg 'b' makes 'b'" in verdict(step)
    put(step, "b", node(f"F {op_type} x -> b", "plant", **TP, root=0))
    assert "makes 'b' of 'x' over tp" in verdict(step)


@pytest.mark.parametrize(
    ("first", "second", "group", "fine"),
    [
        ("sum", "sum", "cp+tp", True), ("sum", "sum", "tp", False), ("sum", "sum", "cp", False),
        ("max", "max", "cp+tp", False), ("mean", "sum", "cp+tp", False), ("sum", "mean", "cp+tp", False),
    ],
)  # fmt: skip
def test_a_sum_over_one_axis_and_then_over_another(first, second, group, fine):
    nodes = [
        node("F Abs x -> a"),
        node("F AllReduce a -> b", SPLIT_PASS, group="cp", reduce=first),
        node("F AllReduce b -> c", SPLIT_PASS, group="tp", reduce=second),
    ]
    step = small(nodes)
    put(step, "c", node("F AllReduce a -> c", "plant", group=group, reduce=second))
    assert (verdict(step) == "") == fine, verdict(step)
    put(step, "c", node("F AllReduce b -> c", "plant", group="tp", reduce=second))
    assert verdict(step) == "", "the same two calls"


def test_sums_of_the_source_are_not_joined():
    nodes = [
        node("F Abs x -> a"),
        node("F AllReduce a -> b", group="cp", reduce="sum"),
        node("F AllReduce b -> c", SPLIT_PASS, group="tp", reduce="sum"),
    ]
    step = small(nodes)
    put(step, "c", node("F AllReduce a -> c", "plant", group="cp+tp", reduce="sum"))
    assert "makes 'c' of 'a' over cp+tp" in verdict(step)


@pytest.mark.parametrize(
    ("text", "attributes", "said"),
    [
        ("U AllReduce dw -> reduced", {"group": "dp"}, ""),  # along an axis that splits nothing
        ("U AllReduce dw -> reduced", TP, "sends 'dw' along tp"),
        ("U AllReduce dw -> reduced", {"group": "dp+tp"}, "sends 'dw' along tp"),
        ("U AllReduce terms -> reduced", {"group": "dp+tp"}, ""),  # a call of the step sends it along tp
        ("U AllReduce y dw -> reduced more", TP, "sends 'dw' along tp"),
        ("U Send dw -> reduced", {"peer": 1}, ""),
    ],
)
def test_what_a_call_of_a_pass_sends(text, attributes, said):
    step = small()
    call = node(text, "plant", **attributes)
    call.domain = COMM
    step.graph.nodes.append(call)
    found = verdict(step)
    assert said in found and (said or found == ""), found


def test_a_layout_operator_sends_nothing():
    step = small()
    part = node("B DimSlice dw -> part", "plant", **TP)
    part.domain = SPMD
    step.graph.nodes.append(part)
    assert verdict(step) == ""


def test_along_two_axes_that_split_a_call_sends_along_both():
    nodes = [node("F Abs x -> a"), node("F AllReduce a -> b", SPLIT_PASS, group="tp"), node("U Abs w -> w_new")]
    roles: dict[str, Any] = {"states": {"w": "w_new"}, "statistics": {}, "gradients": {}}
    for group, fine in (("tp", True), ("cp+tp", False), ("cp", False)):
        step = program(nodes, **roles, split=("cp", "tp"))
        step.graph.nodes.append(node("U AllReduce a -> more", "plant", group=group))
        assert (verdict(step) == "") == fine


def test_the_mean_of_a_synchronised_value_stands_for_it():
    for points, fine in (((), False), (("z",), False), (("loss",), True)):
        step = small(synchronised=SynchronisedValues(points=points))
        renamed(step, "loss", "loss.own")
        step.graph.nodes.insert(maker(step, "loss.own") + 1, node("F AllReduce loss.own -> mean", "plant", group="dp"))
        reads(step, "dw", "loss", "mean")
        assert (verdict(step) == "") == fine


def test_the_mean_of_a_statistic_stands_for_the_call_of_the_step():
    """A call over ranks that see other data makes its new value, of what the step's call made."""
    for name, carried, fine in (("run_new", {}, True), ("w_new", {}, False), ("run_new", {"run": "run_own2"}, True)):
        step = small()
        made = "run_own2" if carried else f"{name}.own"
        step.loop_carried = dict(carried)
        if name == "run_new":
            renamed(step, name, made)
            read = "run" if carried else made
            step.graph.nodes.append(node(f"U AllReduce {read} -> run_new", "plant", group="dp", reduce="mean"))
        else:
            renamed(step, "h", made)
            step.graph.nodes.append(node(f"U AllReduce {made} -> h", "plant", group="dp", reduce="mean"))
        assert (verdict(step) == "") == fine, (name, carried)
    step = small([node("U AllReduce w -> w_new", SPLIT_PASS, **SUM)])
    renamed(step, "w_new", "w_new.own")
    step.graph.nodes.append(node("U AllReduce w_new.own -> w_new", "plant", group="dp", reduce="mean"))
    assert "makes 'w_new' of 'w_new.own' over dp" in verdict(step), "no statistic"
    step = small()
    step.graph.nodes.append(node("U AllReduce run_own -> run_new", "plant", group="dp", reduce="mean"))
    del step.graph.nodes[maker(step, "run_new")]
    assert "makes 'run_new' of 'run_own' over dp" in verdict(step)


@pytest.mark.parametrize("phase", ["F", "B", "U"])
def test_only_the_update_reads_what_the_update_makes(phase):
    step = small()
    step.graph.nodes.append(node("U AllReduce dw -> reduced other", "plant", group="dp"))
    step.graph.nodes.append(node(f"{phase} Add h other -> more", "plant"))
    found = verdict(step)
    assert (found == "") == (phase == "U")
    assert phase == "U" or "reads 'other' of the update" in found
    step.graph.nodes[-1].phase = None
    assert verdict(step) == ""


@pytest.mark.parametrize(
    ("name", "mesh", "stage", "steps"),
    [
        ("mlp_adamw", "shard=2", 0, 1), ("mlp_adamw", "dp=2,shard=2", 3, 2), ("cnn_mom_fp16", "shard=2", 2, 2),
        ("gpt_adamw_clip_sched_fp16", "shard=2,tp=2", 3, 1), ("cnn_sgd", "shard=2,h=2", 1, 1),
        ("mlp_muon", "shard=2", 2, 1), ("families/moe_adamw", "dp=2,ep=2", 0, 1),
    ],
)  # fmt: skip
def test_what_passes_write_is_kept(name, mesh, stage, steps):
    check_kept_nodes(gopt.shard(FIXTURES / f"{name}.onnx", mesh, stage=stage, accumulate=steps).program)
