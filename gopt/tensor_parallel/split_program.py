"""Splits the step of a program along axes of the mesh: a graph for each class of ranks whose parts have equal sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gopt.ir.graph import Graph, origin
from gopt.ir.rewriter import Removal
from gopt.records.placements import Sharding
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram
from gopt.tensor_parallel.axes import AxisRequest, AxisSplit, split_axes
from gopt.tensor_parallel.classes import classes
from gopt.tensor_parallel.explain import Explanation
from gopt.tensor_parallel.localise import localise
from gopt.tensor_parallel.marks import Marks
from gopt.tensor_parallel.patterns import Pattern
from gopt.tensor_parallel.propagated import Propagated
from gopt.tensor_parallel.split import split_step


def split_program(
    program: SpmdProgram,
    request: AxisRequest,
    marks: tuple[Pattern, ...],
    of_source: dict[str, Any],
    *,
    regather: bool,
) -> PassResult:
    """Split the step along every axis splitting it, in place. ``marks``: the axes of gradients; ``of_source``: facts of
    the source for the report; ``regather``: see the options of the pass.

    Raises what ``split_axes`` and ``split_step`` raise.
    """
    mesh, training = program.mesh, program.training
    notes: list[str] = []
    splits = split_axes(training, mesh, request, notes.append)
    axes = [split.axis for split in splits]
    read = Marks.read(training, mesh, axes, marks)
    step = split_step(training, splits, read, regather=regather)
    program.warnings += read.warnings
    for split, result in zip(splits, step.along):
        reasons = {name: choice.why for name, choice in split.choices.items()}
        reasons |= dict.fromkeys(split.fed, "ranks are fed parts")
        program.explanations.append(
            Explanation(split.axis, result.graph, result.placements, reasons, result.origins, result.converted)
        )
    program.parts = {name: step.shardings[name] for split in splits for name in split.states}
    program.fed = {name: step.shardings[name] for split in splits for name in split.fed}
    program.split = {split.axis: request.sizes.value for split in splits}
    members = {split.axis: split.members for split in splits}
    _make_variants(program, step.graph, step.shardings, classes(step.shardings.values(), members))
    ids = {id(node.source) for node in step.graph.nodes}
    gone = [node for node in training.graph.nodes if id(node) not in ids]
    removed = [Removal(gone, "written as operators that are split")] if gone else []
    return PassResult(removed=removed, facts=_facts(program, splits, step.along) | of_source, note=_joined(notes))


def _facts(program: SpmdProgram, splits: Sequence[AxisSplit], results: Sequence[Propagated]) -> dict[str, Any]:
    """Return the facts for the report; facts of an axis other than tp are under its name."""
    parameters: dict[str, str] = {}
    mappings: Counter[str] = Counter()
    whole: dict[str, int] = {}
    for split, result in zip(splits, results):
        along = "" if split.axis == "tp" else f" along {split.axis}"
        for name, choice in split.choices.items():
            reason = f"{choice.why}: {split.states[name]}{along}"
            parameters[name] = f"{parameters[name]}; {reason}" if name in parameters else reason
        mappings.update({f"{kind}{along}": count for kind, count in result.conversions.items()})
        whole |= result.whole
    facts: dict[str, Any] = {
        "parameters": parameters, "mappings": dict(sorted(mappings.items())), "computed_whole": whole,
    }  # fmt: skip
    if program.others:
        facts["classes"] = [[dict(coordinates) for coordinates in variant.places] for variant in program.variants]
    return facts


def _joined(notes: Sequence[str]) -> str:
    """Notes in one line, each once."""
    return "; ".join(f"{text} ({count} times)" if count > 1 else text for text, count in Counter(notes).items())


def _make_variants(
    program: SpmdProgram,
    graph: Graph,
    shardings: Mapping[str, Sharding],
    ranks: Sequence[tuple[dict[str, int], ...]],
) -> None:
    """Give every class of ranks the step in its own types, each as a program later passes work on."""
    graphs = [graph, *(graph.copy() for _ in ranks[1:])]
    source = program.source
    random = set(map(id, source.random))
    program.others = [
        SpmdProgram(source, source.graph, program.mesh, [], micro_steps=program.micro_steps, parts=program.parts,
                    fed=program.fed, split=program.split, stages=program.stages, first=program)
        for _ in ranks[1:]
    ]  # fmt: skip
    for variant, graph, places_of in zip(program.variants, graphs, ranks):
        localise(graph, shardings, places_of[0])
        drawn = [node for node in graph.nodes if id(origin(node)) in random]
        variant.training = replace(source, graph=graph, random=drawn)
        variant.graph = graph.copy()
        variant.places = places_of if program.others else ()
        variant.hold_whole()
