"""The dimension of a batch's inputs that counts the samples: 0, or 1 in a step whose dimension 0 is time."""

from __future__ import annotations

from dataclasses import dataclass

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.marks import DRAWN, UNKNOWN, CouplingKind, Mark, Relation
from gopt.analysis.coupling.propagate import propagate, start
from gopt.analysis.training import Phase, TrainingGraph
from gopt.ir.graph_index import GraphIndex
from gopt.ir.types import numpy_dtype

UNFOLLOWED = frozenset((CouplingKind.UNKNOWN, CouplingKind.IN_BATCH, CouplingKind.PLACE))
"""Couplings of samples that are no samples, or that a rank lacks."""
_AXIS = "samples' axis"
"""The question of ``TrainingGraph.once``."""


def samples_axis(training: TrainingGraph) -> int:
    """The dimension that counts the samples."""
    return training.once(_AXIS, lambda: _settled(training)).axis


def begun(training: TrainingGraph) -> CouplingContext:
    """The batch inputs marked, before any node."""
    return _marked(training, samples_axis(training))


def forward_swept(training: TrainingGraph) -> CouplingContext:
    """The values of the forward marked, for one question of ``TrainingGraph.once``: the sweep is handed out."""
    settled = training.once(_AXIS, lambda: _settled(training))
    return settled.swept or _swept(training, settled.axis)


def samples_behind_time(training: TrainingGraph) -> int | str:
    """The number of samples where dimension 1 counts them; 0 where dimension 0 does."""
    size, marks = _columns(training)
    return size if marks and training.once(_AXIS, lambda: _settled(training)).axis else 0


@dataclass(frozen=True, slots=True)
class _Settled:
    """The dimension of the samples, with the sweep over the forward that told it, if any."""

    axis: int
    swept: CouplingContext | None = None


def _settled(training: TrainingGraph) -> _Settled:
    """The dimension of the samples: 1 where samples along dimension 0 meet, and none along dimension 1."""
    if not _columns(training)[1]:
        return _Settled(0)
    first = _swept(training, 0)
    if UNFOLLOWED.isdisjoint(fact.kind for fact in first.found):
        return _Settled(0, first)
    second = _swept(training, 1)
    losses = [second.marks.get(loss, UNKNOWN).kind for loss in training.losses]
    whole = not second.found and losses and {Relation.MEAN, Relation.SUM, Relation.WEIGHTED}.issuperset(losses)
    return _Settled(1, second) if whole else _Settled(0, first)


def _swept(training: TrainingGraph, axis: int) -> CouplingContext:
    context, nodes = _marked(training, axis), training.graph.nodes
    read = {name for node in nodes if node.phase is not Phase.UPDATE for name in node.reads}
    context.found = [fact for fact in context.found if fact.value in read]
    propagate(context, [node for node in nodes if node.phase is Phase.FORWARD])
    return context


def _marked(training: TrainingGraph, axis: int) -> CouplingContext:
    if not axis:
        return start(training.graph, training.batch)
    size, marks = _columns(training)
    return CouplingContext(GraphIndex(training.graph), size if isinstance(size, int) else 0, marks)


def _columns(training: TrainingGraph) -> tuple[int | str, dict[str, Mark]]:
    """The number of samples along dimension 1, and the marks of the batch inputs; no marks without a sign of them: all
    inputs agree on dimension 1, and either not on dimension 0, or one holds ids in rows.

    An input of one dimension holds the samples, or dimensions 0 and 1 of another input. Random numbers have the samples
    along either dimension."""
    types = {name: training.graph.inputs[name] for name in training.batch}
    shapes = {name: type.shape or () for name, type in types.items()}
    tables = [name for name, shape in shapes.items() if len(shape) > 1 and name not in training.draws]
    fronts = {shape[:1] for name, shape in shapes.items() if name not in training.draws}
    sizes = {size for name in tables if (size := shapes[name][1]) and size != 1}
    ids = any(numpy_dtype(types[name].dtype).kind in "iu" for name in tables)
    if len(sizes) != 1 or (len(fronts) == 1 and not ids):
        return 0, {}
    size = sizes.pop()
    flat = {front * size: front for front, *_ in fronts if isinstance(front, int) and isinstance(size, int)}
    marks = {}
    for name, shape in shapes.items():
        places = [axis for axis, own in enumerate(shape[:2]) if own == size]
        if name in training.draws:
            marks[name] = Mark(Relation.SAMPLES, places[0]) if len(places) == 1 else DRAWN
        elif places:
            marks[name] = Mark(Relation.SAMPLES, places[-1])
        elif len(shape) == 1 and shape[0] in flat:
            marks[name] = Mark(Relation.SAMPLES, outer=flat[shape[0]])
        else:
            return 0, {}
    return size, marks
