"""Prove ranks equal to the source in real arithmetic, for all values, without a run.

By induction over steps: ranks with the relation's pieces of all states at the start of a step have the same pieces of
the source's new states at the end, for the combined gradients of all batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gopt.artifact.manifest import LocalState
from gopt.artifact.pieces import Piece, Place, place_shape
from gopt.ir.graph import COMM, Graph
from gopt.ir.graph_index import GraphIndex, descendants
from gopt.system.garbage import gc_paused
from gopt.system.progress import ProgressCallback, no_progress
from gopt.verification.proof.constants import ConstantTable
from gopt.verification.proof.evaluation import Unevaluable
from gopt.verification.proof.expected import MICRO, Expected, Specification
from gopt.verification.proof.expressions import Expressions, elements
from gopt.verification.proof.operators import NodeReader, as_type
from gopt.verification.proof.relation import Part, RankRelation, Relation
from gopt.verification.proof.result import Claim, ClaimMismatch, ProofVerdict, RankProof
from gopt.verification.proof.samples import CounterExamples
from gopt.verification.proof.sweep import Sweep, UnpairedCall, Values
from gopt.verification.proof.words import Words


class Prover:
    """The source and the ranks of a relation, ready to be compared."""

    def __init__(self, relation: Relation, advance: ProgressCallback = no_progress) -> None:
        self.relation, self.advance = relation, advance
        self.training, self.mesh = relation.training, relation.mesh
        micro = {MICRO: relation.accumulate} if relation.accumulate > 1 else {}
        self.expressions = Expressions({**dict(self.mesh.axes), **micro})
        self.constants = ConstantTable(self.expressions)
        self.varying = frozenset(axis for axis in (*self.mesh.data_axes, *micro) if self.expressions.extents[axis] > 1)
        self.dtypes: dict[tuple[int, str], str] = {}
        self.shapes: dict[tuple[int, str], tuple[int, ...]] = {}
        """The declared shapes of the inputs of each rank, which the next step reads again."""
        self.values: list[list[Values]] = [[] for _ in relation.ranks]
        """The values of each rank's files, phase by phase."""
        self._nodes: dict[int, dict[int, str]] = {}
        """The first value with a multiple of an expression, for ranks that were asked about."""

    def run(self) -> RankProof:
        """Read the source and all ranks as expressions, and compare."""
        with gc_paused():
            expected = Specification(self.expressions, self.constants, self.relation, self.varying).read()
            try:
                actual = self._ranks(expected)
            except UnpairedCall as wrong:
                mismatch = ClaimMismatch(wrong.rank, 1, wrong.node, wrong.actual, wrong.expected)
                return RankProof(self.mesh.ranks, [Claim(wrong.node, "call", ProofVerdict.DIFFERENT, mismatch)])
            return _Comparison(self, expected, actual).proof()

    def node_of(self, rank: int, number: int) -> str | None:
        """The first value of a rank's files with a multiple of an expression, or a range of the elements."""
        if rank not in self._nodes:
            first = self._nodes[rank] = {}
            for values in self.values[rank]:
                for name, produced in values.items():
                    for root, _, _ in self.expressions.pieces(produced):
                        first.setdefault(self.expressions.bare(root), name)
        return self._nodes[rank].get(self.expressions.bare(number))

    def _ranks(self, expected: Expected) -> list[Values]:
        """The results of every rank at the end of the step."""
        ranks = self.relation.ranks
        states = [self._start(rank, expected) for rank in ranks]
        sweep = Sweep(self.expressions, self.constants, self.mesh, self.varying)
        for phase, times in self.relation.schedule.items():
            self.advance(f"comparing {phase}")
            graphs = [rank.graphs[phase] for rank in ranks]
            inputs = [self._inputs(times, expected, *row) for row in zip(ranks, graphs, states)]
            results = sweep.run(graphs, inputs)
            for rank, graph, values, result in zip(ranks, graphs, states, results):
                self.values[rank.rank].append(result)
                self._carry(rank, graph, values, result, times, expected)
        return states

    def _start(self, rank: RankRelation, expected: Expected) -> Values:
        """A rank's inputs at the start of a step."""
        values = {name: part_of(self.expressions, part, expected.start) for name, part in rank.inputs.items()}
        for state in rank.states:
            values[state.input] = held_pieces(self.expressions, state.pieces, expected.start)
        for accumulator in rank.sums:
            values[accumulator.input] = self.expressions.linear({}, accumulator.shape)
        return values

    def _summed(self, rank: RankRelation, graph: Graph, results: Values) -> Values:
        """The accumulators after all micro-steps from zero, by output; ``results``: of the first micro-step.

        Each micro-step must add a term to an accumulator, for any values of all accumulators."""
        terms = {sum: results[sum.output] for sum in rank.sums if sum.output in graph.outputs}
        before = {sum.input: self._any(sum.input, rank.rank, term) for sum, term in terms.items()}
        after = self._behind(graph, results, before)
        new: Values = {}
        for accumulator, term in terms.items():
            name, output = accumulator.input, accumulator.output
            due = self.expressions.elementwise(self.expressions.added, [term, before[name]])
            if after is not None and after.get(output) == due:
                new[output] = self.expressions.reduced(term, (MICRO,), "sum")
            else:
                new[output] = self._iterated(rank, graph, results, before, name, output)
        return new

    def _any(self, name: str, rank: int, like: int) -> int:
        """A value without any known fact, in ranges as those of another."""
        pieces = [
            (self.expressions.leaf("sum so far", (name, rank, index), self.expressions.shape(root)), start, stop)
            for index, (root, start, stop) in enumerate(self.expressions.pieces(like))
        ]
        return self.expressions.view(self.expressions.flat(pieces), self.expressions.shape(like))

    def _iterated(
        self, rank: RankRelation, graph: Graph, results: Values, before: Values, name: str, output: str
    ) -> int:
        """An accumulator after all micro-steps, by more than a term; unknown if several accumulators decide."""
        shape = self.expressions.shape(results[output])
        whole = self.expressions.leaf("sum so far", (name, rank.rank), shape)
        after = self._behind(graph, results, {**before, name: whole})
        if after is None:
            return self._unknown(rank, name, results[output])
        number = after.get(output, results[output])
        rest = [value for input, value in before.items() if input != name]
        if self.expressions.depend([number], {leaf for value in rest for leaf, _, _ in self.expressions.pieces(value)}):
            return self._unknown(rank, name, results[output])
        return self.expressions.iterated(number, whole, MICRO, self.expressions.linear({}, shape))

    def _unknown(self, rank: RankRelation, name: str, number: int) -> int:
        """A value of micro-steps beyond a sum of terms."""
        return self.expressions.leaf("a value of micro-steps", (name, rank.rank), self.expressions.shape(number))

    def _behind(self, graph: Graph, results: Values, inputs: Values) -> Values | None:
        """The values that depend on some inputs, for other values; None if a call depends on the inputs."""
        reader = NodeReader(self.expressions, graph, self.varying, self.constants)
        changed = dict(inputs)
        for node in graph.nodes:
            if changed.keys().isdisjoint(node.reads):
                continue
            if node.domain == COMM:
                return None
            operands = [
                changed.get(operand, results.get(operand)) if operand else None
                for operand in (*node.inputs, *node.captures)
            ]
            changed.update(zip(node.outputs, reader.results(node, operands)))
        return changed

    def _inputs(self, times: int, expected: Expected, rank: RankRelation, graph: Graph, values: Values) -> Values:
        """The inputs of a rank's graph, in the declared shapes and types; micro-steps move the states that a phase
        makes anew."""
        inputs: Values = {}
        states = {state.input: state for state in rank.states}
        for name, type in graph.inputs.items():
            if name not in values:
                continue
            number = values[name]
            if times > 1 and name in states and states[name].output in graph.outputs:
                number = held_pieces(self.expressions, states[name].pieces, expected.during)
                if MICRO not in self.expressions.varies[number]:  # the source does not move it in a micro-step
                    shape, moving = self.expressions.shape(number), frozenset({MICRO})
                    number = self.expressions.leaf("moved state", (name, rank.rank), shape, moving)
            if type.static and self.expressions.elements(number) == type.elements:
                number = self.expressions.view(number, type.shape)
            if name in states and type.static:
                number = as_type(
                    self.expressions, number, self.training.graph.types[states[name].pieces[0].tensor].dtype, type.dtype
                )
            inputs[name] = number
            if type.static:
                self.shapes[rank.rank, name] = tuple(type.dims)
        return inputs

    def _carry(
        self, rank: RankRelation, graph: Graph, states: Values, results: Values, times: int, expected: Expected
    ) -> None:
        """Store the new states, accumulators and outputs of a phase."""
        sums = {accumulator.output for accumulator in rank.sums}
        moved = {state.input: state for state in rank.states}
        if times > 1 and sums:
            begun = {accumulator.input for accumulator in rank.sums}
            for name in descendants(GraphIndex(graph), begun).intersection(graph.outputs) - sums:
                results[name] = self._unknown(rank, name, results[name])
        summed = self._summed(rank, graph, results) if times > 1 else {}
        for output, name in rank.next_inputs.items():
            if output in graph.outputs:
                number = results[output]
                if times > 1 and output in sums:
                    number = summed[output]
                elif times > 1:
                    moving = self.expressions.root(held_pieces(self.expressions, moved[name].pieces, expected.during))
                    number = self.expressions.iterated(number, moving, MICRO, self.expressions.root(states[name]))
                shape = self.expressions.shape(results[output])
                if elements(shape) is not None and self.shapes.get((rank.rank, name), shape) != shape:
                    number = self._unknown(rank, f"{name}, in another shape", number)
                states[name] = number
                self.dtypes[rank.rank, name] = graph.outputs[output].dtype
        for name in graph.outputs:
            if name in rank.outputs and states.setdefault(f"output {name}", results[name]) != results[name]:
                states[f"output {name}"] = self._unknown(rank, name, results[name])  # two phases show two values


