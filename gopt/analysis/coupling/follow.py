"""One sweep over the nodes of a step, in order: every value gets its mark, and what couples samples is noted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from gopt.analysis.coupling.contract import statistics
from gopt.analysis.coupling.marks import DRAWN, REDUCED, UNKNOWN, Coupled, Kind, Lost, Mark, Marks
from gopt.analysis.coupling.reduced import reduced
from gopt.analysis.coupling.rules import RULES
from gopt.analysis.coupling.sight import Sight
from gopt.analysis.operators import control_flow, random, reads_shape_only
from gopt.analysis.sweeps import Index
from gopt.graph.model import COMM, Graph, Node

UNTOLD = "gopt cannot tell whether it is the step of one large batch"


def start(graph: Graph, batch: Sequence[str]) -> Sight:
    """The batch inputs marked: their dimension 0 counts the samples."""
    shapes = {name: graph.inputs[name].shape for name in batch}
    fronts = Counter(shape[0] for shape in shapes.values() if shape)
    size = fronts.most_common(1)[0][0] if fronts else None
    sight = Sight(Index(graph), size if isinstance(size, int) else 0)
    for name, shape in shapes.items():
        if shape and shape[0] == size:
            sight.marks[name] = Mark(Kind.SAMPLES)
            continue
        sight.marks[name] = UNKNOWN
        has = f"{shape[0]} rows where other inputs have {size}" if shape else "no dimension of samples"
        where = sight.index.readers.get(name, ())
        if where:
            sight.couple(
                Coupled.UNKNOWN, where[0], f"batch input {name!r} has {has}: {UNTOLD}",
                "give every batch input one row for every sample", name,
            )  # fmt: skip
    return sight


def follow(sight: Sight, nodes: Iterable[Node]) -> None:
    """Mark what the nodes make; they stand in order."""
    for node in nodes:
        marks = [sight.marks[name] for name in node.reads if name in sight.marks]
        if not marks:
            if random(node):
                _set(sight, node, [DRAWN for _ in node.outputs])
            continue
        if reads_shape_only(node):
            continue
        if any(mark.kind is Kind.UNKNOWN for mark in marks):
            _set(sight, node, [UNKNOWN for _ in node.outputs])
            continue
        try:
            _set(sight, node, _visit(sight, node, marks))
        except Lost as lost:
            sight.couple(
                Coupled.UNKNOWN, node,
                f"the samples cannot be followed past {node.label!r} ({node.op_type}): {lost}; {UNTOLD}",
            )  # fmt: skip
            _set(sight, node, [UNKNOWN for _ in node.outputs])


def _visit(sight: Sight, node: Node, marks: list[Mark]) -> Marks:
    if control_flow(node) or node.captures:
        raise Lost("gopt does not look into control flow")
    if node.domain == COMM:
        return [sight.marks.get(name) for name in node.inputs][: len(node.outputs)]
    if node.domain not in ("", "ai.onnx") or (rule := RULES.get(node.op_type)) is None:
        raise Lost("gopt has no rule for this operator")
    if all(mark.kind in REDUCED for mark in marks):
        made = reduced(sight, node)
        return [made for _ in node.outputs]
    for name in dict.fromkeys(node.inputs):
        mark = sight.marks.get(name)
        if mark is not None and mark.kind in REDUCED:
            _feed(sight, node, name, mark)
    return rule(sight, node)


def _feed(sight: Sight, node: Node, name: str, mark: Mark) -> None:
    """A value over samples that a node of single samples reads: a statistic, unless samples are mixed already."""
    sight.fed.setdefault(name, node)
    if mark.mixed:
        return
    for origin in origins(sight, name):
        statistics(sight, sight.origins[origin], origin)


def origins(sight: Sight, name: str) -> list[str]:
    """The values in which samples were reduced and from which a reduced value is made, as far as not yet asked for."""
    found, stack = [], [name]
    while stack:
        name = stack.pop()
        mark = sight.marks.get(name)
        if name in sight.walked or mark is None or mark.kind not in REDUCED:
            continue
        sight.walked.add(name)
        if name in sight.origins:
            found.append(name)
        elif name in sight.index.producer:
            stack.extend(sight.index.producer[name].reads)
    return found[::-1]


def _set(sight: Sight, node: Node, marks: Marks) -> None:
    for name, mark in zip(node.outputs, marks):
        if name and mark is not None and name not in sight.shared:
            sight.marks[name] = mark
