"""Prove ranks equal to the source in real arithmetic, for all values, without a run.

By induction over steps: ranks with the relation's pieces of all states at the start of a step have the same pieces of
the source's new states at the end, for the combined gradients of all batches."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from typing import cast

from gopt.collectives.messages import ROUND_INPUT
from gopt.errors import GoptError, InputError, UnsupportedError
from gopt.ir.graph import COMM, Graph
from gopt.ir.graph_index import GraphIndex, descendants
from gopt.system.garbage import gc_paused
from gopt.system.progress import ProgressCallback, no_progress
from gopt.verification.proof.comparison import Comparison, OpenClaim, RankValues, WithoutOpenClaims
from gopt.verification.proof.constants import ConstantTable
from gopt.verification.proof.draws import axes_of_draws
from gopt.verification.proof.expected import MICRO, Expected, Specification, part_of
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.forms import TAKE, Piece, elements
from gopt.verification.proof.move_laws import as_type
from gopt.verification.proof.operators import NodeReader
from gopt.verification.proof.rank_sweep import SweptValues, UnpairedCall, Values
from gopt.verification.proof.relation import ProofRelation, RankRelation
from gopt.verification.proof.result import Claim, ClaimMismatch, ProofVerdict, RankProof
from gopt.verification.proof.rounds import RoundSweep, round_number
from gopt.verification.proof.rows import RowLaws, RowReader
from gopt.verification.proof.selections import Selection
from gopt.verification.proof.sweep import Sweep
from gopt.verification.proof.unchanged_nodes import without_unchanged_nodes


def proof_of(relation: ProofRelation, advance: ProgressCallback = no_progress) -> RankProof:
    """The claims of a relation: without the unchanged nodes of the source, if this proves all claims."""
    with gc_paused():
        shorter = without_unchanged_nodes(relation)
        if shorter is not None:
            with suppress(OpenClaim, GoptError):  # the whole says what is wrong, and where
                proof = ShortProver(shorter, advance).run()
                if proof.proven:
                    return proof
    return Prover(relation, advance).run()


class Prover:
    """The source and the ranks of a relation, ready to be compared."""

    comparison: type[Comparison] = Comparison

    def __init__(self, relation: ProofRelation, advance: ProgressCallback = no_progress) -> None:
        self.relation, self.advance = relation, advance
        self.training, self.mesh = relation.training, relation.mesh
        micro = {MICRO: relation.accumulate} if relation.accumulate > 1 else {}
        servers = {} if relation.plan is None else dict(relation.plan.mesh.axes)
        members = {**dict(self.mesh.axes), **micro}
        self.expressions = Expressions(members | servers)
        self.constants = ConstantTable(self.expressions)
        self.rows = RowLaws(self.expressions, self.constants)
        self.drawn = axes_of_draws(relation)
        """The axes along which members draw apart, also on the same samples."""
        self.varying = self.drawn.intersection((*self.mesh.data_axes, *micro))
        self.ranks: list[RankValues] = []

    def run(self) -> RankProof:
        """Read the source and all ranks as expressions, and compare."""
        with gc_paused():
            source = Specification(self.expressions, self.constants, self.relation, self.varying, self.reader)
            self.expected = expected = source.read()
            self.expressions.seal()
            try:
                self.ranks = self._ranks(expected)
            except UnpairedCall as wrong:
                mismatch = ClaimMismatch(wrong.rank, 1, wrong.node, wrong.actual, wrong.expected)
                return RankProof(
                    len(self.relation.ranks), [Claim(wrong.node, "call", ProofVerdict.DIFFERENT, mismatch)]
                )
            except InputError as error:
                raise InputError(error.message, *error.hints, self.relation.remedy) from None
            except UnsupportedError as error:
                raise UnsupportedError(error.message, *error.hints, *filter(None, [self.relation.instead])) from None
            return self.comparison(self.expressions, self.constants, self.relation, expected, self.ranks).proof()

    def reader(self, graph: Graph) -> NodeReader:
        """A reader of nodes; tables are read by rows."""
        if self.relation.plan is not None and self.relation.plan.tables:
            return RowReader(self.expressions, graph, self.drawn, self.constants, self.rows)
        split = self.drawn != self.varying
        return NodeReader(self.expressions, graph, self.drawn, self.constants, split=split)

    def _ranks(self, expected: Expected) -> list[RankValues]:
        """The values of every rank, in a common object where ranks have the same."""
        ranks = self.relation.ranks
        started: dict[Hashable, RankValues] = {}
        all_values = []
        for rank in ranks:
            if (key := rank.likeness) not in started:
                started[key] = RankValues(self._start(rank, expected))
            all_values.append(started[key])
        sweep = Sweep(self.expressions, self.constants, self.mesh, self.reader)
        if self.relation.plan is not None:
            sweep = RoundSweep(
                self.expressions,
                self.constants,
                self.mesh,
                self.reader,
                self.relation.plan,
                expected.start,
                self.rows,
            )
        for phase, times in self.relation.schedule.items():
            self.advance(f"comparing {phase}")
            graphs = [rank.graphs[phase] for rank in ranks if phase in rank.graphs]  # servers run in the last phase
            inputs: dict[int, Values] = {}
            for rank, graph, values in zip(ranks, graphs, all_values):
                if id(values) not in inputs:
                    inputs[id(values)] = self._inputs(times, expected, rank, graph, values)
            distances = [rank.rank - rank.peers.get(phase, rank.rank) for rank in ranks if phase in rank.graphs]
            results = sweep.run(graphs, [inputs[id(values)] for _, values in zip(graphs, all_values)], distances)
            ended: dict[tuple[int, int], RankValues] = {}
            before = list(all_values)
            for index, (rank, graph, values, result) in enumerate(zip(ranks, graphs, before, results)):
                key = id(values), id(result)
                if key not in ended:
                    ended[key] = values.after(result)
                    self._carry(rank, graph, ended[key], result, times, expected)
                all_values[index] = ended[key]
        sweep.check_received()
        return all_values

    def _start(self, rank: RankRelation, expected: Expected) -> Values:
        """A rank's inputs at the start of a step."""
        values = {name: part_of(self.expressions, part, expected.start) for name, part in rank.inputs.items()}
        for state in rank.states:
            values[state.input] = expected.held(self.expressions, state, expected.start)
        if self.relation.plan is not None:
            values[ROUND_INPUT] = round_number(self.expressions)
        for accumulator in rank.sums:
            values[accumulator.input] = self.expressions.linear({}, accumulator.shape)
        return values

    def _summed(self, rank: RankRelation, graph: Graph, results: SweptValues) -> Values:
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
        """A value without any known fact, in the same ranges and parts as another."""
        expressions, pieces = self.expressions, list[Piece]()
        if expressions.elements(like) is None:
            return expressions.leaf("sum so far", (name, rank, 0), expressions.shape(like))
        for index, (root, start, stop) in enumerate(expressions.pieces(like)):
            op, selection, operands, _ = expressions.all[root]
            of = operands[0] if op == TAKE else root
            leaf = expressions.leaf("sum so far", (name, rank, index), expressions.shape(of))
            pieces.append((expressions.take(leaf, cast(Selection, selection)) if op == TAKE else leaf, start, stop))
        return expressions.view(expressions.flat(pieces), expressions.shape(like))

    def _iterated(
        self, rank: RankRelation, graph: Graph, results: SweptValues, before: Values, name: str, output: str
    ) -> int:
        """An accumulator after all micro-steps, by more than a term; unknown if several accumulators decide."""
        shape = self.expressions.shape(results[output])
        whole = self.expressions.leaf("sum so far", (name, rank.rank), shape)
        after = self._behind(graph, results, {**before, name: whole})
        if after is None:
            return self._unknown(rank, name, results[output])
        number = after.get(output, results[output])
        rest = [value for input, value in before.items() if input != name]
        roots = {root for value in rest for root in self.expressions.roots(value)}
        forms = self.expressions.all
        leaves = {forms[root].operands[0] if forms[root].op == TAKE else root for root in roots}
        if self.expressions.depend([number], leaves):
            return self._unknown(rank, name, results[output])
        return self.expressions.iterated(number, whole, MICRO, self.expressions.linear({}, shape))

    def _unknown(self, rank: RankRelation, name: str, number: int) -> int:
        """A value of micro-steps beyond a sum of terms."""
        shape = self.expressions.shape(number)
        return self.expressions.leaf("a value of micro-steps", (name, rank.rank), shape, self.drawn - {MICRO})

    def _behind(self, graph: Graph, results: SweptValues, inputs: Values) -> Values | None:
        """The values that depend on some inputs, for other values; None if a call depends on the inputs."""
        reader = self.reader(graph)
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

    def _inputs(self, times: int, expected: Expected, rank: RankRelation, graph: Graph, begun: RankValues) -> Values:
        """The inputs of a rank's graph, in the declared shapes and types; micro-steps move the states that a phase
        makes anew."""
        inputs: Values = {}
        states, values = {state.input: state for state in rank.states}, begun.step
        for name, number in values.items():
            if name not in graph.inputs and name not in graph.initializers:
                continue
            type = graph.types[name]
            if times > 1 and name in states and states[name].output in graph.outputs:
                number = expected.held(self.expressions, states[name], expected.during)
                if MICRO not in self.expressions.varies[number]:  # the source does not move it in a micro-step
                    shape, moving = self.expressions.shape(number), self.drawn
                    number = self.expressions.leaf("moved state", (name, rank.rank), shape, moving)
            if type.static and self.expressions.elements(number) == type.elements:
                number = self.expressions.view(number, type.shape)
            if name in states and type.static:
                of_source = self.training.graph.types[states[name].pieces[0].tensor].dtype
                number = as_type(self.expressions, number, of_source, type.dtype)
            inputs[name] = number
            if type.static:
                begun.shapes[name] = tuple(type.dims)
        return inputs

    def _carry(
        self, rank: RankRelation, graph: Graph, values: RankValues, results: SweptValues, times: int, expected: Expected
    ) -> None:
        """Store the new states, accumulators and outputs of a phase."""
        states = values.step
        sums = {accumulator.output for accumulator in rank.sums}
        moved = {state.input: state for state in rank.states}
        if times > 1 and sums:
            begun = {accumulator.input for accumulator in rank.sums}
            for name in descendants(GraphIndex(graph), begun).intersection(graph.outputs) - sums:
                results[name] = self._unknown(rank, name, results[name])
        summed = self._summed(rank, graph, results) if times > 1 else {}
        for output, name in rank.next_inputs.items():
            if output in graph.outputs:
                result = number = results[output]
                if times > 1 and output in sums:
                    number = summed[output]
                elif times > 1:
                    moving = self.expressions.root(expected.held(self.expressions, moved[name], expected.during))
                    number = self.expressions.iterated(number, moving, MICRO, self.expressions.root(states[name]))
                shape = self.expressions.shape(result)
                if values.shapes.get(name, shape) != shape and elements(shape) is not None:
                    number = self._unknown(rank, f"{name}, in another shape", number)
                states[name] = number
                values.dtypes[name] = graph.outputs[output].dtype
        states.update((name, results[name]) for name in rank.saved if name in graph.outputs)
        for name in graph.outputs:
            if name in rank.outputs and states.setdefault(f"output {name}", results[name]) != results[name]:
                states[f"output {name}"] = self._unknown(rank, name, results[name])  # two phases show two values


class ShortProver(Prover):
    """A prover that says nothing of open claims. Raises OpenClaim."""

    comparison = WithoutOpenClaims