def part_of(expressions: Expressions, part: Part, whole: Values) -> int:
    """A rank's part of a value of the source."""
    return held_pieces(expressions, part.pieces, whole) if part.pieces else whole[part.value]


def held_pieces(expressions: Expressions, pieces: Iterable[Piece], whole: Values) -> int:
    """Pieces of values of the source, flat."""
    parts: list[tuple[int, int, int]] = []
    for piece in pieces:
        number = whole[piece.tensor]
        shape = expressions.shape(number)
        if piece.place != (None, None):
            sizes = place_shape(piece.place, shape) if elements(shape) is not None else None  # type: ignore[arg-type]
            number = expressions.apply("box", piece.place, [number], sizes or (piece.stop,))
        parts += expressions.cut(number, piece.start, piece.stop)
    return expressions.flat(parts)


class _Comparison:
    """Found and expected values, claim by claim."""

    def __init__(self, prover: Prover, expected: Expected, actual: Sequence[Values]) -> None:
        self.prover, self.expected, self.actual = prover, expected, actual
        self.expressions, self.ranks = prover.expressions, prover.relation.ranks
        self.words = Words(self.expressions, expected.names)
        self.examples = CounterExamples(prover.expressions, prover.training, prover.mesh, prover.constants)

    def proof(self) -> RankProof:
        """The claims of all values."""
        kinds = {state.tensor: state.kind.value for state in self.prover.training.states}
        apart: dict[str, list[tuple[int, int, int]]] = {}
        covered: dict[str, dict[tuple[Place, int], int]] = {}
        for rank, values in zip(self.ranks, self.actual):
            for state in rank.states:
                for piece in state.pieces if not state.copy else ():
                    covered.setdefault(piece.tensor, {})[piece.place, piece.start] = piece.elements
                for name, actual, due in self._compared(state, rank.rank, values):
                    apart.setdefault(name, []).append((rank.rank, actual, due))
        claims = [self._claim(name, kind, apart.get(name, [])) for name, kind in kinds.items()]
        for index, claim in enumerate(claims):
            held_elements = sum(covered.get(claim.name, {}).values())
            if (
                claim.verdict is ProofVerdict.PROVEN
                and held_elements < self.prover.training.graph.types[claim.name].elements
            ):
                claims[index] = replace(claim, verdict=ProofVerdict.UNPROVEN)  # a rank would have to hold it
        for name, due in self.expected.shown.items():
            kind = "loss" if name in self.prover.training.losses else "metric"
            numbers = [(rank, values[f"output {name}"]) for rank, values in enumerate(self.actual)]
            claims.append(self._claim(name, kind, [(rank, actual, due) for rank, actual in numbers if actual != due]))
        return RankProof(len(self.actual), [*claims, *self._sums()], len(self.expressions.all))

    def _sums(self) -> Iterator[Claim]:
        """The accumulators of the ranks: empty at the end of a step."""
        apart: dict[str, list[tuple[int, int, int]]] = {}
        for rank, values in zip(self.ranks, self.actual):
            for accumulator in rank.sums:
                name, zero = accumulator.input, self.expressions.linear({}, accumulator.shape)
                different = apart.setdefault(name, [])
                if values[name] != zero:
                    different.append((rank.rank, values[name], zero))
        for name, different in apart.items():
            yield self._claim(name, "sum of micro-steps", different)

    def _compared(self, state: LocalState, rank: int, values: Values) -> Iterator[tuple[str, int, int]]:
        """The pieces of a rank's state with another expression than expected."""
        due = held_pieces(self.expressions, state.pieces, self.expected.states)
        if state.copy:
            source = self.prover.training.graph.types[state.pieces[0].tensor].dtype
            due = as_type(self.expressions, due, source, self.prover.dtypes[rank, state.input])
        actual = self.expressions.view(values[state.input], (state.elements,))
        alike = state.local or not self.expressions.varies[actual]
        if self.expressions.root(actual) == self.expressions.root(due) and alike:
            return
        position = 0
        for piece in state.pieces:
            parts = [
                self.expressions.flat(self.expressions.cut(number, position, position + piece.elements))
                for number in (actual, due)
            ]
            if parts[0] != parts[1] or not alike:
                yield piece.tensor, parts[0], parts[1]
            position += piece.elements

    def _claim(self, name: str, kind: str, apart: Sequence[tuple[int, int, int]]) -> Claim:
        if not apart:
            return Claim(name, kind, ProofVerdict.PROVEN)
        rank, actual, due = apart[0]
        inner = self.words.parting(actual, due)
        found_text, due_text = (self.words.text(number, top=True) for number in inner)
        mismatch = ClaimMismatch(
            rank, len({member for member, _, _ in apart}), self.prover.node_of(rank, inner[0]), found_text, due_text
        )
        try:
            example = self.examples.find(actual, due, self.prover.mesh.coordinates(rank))
        except Unevaluable:
            example = None
        verdict = ProofVerdict.UNPROVEN if example is None else ProofVerdict.DIFFERENT
        return Claim(name, kind, verdict, replace(mismatch, example=example))
