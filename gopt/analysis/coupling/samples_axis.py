"""The dimension of a batch's inputs that counts the samples: 0, or 1 in a step whose dimension 0 is time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.marks import DRAWN, UNKNOWN, CouplingKind, Mark, Relation
from gopt.analysis.coupling.propagate import propagate, start
from gopt.analysis.training import Phase, TrainingGraph
from gopt.ir.graph_index import GraphIndex
from gopt.ir.types import TensorType, multiple, numpy_dtype
from gopt.operators.kinds import PRODUCTS

UNFOLLOWED = frozenset((CouplingKind.UNKNOWN, CouplingKind.IN_BATCH, CouplingKind.PLACE))
"""Couplings of samples that are no samples, or that a rank lacks."""
_AXIS = "samples' axis"
"""The question of ``TrainingGraph.once``."""


def samples_axis(training: TrainingGraph) -> int:
    """The dimension of the samples."""
    return training.once(_AXIS, lambda: _settled(training)).axis


def begun(training: TrainingGraph) -> CouplingContext:
    """The batch inputs marked, before any node."""
    return _marked(training, training.once(_AXIS, lambda: _settled(training)).columns)


def forward_swept(training: TrainingGraph) -> CouplingContext:
    """The values of the forward marked, for one question of ``TrainingGraph.once``: the sweep is handed out."""
    settled = training.once(_AXIS, lambda: _settled(training))
    return settled.swept or _swept(training, settled.columns)


def samples_behind_time(training: TrainingGraph) -> int | str:
    """The number of samples where dimension 1 counts them; 0 where dimension 0 does."""
    return training.once(_AXIS, lambda: _settled(training)).columns.size


@dataclass(frozen=True, slots=True)
class Columns:
    """The number of samples along dimension 1, and the marks of the batch inputs, none without a sign of columns."""

    size: int | str = 0
    marks: Mapping[str, Mark] = field(default_factory=dict)

    @classmethod
    def of(cls, types: Mapping[str, TensorType], draws: Collection[str] = (), *, shown: bool = False) -> Columns:
        """The columns of a batch of these types, if all inputs agree on dimension 1, and either not on dimension 0, or
        an input holds ids in rows; ``shown``: another sign shows columns.

        An input of one dimension holds the samples, or dimensions 0 and 1 of another input. Random numbers have the
        samples along either dimension."""
        shapes = {name: type.shape or () for name, type in types.items()}
        tables = [name for name, shape in shapes.items() if len(shape) > 1 and name not in draws]
        fronts = {shape[:1] for name, shape in shapes.items() if name not in draws}
        sizes = {size for name in tables if (size := shapes[name][1]) and size != 1}
        ids = any(numpy_dtype(types[name].dtype).kind in "iu" for name in tables)
        if len(sizes) != 1 or (len(fronts) == 1 and not ids and not shown):
            return cls()
        size = sizes.pop()
        flat = {multiple(front, size): front for front, *_ in fronts if isinstance(front, int)}
        marks = {}
        for name, shape in shapes.items():
            axes = [axis for axis, length in enumerate(shape[:2]) if length == size]
            if name in draws:
                marks[name] = Mark(Relation.SAMPLES, axes[0]) if len(axes) == 1 else DRAWN
            elif axes:
                marks[name] = Mark(Relation.SAMPLES, axes[-1])
            elif len(shape) == 1 and shape[0] in flat:
                marks[name] = Mark(Relation.SAMPLES, outer=flat[shape[0]])
            else:
                return cls()
        return cls(size, marks)


@dataclass(frozen=True, slots=True)
class _Settled:
    """The samples along dimension 1, if any, and the decisive sweep over the forward, if any."""

    columns: Columns
    swept: CouplingContext | None = None

    @property
    def axis(self) -> int:
        return 1 if self.columns.marks else 0


def _settled(training: TrainingGraph) -> _Settled:
    """The dimension of the samples: 1 where samples along dimension 0 meet, and none along dimension 1."""
    types = {name: training.graph.inputs[name] for name in training.batch}
    columns = Columns.of(types, training.draws, shown=True)
    if not columns.marks:
        return _Settled(columns)
    first = _swept(training, Columns())
    if UNFOLLOWED.isdisjoint(fact.kind for fact in first.found):
        return _Settled(Columns(), first)
    if not Columns.of(types, training.draws).marks and not _recurs(first):
        return _Settled(Columns(), first)
    second = _swept(training, columns)
    losses = [second.marks.get(loss, UNKNOWN).kind for loss in training.losses]
    whole = not second.found and losses and {Relation.MEAN, Relation.SUM, Relation.WEIGHTED}.issuperset(losses)
    return _Settled(columns, second) if whole else _Settled(Columns(), first)


def _recurs(swept: CouplingContext) -> bool:
    """Return whether the forward reads places of dimension 0 one by one, and multiplies a value of several of them, but
    not of all, by weights: a recurrence."""
    graph, behind = swept.index.graph, dict[str, frozenset[str]]()
    for fact in swept.found:
        if fact.kind is CouplingKind.PLACE:
            operand = swept.index.producers[fact.value].inputs[0]
            if graph.type_of(fact.value).elements * swept.batch == graph.type_of(operand).elements:
                behind[fact.value] = frozenset([fact.value])
    if len(behind) < swept.batch:
        return False
    for node in graph.nodes:
        if node.phase is Phase.FORWARD and behind.keys().isdisjoint(node.outputs):
            turns = frozenset[str]().union(*(behind.get(name, frozenset()) for name in node.reads))
            if 1 < len(turns) < swept.batch and node.is_in(PRODUCTS):
                return True
            behind.update(dict.fromkeys(node.outputs, turns) if turns else {})
    return False


def _swept(training: TrainingGraph, columns: Columns) -> CouplingContext:
    context, nodes = _marked(training, columns), training.graph.nodes
    read = {name for node in nodes if node.phase is not Phase.UPDATE for name in node.reads}
    context.found = [fact for fact in context.found if fact.value in read]
    propagate(context, [node for node in nodes if node.phase is Phase.FORWARD])
    return context


def _marked(training: TrainingGraph, columns: Columns) -> CouplingContext:
    if not columns.marks:
        return start(training.graph, training.batch)
    size = columns.size if isinstance(columns.size, int) else 0
    return CouplingContext(GraphIndex(training.graph), size, dict(columns.marks))
