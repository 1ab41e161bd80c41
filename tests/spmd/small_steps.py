"""A step in a few lines and a program of it: for checks that look at nodes, phases and names alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from onnx import ModelProto

from gopt.analysis.synchronised_values import SynchronisedValues
from gopt.analysis.training import Phase, StateKind
from gopt.ir.graph import COMM, FULLY_REPLICATED, Graph, Node
from gopt.ir.types import TensorType

PHASES = {"F": Phase.FORWARD, "B": Phase.BACKWARD, "U": Phase.UPDATE}


def node(text: str, made_by: str = "", **attributes: object) -> Node:
    """``F MatMul x w -> h``: a phase, an operator (a call of ``gopt.comm`` where a group is given), names.

    A call along an axis is of the pass that splits the computation unless ``made_by`` says otherwise.
    """
    before, after = text.split(" -> ")
    phase, op_type, *inputs = before.split()
    domain = COMM if "group" in attributes else ""
    made = Node(op_type, inputs, after.split(), domain=domain, attributes=dict(attributes), made_by=made_by)
    made.phase = PHASES[phase]
    return made


def kept(each: Node) -> Node:
    """The node of a program that is a node of its step."""
    made = Node(
        each.op_type, each.inputs, each.outputs, domain=each.domain, name=each.name, attributes=dict(each.attributes),
        made_by=each.made_by, encoded=each.encoded, sharding=FULLY_REPLICATED,
    )  # fmt: skip
    made.phase, made.source = each.phase, each
    return made


def program(
    nodes: Iterable[Node],
    *,
    states: Mapping[str, str],
    statistics: Mapping[str, str],
    gradients: Mapping[str, str],
    moments: Mapping[str, str] | None = None,
    split: Iterable[str] = (),
    synchronised: SynchronisedValues | None = None,
    loop_carried: Mapping[str, str] | None = None,
) -> Any:
    """A program whose nodes are those of the step. ``states``, ``statistics``: old value -> new value; ``gradients``:
    parameter -> gradient; ``moments``: optimizer state -> its parameter. Every name is of a value of two elements."""
    step = list(nodes)
    names = {name for each in step for name in (*each.inputs, *each.outputs)}
    roles = [
        SimpleNamespace(tensor=old, updated=new, kind=kind, of=None)
        for kind, pairs in ((StateKind.PARAMETER, states), (StateKind.STATISTIC, statistics))
        for old, new in pairs.items()
    ]
    roles += [
        SimpleNamespace(tensor=name, updated=f"{name}_new", kind=StateKind.OPTIMIZER_STATE, of=of)
        for name, of in (moments or {}).items()
    ]
    types = dict.fromkeys(names, TensorType("float32", (2,)))
    graph = Graph("step", step, {}, {}, {}, types, ModelProto())
    return SimpleNamespace(
        training=SimpleNamespace(graph=graph, states=roles, gradients=dict(gradients)),
        graph=SimpleNamespace(nodes=[kept(each) for each in step], types=dict(graph.types)),
        states=[],
        accumulators=[],
        split=dict.fromkeys(split, ""),
        synchronised=synchronised or SynchronisedValues(),
        loop_carried=dict(loop_carried or {}),
    )
