"""The step that the ranks must compute: the source's on the combined gradients of all batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from gopt.analysis.loss_reduction import LossReduction, LossRule
from gopt.analysis.synchronised_values import SynchronisedValues
from gopt.analysis.training import State, StateKind
from gopt.artifact.manifest_entries import LocalState
from gopt.artifact.pieces import Piece
from gopt.collectives.layout import HALVES
from gopt.errors import UnsupportedError
from gopt.ir.graph import COMM, Graph, Node
from gopt.operators.kinds import CASTS
from gopt.records.boxes import Box, ranges_of
from gopt.records.mesh import Mesh
from gopt.runtime.inlined_functions import inlined
from gopt.verification.lockstep import VERIFIER_CALL, with_reduced_statistics, with_shared_means
from gopt.verification.proof.calls import Members, Results
from gopt.verification.proof.constants import ConstantTable
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.forms import INITIAL, STATE
from gopt.verification.proof.move_laws import as_type
from gopt.verification.proof.numbering import NOWHERE
from gopt.verification.proof.operators import NodeReader
from gopt.verification.proof.rank_sweep import UnpairedCall, Values
from gopt.verification.proof.relation import BY_NUMBERS, ProofRelation, SourcePart
from gopt.verification.proof.selections import Selection, joined
from gopt.verification.proof.sweep import Sweep
from gopt.verification.reference_graphs import combined, local_graph, subgraph, update_graph

RUNS = 1 << 12
"""Elements of a tensor, and ranges of elements, up to which a part of dimensions is read as ranges."""
MICRO = "micro-steps"
"""The axis of the micro-steps of an update: batches vary along it as along an axis of the mesh."""


@dataclass(slots=True)
class Expected:
    """The expressions of the step: ``start`` and ``states`` by tensor, ``shown`` outputs by name.

    ``during``: states at the start of a micro-step, where statistics have moved since the start of the step. ``wire``:
    tensor -> type on servers, and on the way to trainers. ``programs``: all values before and behind the combined
    gradients."""

    start: Values
    during: Values
    states: Values
    shown: Values
    wire: Mapping[str, tuple[str, str]]
    programs: tuple[Values, Values]

    _cached: dict[tuple[int, int], int] = field(default_factory=dict)

    def names(self, expressions: Expressions) -> dict[int, str]:
        """Number -> a value of the source, in words."""
        local, update = self.programs
        behind = {name: number for name, number in update.items() if name not in local}
        return {expressions.root(number): repr(name) for values in (behind, local) for name, number in values.items()}

    def held(self, expressions: Expressions, state: LocalState, whole: Values) -> int:
        """A rank's pieces of a state, flat; a copy has the type of the message. Ranks share the records of states that
        they have alike."""
        key = id(state), id(whole)
        if key not in self._cached:
            self._cached[key] = self._pieces(expressions, state, whole)
        return self._cached[key]

    def _pieces(self, expressions: Expressions, state: LocalState, whole: Values) -> int:
        sent = self.wire.keys() & {piece.tensor for piece in state.pieces} if state.copy else ()
        if sent:
            whole = {**whole, **{name: as_type(expressions, whole[name], *self.wire[name]) for name in sent}}
        return held_pieces(expressions, state.pieces, whole)


class Specification:
    """Reads the source into the expressions of the step for all ranks.

    ``varying``: the axes along which batches differ, micro-steps too."""

    def __init__(
        self, expressions: Expressions, constants: ConstantTable, relation: ProofRelation, varying: frozenset[str],
        reader: Callable[[Graph], NodeReader],
    ) -> None:  # fmt: skip
        self.expressions, self.constants, self.training = expressions, constants, relation.training
        self.relation, self.varying, self.reader = relation, varying, reader
        self.reduction = LossReduction.parse(relation.loss_reduction)
        self.data = varying - {MICRO}
        self.statistics = [state for state in self.training.states if state.kind is StateKind.STATISTIC]

    def read(self) -> Expected:
        """The expressions of the whole step."""
        relation, training, expressions = self.relation, self.training, self.expressions
        types = training.graph.types
        start: Values = {}
        during: Values = {}
        for state in training.states:
            name, shape, axes = state.tensor, types[state.tensor].shape, self._apart(state)
            during[name] = expressions.leaf(STATE, name, shape, axes)
            start[name] = during[name] if MICRO not in axes else expressions.leaf(INITIAL, name, shape, axes - {MICRO})
        inputs = {name: self._batch(name) for name in training.batch}
        inputs |= {name: expressions.leaf("input", name, types[name].shape) for name in training.hyper}
        stored = training.graph.initializers
        constants = {name: self.constants.stored(stored[name]) for name in self.relation.constants}
        sent = {name: as_type(expressions, during[name], *types) for name, types in self.relation.wire.items()}
        leaves = {name: expressions.leaf("value", name, types[name].shape, self.varying) for name in relation.leaves}
        local = self._swept(self._local_graph(), during | sent | inputs | leaves)
        gradients = self._gradients(local)
        means = {
            name: expressions.reduced(local[value], self.varying, "mean") for name, value in training.shared.items()
        }
        new = self._statistics(local, start, during)
        chosen = {output: new[tensor] for tensor, output in training.chosen.items()}
        late = [name for name in training.shown if name not in local]
        fed = start | inputs | gradients | means | chosen
        update = self._swept(inlined(update_graph(training, late)), fed)
        states = {
            state.tensor: new[state.tensor] if state.tensor in new and state.tensor not in training.chosen
            else update[state.updated] for state in training.states
        }  # fmt: skip
        shown = {name: local[name] if name in local else update[name] for name in training.shown}
        if sent:
            shown |= self._of_trainers(late, fed | sent, update)
        start |= inputs | leaves | constants
        return Expected(start, during, states, shown, self.relation.wire, (local, update))

    def _of_trainers(self, metrics: Iterable[str], fed: Values, update: Values) -> Values:
        """The metrics that trainers compute of a batch and of new states, in the types of the messages."""
        training, wire = self.training, self.relation.wire
        pulled = {state.updated: state.tensor for state in training.states if state.tensor in wire}
        fed = fed | {name: as_type(self.expressions, update[name], *wire[of]) for name, of in pulled.items()}
        result: Values = {}
        for name in metrics:
            graph = subgraph(training.graph, training.graph.nodes, [name], {*combined(training), *pulled})
            if not graph.inputs.keys().isdisjoint(training.batch):  # servers have no batch
                result |= self._swept(inlined(graph), fed)
        return {name: result[name] for name in metrics if name in result}

    def _batch(self, name: str) -> int:
        """An input of the batch: of each rank along data axes, or of all alike."""
        varying = NOWHERE if name in self.relation.alike else self.varying
        return self.expressions.leaf("batch", name, self.training.graph.types[name].shape, varying)

    def _apart(self, state: State) -> frozenset[str]:
        """The axes along which a state differs: statistics move in each micro-step, local statistics on each rank."""
        if state.kind is not StateKind.STATISTIC:
            return frozenset()
        return self.varying if state.tensor in self.relation.local else self.varying & {MICRO}

    def _local_graph(self) -> Graph:
        relation, training = self.relation, self.training
        shown = [*training.forward_metrics, *(name for name in training.shown if name in relation.leaves)]
        local = local_graph(training, self.reduction.value, shown, relation.leaves)
        local = inlined(local)  # before calls are put in
        if relation.synchronised != SynchronisedValues():
            local = with_shared_means(local, relation.synchronised)
        met = [reduction for reduction in relation.reductions if reduction.points]
        if met:
            produced = {state.tensor: training.chosen.get(state.tensor, state.updated) for state in self.statistics}
            local = with_reduced_statistics(local, met, produced, relation.mesh.data_ranks)
        return local

    def _swept(self, graph: Graph, fed: Values) -> Values:
        """The values of a part of the source. Raises UnsupportedError for results that members have apart."""
        sweep = SourceSweep(self.expressions, self.constants, self.relation.mesh, self.reader, graph)
        try:
            members = sweep.run([graph] * sweep.mesh.ranks, [fed] * sweep.mesh.ranks)
        except UnpairedCall as wrong:
            raise UnsupportedError(f"the source's own call {wrong.node!r} is {wrong.actual}", BY_NUMBERS) from None
        values, *rest = members
        apart = next((name for name in graph.outputs if any(row[name] != values[name] for row in rest)), None)
        if apart is not None:
            raise UnsupportedError(f"{apart!r} may differ among members of the source that start equal", BY_NUMBERS)
        halves = {name: type.dtype for name, type in graph.types.items() if type.dtype in HALVES}
        for node in graph.nodes if halves else ():
            for name in halves.keys() & node.outputs if not node.is_in(CASTS) else ():
                for row in members:
                    read = {self.expressions.root(row[operand]) for operand in node.reads}
                    half = self.expressions.root(row[name]), halves[name]
                    self.constants.halves.setdefault(half, set()).update(read)
        return dict(values)

    def _gradients(self, local: Values) -> Values:
        """Each gradient for the update: combined over all batches by the rule of the relation.

        Trainers combine the gradients of micro-steps before a push, in the type of the message."""
        expressions, rule = self.expressions, self.reduction.rule
        summed = self.reduction.summed_gradients(self.training)
        result: Values = {}
        weight_of_batch = self._weight(local) if rule is LossRule.WEIGHTED else None
        for parameter, name in self.training.gradients.items():
            how = "sum" if rule is LossRule.SUM or name in summed else "mean"
            number, axes, weight = local[name], self.varying, weight_of_batch
            dtype = self.training.graph.types[name].dtype
            if self.relation.plan is None and (dtype in HALVES or self.relation.reduce_dtype):
                self._note_roundings(number, weight, dtype)
            if self.relation.plan is not None and MICRO in axes:
                number = self._combined(number, weight, {MICRO}, how)
                number = as_type(expressions, number, "float32", dtype) if dtype in HALVES else number
                weight, axes = weight and expressions.reduced(weight, {MICRO}, "sum"), self.data
            number = as_type(expressions, number, dtype, self.relation.pushed.get(parameter, dtype))
            result[name] = self._combined(number, weight, axes, how)
        return result

    def _weight(self, local: Values) -> int:
        """The weight of a batch."""
        type = self.training.graph.type_of(self.reduction.value)
        weight = as_type(self.expressions, local[self.reduction.value], type.dtype, "float32")
        self.expressions.note_count(weight, self.varying)
        return weight

    def _note_roundings(self, number: int, weight: int | None, dtype: str) -> None:
        """Note the types to which ranks round a gradient of ``dtype`` of some batches and of all, and the weight."""
        expressions, rounded = self.expressions, self.constants.rounded.setdefault(dtype, set())
        sent = self.constants.sent.setdefault(self.relation.reduce_dtype, set())
        if weight is not None:
            share = weighted_mean(expressions, weight, expressions.reduced(weight, self.data, "sum"))
            rounded.add(expressions.bare(share))
            number = weighed(expressions, number, weight)
        for within, total in expressions.sums(number, self.varying).items():
            roots = {expressions.undivided(root) for root, _, _ in expressions.apart(total)}
            (rounded if within == self.varying else sent).update(roots)

    def _combined(self, number: int, weight: int | None, axes: Collection[str], how: str) -> int:
        """A value combined over the batches along axes; ``weight``: of each batch."""
        if weight is None:
            return self.expressions.reduced(number, axes, how)
        total = self.expressions.reduced(weighed(self.expressions, number, weight), axes, "sum")
        return weighted_mean(self.expressions, total, self.expressions.reduced(weight, axes, "sum"))

    def _statistics(self, local: Values, start: Values, during: Values) -> Values:
        """Each new statistic for the ranks."""
        rules = {reduction.tensor: reduction.rule for reduction in self.relation.reductions if not reduction.points}
        rules |= {reduction.tensor: "same" for reduction in self.relation.reductions if reduction.points}
        result: Values = {}
        for state in self.statistics:
            new = local[self.training.chosen.get(state.tensor, state.updated)]
            if MICRO in self.varying:
                new = self.expressions.iterated(new, during[state.tensor], MICRO, start[state.tensor])
            local_rule = "own" if state.tensor in self.relation.local else self.relation.statistics
            rule = rules.get(state.tensor, local_rule)
            if rule == "mean":
                new = self.expressions.reduced(new, self.data, "mean")
            elif rule == "root":
                new = self.expressions.on_member(new, dict.fromkeys(self.data, 0))
            result[state.tensor] = new
        return result


class SourceSweep(Sweep):
    """A part of the source on all members of the source's calls; the verifier's calls are over all ranks with different
    data."""

    def __init__(
        self, expressions: Expressions, constants: ConstantTable, mesh: Mesh, reader: Callable[[Graph], NodeReader],
        graph: Graph,
    ) -> None:  # fmt: skip
        self.data = mesh.data_axes
        calls = (node for node in graph.nodes if node.domain == COMM and node.made_by != VERIFIER_CALL)
        live = {axis for node in calls for axis in mesh.live(str(node.attributes["group"]))}
        if not live.isdisjoint(self.data):
            raise UnsupportedError("the source has calls of its own among ranks with different data", BY_NUMBERS)
        axes = tuple((axis, size if axis in live else 1) for axis, size in mesh.axes)
        super().__init__(expressions, constants, Mesh(axes, mesh.kinds), reader)

    def _members(self, node: Node, rank: int) -> tuple[int, ...]:
        return (rank,) if node.made_by == VERIFIER_CALL else super()._members(node, rank)

    def _call(self, ranks: Sequence[int], nodes: Sequence[Node]) -> Results:
        (node, *_) = nodes
        if node.made_by != VERIFIER_CALL:
            return super()._call(ranks, nodes)
        operands = [self.sweeps[ranks[0]].operands(node, node.inputs)]
        return Members(self.expressions, self.data, [dict.fromkeys(self.data, 0)]).call(node, operands)


def weighed(expressions: Expressions, number: int, weight: int) -> int:
    """A value times a weight; zeros where the weight is zero, whatever the value is there."""
    return expressions.elementwise(lambda pair: expressions.product(pair, (1, 1)), [number, expressions.weight(weight)])


def weighted_mean(expressions: Expressions, total: int, weights: int) -> int:
    """A sum of weighted values over the sum of the weights, or over 1 for zero."""
    over = expressions.counted(weights)
    return expressions.elementwise(lambda pair: expressions.product(pair, (1, -1)), [total, over])


def part_of(expressions: Expressions, part: SourcePart, whole: Values) -> int:
    """A rank's part of a value of the source."""
    return held_pieces(expressions, part.pieces, whole) if part.pieces else whole[part.value]


def held_pieces(expressions: Expressions, pieces: Iterable[Piece], whole: Values) -> int:
    """Pieces of values of the source, flat."""
    parts: list[tuple[int, int, int]] = []
    for piece in pieces:
        number = whole[piece.tensor]
        if piece.box is not None:
            number = expressions.take(number, _selection(piece.box))
        if piece.every is not None:
            number = _rows(expressions, number, *piece.every)
        parts += expressions.cut(number, piece.start, piece.stop)
    return expressions.flat(parts)


@cache
def _selection(box: Box) -> Selection:
    """The ranges of a box; ranks have few boxes, and many states in each."""
    return tuple(tuple(ranges_of(ends)) for ends in box)


def _rows(expressions: Expressions, number: int, begin: int, step: int) -> int:
    """Every step-th row of a value; many rows as an operator without laws."""
    shape = expressions.shape(number) or ()
    rows = range(begin, int(shape[0] or 0), step)
    if len(rows) > RUNS:
        return expressions.apply("box", (begin, step), [number], (len(rows), *shape[1:]))
    return expressions.take(number, (joined((row, row + 1) for row in rows), *[None] * (len(shape) - 1)))
