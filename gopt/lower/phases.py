"""A step in phases: a single phase, or a micro-step run several times and the update. No pass, no rank.

A phase has the nodes needed for its results, from the rank-independent graph; common nodes are in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType

from gopt.errors import UnsupportedError
from gopt.ir.graph import Graph, Node, clone
from gopt.spmd.program import SpmdProgram
from gopt.text.sanitize import show

STEP, MICRO, UPDATE = "step", "micro", "update"


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
        result = [_phase(program, MICRO, program.micro_steps, micro)]
    else:
        from gopt.lower.stage_phases import stage_phases  # which is built on this module

        result = stage_phases(program)
    result.append(_phase(program, UPDATE, 1, update))
    for state in program.states:  # a state that nothing reads is held all the same, where its new value is made
        if all(state.input not in phase.graph.inputs for phase in result):
            maker = next(phase.graph for phase in result if state.output in phase.graph.outputs)
            maker.inputs[state.input] = program.graph.inputs[state.input]
    return result


def _phase(program: SpmdProgram, name: str, times: int, results: Mapping[str, str]) -> LoweredPhase:
    """The part of the step's graph needed for ``results`` (output -> value)."""
    needed = set(results.values())
    nodes: list[Node] = []
    for node in reversed(program.graph.nodes):
        if any(value in needed for value in node.outputs):
            needed.update(node.reads)
            nodes.append(node)
    if name == UPDATE:
        _refuse_batch(program, results, needed, nodes[::-1])
    return phase_of(program, name, times, results, nodes[::-1], needed)


def phase_of(
    program: SpmdProgram, name: str, times: int, results: Mapping[str, str], nodes: Sequence[Node], needed: Set[str],
    saved: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> LoweredPhase:  # fmt: skip
    """A phase of some nodes, in order; ``needed``: their operands, and the results. ``saved``: as the phase has it."""
    graph = program.graph
    named = {value: output for output, value in results.items() if output != value}
    types = graph.types | {output: graph.types[value] for output, value in results.items()}
    inputs = {item: type for item, type in graph.inputs.items() if item in needed}
    outputs = {output: types[output] for output in results}
    made = {value for node in nodes for value in node.outputs}
    inputs |= {value: types[value] for value in saved if value not in made}
    outputs |= {value: types[value] for value in saved if value in made}
    return LoweredPhase(
        name,
        times,
        Graph(
            graph.name, list(_renamed(nodes, named)) if named else list(nodes), inputs, outputs,
            {item: tensor for item, tensor in graph.initializers.items() if item in needed},
            types, graph.header, dict(graph.metadata),
        ),
        saved,
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
