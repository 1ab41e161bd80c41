"""A step in phases: a single phase, or a micro-step run several times and the update. No pass, no rank.

A phase has the nodes needed for its results, from the rank-independent graph; common nodes are in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from gopt.errors import UnsupportedError
from gopt.ir.graph import SPMD, Graph, Node, clone
from gopt.ir.phase import Phase
from gopt.records.placements import OnMember
from gopt.spmd.program import SpmdProgram
from gopt.spmd.stage_plan import PIPELINE, TRANSFER
from gopt.text.sanitize import show

STEP, MICRO, UPDATE = "step", "micro", "update"
FORWARD, BACKWARD = "forward", "backward"
"""The two parts of a micro-step on stages of a pipeline: a schedule orders the parts of all micro-steps."""


@dataclass(frozen=True, slots=True)
class LoweredPhase:
    """A file of every rank: the number of runs in a step, and the graph.

    ``saved``: values of a micro-batch left for a later phase, or taken from an earlier phase -> the members of the
    pipeline's axis with the value.
    """

    name: str
    times: int
    graph: Graph
    saved: Mapping[str, Sequence[int]] = field(default_factory=dict)


def phases(program: SpmdProgram) -> list[LoweredPhase]:
    """The phases of a step in the order in which they run.

    Raises UnsupportedError if the update depends on a batch other than through gradients and statistics.
    """
    if program.micro_steps == 1:
        return [LoweredPhase(STEP, 1, program.graph)]
    micro, update = program.phase_results()
    if program.stages is None:
        result = [_phase(program, MICRO, program.micro_steps, micro, program.graph.nodes)]
    else:
        result = _forward_and_backward(program, micro)
    result.append(_phase(program, UPDATE, 1, update, program.graph.nodes))
    for state in program.states:  # a state that nothing reads is held all the same, where its new value is made
        if all(state.input not in phase.graph.inputs for phase in result):
            maker = next(phase.graph for phase in result if state.output in phase.graph.outputs)
            maker.inputs[state.input] = program.graph.inputs[state.input]
    return result


def _forward_and_backward(program: SpmdProgram, micro: Mapping[str, str]) -> list[LoweredPhase]:
    """A micro-step in two phases. The backward reads saved values of the forward; values on all stages are computed
    again."""
    needed, behind = set(micro.values()), set[str]()
    nodes: list[Node] = []
    for node in reversed(program.graph.nodes):
        if any(value in needed for value in node.outputs):
            needed.update(node.reads)
            nodes.append(node)
    moving = _moving(program, nodes, micro)
    early: list[Node] = []
    late: list[Node] = []
    for node in reversed(nodes):
        if id(node) not in moving and (node.phase is Phase.BACKWARD or not behind.isdisjoint(node.reads)):
            in_forward = behind.isdisjoint(node.reads)
            behind.update(node.outputs)
            if node.op_type == TRANSFER and node.attributes["target"] < 0:
                ahead, node = _to_all(program, node, in_forward=in_forward)
                early += ahead
            late.append(node)
        else:
            early.append(node)
    holders = {name: members for node in early if (members := _members(program, node)) for name in node.outputs}
    early_names = {name for node in early for name in node.outputs}
    results = {name: value for name, value in micro.items() if value in behind or value not in holders}
    candidates = [*(node for node in early if not _members(program, node)), *late]
    backward = _phase(program, BACKWARD, program.micro_steps, results, candidates, holders)
    moved = next((name for name in program.loop_carried if name in backward.graph.inputs), None)
    if moved is not None:
        raise UnsupportedError(
            f"the backward reads the running statistic {show(moved)}, which later micro-batches move before it runs",
            "leave out --accumulate, or the axis pp",
        )
    results_early = {name: name for name in backward.saved} | {
        n: value for n, value in micro.items() if n not in results
    }
    assert early_names.issuperset(results_early.values())
    forward = _phase(program, FORWARD, program.micro_steps, results_early, early)
    return [replace(forward, saved=backward.saved), backward]


def _moving(program: SpmdProgram, nodes: Iterable[Node], micro: Mapping[str, str]) -> set[int]:
    """The ids of the nodes behind running statistics: nodes of the forward, where micro-batches run in order.
    ``nodes``: from the last to the first. Raises UnsupportedError for a statistic of the backward."""
    states = {state.output for state in program.states}
    needed = {value for output, value in micro.items() if output in states}
    moving = set()
    for node in nodes:
        if not needed.isdisjoint(node.outputs):
            if node.op_type == TRANSFER and node.phase is Phase.BACKWARD:
                raise UnsupportedError(
                    f"a running statistic is made of {show(node.inputs[0])}, which the backward sends to another stage",
                    "leave out --accumulate, or the axis pp",
                )
            needed.update(node.reads)
            moving.add(id(node))
    return moving


def _to_all(program: SpmdProgram, node: Node, *, in_forward: bool) -> tuple[list[Node], Node]:
    """A transfer to all stages in two halves: later stages receive in the forward, earlier stages in the backward.
    ``in_forward``: the forward makes the value."""
    plan = program.stages
    assert plan is not None
    source = plan.placement.index(node.attributes["source"])
    if source == plan.stages - 1:
        return [], node
    if not in_forward:
        raise UnsupportedError(
            f"{show(node.outputs[0])} is made by the backward of pipeline stage {source}, and later stages show it too",
            "leave the output out of the model, or leave out --accumulate",
        )
    (value,), (result,), ahead = node.inputs, node.outputs, f"{node.outputs[0]}.ahead"
    program.graph.types[ahead] = program.graph.types[result]
    halves = []
    for half, inputs, output in ((FORWARD, [value], ahead), (BACKWARD, [value, ahead], result)):
        copy = clone(node)
        copy.inputs, copy.outputs = inputs, [output]
        copy._attributes = {**node.attributes, "half": half}
        halves.append(copy)
    return halves[:1], halves[1]


def _members(program: SpmdProgram, node: Node) -> tuple[int, ...]:
    """The members of the pipeline's axis that have the results of a node; () for a node that all run."""
    if node.op_type == TRANSFER and node.domain == SPMD:
        target, source = node.attributes["target"], node.attributes["source"]
        if target >= 0:
            return (target,)
        placement = program.stages.placement if program.stages is not None else ()
        return placement[placement.index(source) + 1 :]
    stage = node.sharding.on(PIPELINE)
    return (stage.member,) if isinstance(stage, OnMember) else ()


