"""Compares a manifest with graphs: the kept source, and each rank's graphs with all calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from gopt.artifact.manifest import MANIFEST_FILE, Manifest
from gopt.artifact.manifest_entries import RankEntry
from gopt.artifact.message_plan_check import wrong_messages
from gopt.collectives.messages import MESSAGES, ROUND_INPUT
from gopt.collectives.table import COLLECTIVES
from gopt.errors import GoptError, InputError
from gopt.ir.alike_files import shared_parts
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.types import TensorType
from gopt.records.boxes import box_shape
from gopt.text.sanitize import show

EDITED = "a file of the folder was edited or comes from another one: write the folder again"


class GroupCalls(NamedTuple):
    """The phase and the node of each message, and of one call of each kind on operands of equal types.

    ``width``: of size and index of a member, 1 where the calls say the same of all members of the group, else 2."""

    nodes: list[tuple[str, Node]]
    width: int


@dataclass(slots=True)
class CheckedRanks:
    """Matching parts so far: a rank's parts, by identity -> the different calls by group; and all possible calls."""

    calls: dict[Hashable, dict[str, GroupCalls]] = field(default_factory=dict)
    allowed: set[Hashable] = field(default_factory=set)
    groups: dict[Hashable, dict[str, set[tuple[int, ...]]]] = field(default_factory=dict)
    """Content of a rank -> group -> sizes and, where it matters, indices of members whose calls are all allowed."""


def check_source(manifest: Manifest, graph: Graph, home: str | os.PathLike[str], what: str = "the kept source") -> None:
    """Compare a manifest with the source, called ``what`` in messages. Raises InputError."""
    name = str(Path(home, MANIFEST_FILE))
    for index, state in enumerate(manifest.states):
        where = f"states[{index}]"
        if state.tensor not in graph.inputs or state.updated not in graph.outputs:
            _refuse(name, where, f"{what} has no state {show(state.tensor)} -> {show(state.updated)}")
        if graph.inputs[state.tensor] != state.type:
            _refuse(name, where, f"{state.type} is {graph.inputs[state.tensor]} in {what}")
    for index, entry in enumerate(manifest.common.inputs):
        if graph.inputs.get(entry.name) != entry.type:
            _refuse(name, f"common.inputs[{index}]", f"{what} has no input {show(entry.name)} of this type")
    for index, output in enumerate(manifest.common.outputs):
        if output.name not in graph.outputs:
            _refuse(name, f"common.outputs[{index}]", f"{what} has no output {show(output.name)}")
    listed = {state.tensor for state in manifest.states} | {entry.name for entry in manifest.common.inputs}
    for key in graph.inputs:
        if key not in listed and key not in graph.initializers:  # a frozen weight needs no entry
            _refuse(name, "common.inputs", f"{show(key)}, an input of {what}, is missing")


def check_rank(
    manifest: Manifest, rank: RankEntry, graphs: Mapping[str, Graph], home: str | os.PathLike[str],
    checked: CheckedRanks | None = None,
) -> None:  # fmt: skip
    """Compare the manifest's entry of a rank with the rank's graphs, by phase; raises InputError on a difference.

    ``checked``: what matches so far; its records and graphs must live on."""
    checked = checked or CheckedRanks()
    name = str(Path(home, MANIFEST_FILE))
    where = f"rank {rank.rank} ({', '.join(Path(file).name for file in rank.files.values())})"
    for graph in graphs.values():
        if (number := graph.metadata.get("gopt.rank", str(rank.rank))) != str(rank.rank):
            _refuse(name, where, f"its file was written for rank {show(number)}")
    parts = tuple((phase, *shared_parts(graph), id(graph.outputs)) for phase, graph in graphs.items())
    content = parts, id(rank.state), rank.accumulators, rank.fed, rank.role
    if content not in checked.calls:
        _check_entry(manifest, rank, graphs, name, where)
        checked.calls[content] = _different_calls(graphs)
    mesh, member, plan = manifest.mesh.mesh(), rank.rank, manifest.parameter_server
    server = rank.rank - mesh.ranks if rank.role == "server" and plan is not None else None
    if server is not None and plan is not None:
        mesh, member = plan.mesh, server
    files = {phase: str(Path(home, Path(rank.files.get(phase, MANIFEST_FILE)).name)) for phase in graphs}

    @cache
    def place(group: str) -> tuple[int, int]:
        """The number of members of the rank's group, and the rank's index."""
        return mesh.size(group), mesh.index(group, member)

    allowed = checked.groups.setdefault(content, {})
    for group, calls in checked.calls[content].items():
        seats = allowed.setdefault(group, set())
        if seats and place(group)[: calls.width] in seats:
            continue
        for phase, node in calls.nodes:
            if node.op_type in MESSAGES:
                _check_message(files[phase], graphs[phase], node)
            else:
                _check_call(files[phase], place, graphs[phase], node, checked.allowed)
        if group:
            seats.add(place(group)[: calls.width])
    if plan is not None and (wrong := wrong_messages(plan, server, graphs)):
        phase, where, what = wrong
        _refuse(files[phase], where, what)


def _check_entry(manifest: Manifest, rank: RankEntry, graphs: Mapping[str, Graph], name: str, where: str) -> None:
    """Compare states, inputs and losses of a rank; ``name``: the manifest, ``where``: the rank, in messages."""
    inputs = {key: type for graph in graphs.values() for key, type in graph.inputs.items()}
    outputs = {key: type for graph in graphs.values() for key, type in graph.outputs.items()}
    dtypes = {state.tensor: state.dtype for state in manifest.states}
    states = manifest.states_of(rank)
    for state in states:
        type = inputs.get(state.input)
        new = outputs.get(state.output)
        if type is None or type.elements != state.elements or new is None:
            _refuse(name, where, f"its files and the manifest disagree on {show(state.input)}")
        if new.dtype != type.dtype or (new.static and new.elements != type.elements):
            _refuse(name, where, f"{show(state.output)} is of another type than {show(state.input)}, which it replaces")
        if not state.copy and {dtypes[piece.tensor] for piece in state.pieces} - {type.dtype}:
            _refuse(name, where, f"its files and the manifest disagree on the type of {show(state.input)}")
    for accumulator in rank.accumulators:
        if inputs.get(accumulator.input) != accumulator.type or accumulator.output not in outputs:
            _refuse(name, where, f"its files and the manifest disagree on {show(accumulator.input)}")
    for value in rank.saved:
        if inputs.get(value.name) != value.type or value.name not in outputs:
            _refuse(name, where, f"its files and the manifest disagree on {show(value.name)}")
    parts = {entry.input: box_shape(entry.box) for entry in rank.fed}
    for index, entry in enumerate(manifest.common.inputs):
        type = TensorType(entry.dtype, parts.get(entry.name, entry.shape))
        if inputs.get(entry.name, type) != type:
            _refuse(name, f"common.inputs[{index}]", f"{where} has {show(entry.name)} of another type")
    listed = {*rank.inputs, *(state.input for state in manifest.common.state)}
    listed |= {ROUND_INPUT} if manifest.parameter_server is not None else set()
    listed |= {entry.name for entry in manifest.common.inputs}
    frozen = {key for graph in graphs.values() for key in graph.initializers}  # weights that no update touches
    if unlisted := inputs.keys() - listed - frozen:
        _refuse(name, "common.inputs", f"{show(min(unlisted))}, an input of {where}, is missing")
    moved = set(manifest.host.activations) if manifest.pipeline is None else set()  # a stage lacks others' values
    if missing := moved and moved.difference(*(node.outputs for graph in graphs.values() for node in graph.nodes)):
        _refuse(name, "host.activations", f"{where} has no value {show(min(missing))}")
    for loss in manifest.losses if rank.role != "server" else ():
        if loss not in outputs:
            _refuse(name, "loss", f"{where} has no output {show(loss)}")


def _check_message(file: str, graph: Graph, node: Node) -> None:
    """Refuse a message with contradictory attributes and operands."""
    types = [graph.type_of(name) for name in node.inputs]
    operands = [(type.dtype, type.shape) if name else ("", None) for name, type in zip(node.inputs, types)]
    try:
        MESSAGES[node.op_type].infer(node.attributes, operands)
    except GoptError as error:
        _refuse(file, show(node.label), error.message, *error.hints)


def _check_call(
    file: str, place: Callable[[str], tuple[int, int]], graph: Graph, node: Node, allowed: set[Hashable]
) -> None:
    """Refuse a call no group of this mesh can make."""
    try:
        record = COLLECTIVES[node.op_type]
        group = str(node.attributes.get("group") or record.resolve(node.attributes)["group"])
        size, index = place(group)
        operands = _operands(graph, node)
        key = node.encoded, operands, size, _share(node.attributes, size, index)
        if node.encoded is None or key not in allowed:
            record.infer(node.attributes, operands, size, index)
            allowed.add(key)
    except KeyError:
        _refuse(file, show(node.label), f"{COMM} has no operator {show(node.op_type)}")
    except GoptError as error:
        _refuse(file, show(node.label), error.message, *error.hints)


def _operands(graph: Graph, node: Node) -> tuple[tuple[str, Any], ...]:
    return tuple([(type.dtype, type.shape) for type in map(graph.type_of, node.inputs)])


def _different_calls(graphs: Mapping[str, Graph]) -> dict[str, GroupCalls]:
    """Messages and different calls by group; "" for messages and for calls that name no group."""
    different: dict[Hashable, tuple[str, Node]] = {}
    for phase, graph in graphs.items():
        for node in graph.nodes:
            if node.domain == COMM:
                apart = node.encoded is None or node.op_type in MESSAGES
                key = id(node) if apart else (phase, node.encoded, _operands(graph, node))
                different.setdefault(key, (phase, node))
    result: dict[str, list[tuple[str, Node]]] = {}
    for phase, node in different.values():
        group = "" if node.op_type in MESSAGES else str(node.attributes.get("group", ""))
        result.setdefault(group, []).append((phase, node))
    return {
        group: GroupCalls(nodes, 1 + any(_has_shares(node.attributes) for _, node in nodes))
        for group, nodes in result.items()
    }


def _has_shares(attributes: Mapping[str, Any]) -> bool:
    """Return whether a call may say other things of each member."""
    return "root" in attributes or any(isinstance(value, list | tuple) for value in attributes.values())


def _share(attributes: Mapping[str, Any], size: int, index: int) -> tuple[Any, ...]:
    """The share of a member by a call's lists, and whether the member is the root: rules read no more of the index."""
    lists = [value for value in attributes.values() if isinstance(value, list | tuple)]
    own = [value[index] for value in lists if len(value) == size]
    cuts = [value[index : index + 2] for value in lists if len(value) == size + 1]
    lengths = [stop - start if isinstance(start, int) and isinstance(stop, int) else start for start, stop in cuts]
    return *own, *lengths, attributes.get("root") == index


def _refuse(name: str, key: str, what: str, *hints: str) -> NoReturn:
    raise InputError(f"{name}: {key}: {what}", *hints, EDITED)