def _phase(
    program: SpmdProgram, name: str, times: int, results: Mapping[str, str], candidates: Sequence[Node],
    saved: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> LoweredPhase:  # fmt: skip
    """The part of the step's graph needed for ``results`` (output -> value), of the ``candidates``; values in ``saved``
    are inputs."""
    graph = program.graph
    needed = set(results.values())
    nodes: list[Node] = []
    for node in reversed(candidates):
        if any(value in needed for value in node.outputs):
            needed.update(node.reads)
            nodes.append(node)
    if name == UPDATE:
        _refuse_batch(program, results, needed, nodes[::-1])
    named = {value: output for output, value in results.items() if output != value}
    nodes = list(_renamed(reversed(nodes), named)) if named else nodes[::-1]
    types = graph.types | {output: graph.types[value] for output, value in results.items()}
    taken = {value: members for value, members in saved.items() if value in needed}
    inputs = {item: type for item, type in graph.inputs.items() if item in needed}
    return LoweredPhase(
        name,
        times,
        Graph(
            graph.name, nodes, inputs | {value: graph.types[value] for value in taken},
            {output: types[output] for output in results},
            {item: tensor for item, tensor in graph.initializers.items() if item in needed},
            types, graph.header, dict(graph.metadata),
        ),
        taken,
    )  # fmt: skip


def _renamed(nodes: Iterable[Node], named: Mapping[str, str]) -> Iterable[Node]:
    """Return the nodes with values under final names; unchanged nodes stay the same objects."""
    for node in nodes:
        if any(value in named for value in (*node.inputs, *node.outputs)):
            node = clone(node)
            node.inputs = [named.get(value, value) for value in node.inputs]
            node.outputs = [named.get(value, value) for value in node.outputs]
        yield node


def _refuse_batch(program: SpmdProgram, results: Mapping[str, str], needed: set[str], nodes: Sequence[Node]) -> None:
    """``nodes``: in order."""
    batch = next((name for name in program.training.batch if name in needed), None)
    if batch is None:
        return
    reached = {batch}
    for node in nodes:
        if not reached.isdisjoint(node.reads):
            reached.update(node.outputs)
    node = next(node for node in nodes if batch in node.reads)
    states = {state.output for state in program.states}
    late = next(name for name in sorted(results, key=states.__contains__, reverse=True) if results[name] in reached)
    raise UnsupportedError(
        f"--accumulate: {show(late)} reads the batch {batch!r} beside the gradients, at {node.label!r}: each "
        "micro-step has another one",
        "leave out --accumulate" + ("" if late in states else f", or the output {show(late)} of the model"),
    )
