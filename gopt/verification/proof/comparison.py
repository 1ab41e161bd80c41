"""Compares the values of all ranks at the end of a step with the source's, claim by claim."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from gopt.artifact.manifest_entries import LocalState
from gopt.artifact.pieces import Piece, cover
from gopt.verification.proof.calls import Members
from gopt.verification.proof.constants import ConstantTable
from gopt.verification.proof.evaluation import Unevaluable
from gopt.verification.proof.expected import Expected, part_of
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.move_laws import as_type
from gopt.verification.proof.rank_sweep import SweptValues, Values
from gopt.verification.proof.relation import ProofRelation, SourcePart
from gopt.verification.proof.result import Claim, ClaimMismatch, ProofVerdict, RankProof
from gopt.verification.proof.samples import CounterExamples
from gopt.verification.proof.words import Words


@dataclass(slots=True)
class RankValues:
    """The values of a rank: ``step`` at the end of the step, ``files`` of each file, in the order of phases, and the
    types of new states."""

    step: Values
    files: list[SweptValues] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The declared shapes of the inputs, which the next step reads again."""

    def after(self, results: SweptValues) -> RankValues:
        """The values behind one more file, to be carried on."""
        return RankValues(dict(self.step), [*self.files, results], dict(self.dtypes), self.shapes)


class Comparison:
    """Actual and expected values, claim by claim."""

    def __init__(
        self, expressions: Expressions, constants: ConstantTable, relation: ProofRelation, expected: Expected,
        actual: Sequence[RankValues],
    ) -> None:  # fmt: skip
        self.expressions, self.training, self.relation = expressions, relation.training, relation
        self.expected, self.actual, self.mesh = expected, actual, relation.mesh
        self.constants = constants
        self._nodes: dict[int, dict[int, str]] = {}
        """The first value with a multiple of an expression, for ranks that were asked about."""

    @cached_property
    def words(self) -> Words:
        return Words(self.expressions, self.expected.names(self.expressions), self.expressions.values)

    @cached_property
    def examples(self) -> CounterExamples:
        narrow = self.relation.reduce_dtype
        return CounterExamples(self.expressions, self.training, self.mesh, self.constants, narrow)

    def proof(self) -> RankProof:
        """The claims of all values."""
        kinds = {state.tensor: state.kind.value for state in self.training.states}
        apart: dict[str, list[tuple[int, int, int]]] = {}
        covered: dict[str, set[Piece]] = {name: set() for name in kinds}
        compared: dict[tuple[int, int, str | None], list[tuple[str, int, int]]] = {}
        """By the record of a state, which ranks share, and the value."""
        alike: dict[int, list[int]] = {}
        for index, values in enumerate(self.actual):
            alike.setdefault(id(values), []).append(index)
        for members in alike.values():
            rank, values = self.relation.ranks[members[0]], self.actual[members[0]]
            for state in rank.states:
                key = id(state), values.step[state.input], values.dtypes.get(state.input)
                if key not in compared:
                    compared[key] = list(self._compared(state, values))
                    for piece in state.pieces if not state.copy else ():
                        covered[piece.tensor].add(piece)
                for name, actual, due in compared[key]:
                    apart.setdefault(name, []).extend((self.relation.ranks[at].rank, actual, due) for at in members)
        claims = [self._claim(name, kind, apart.get(name, [])) for name, kind in kinds.items()]
        for index, claim in enumerate(claims):
            if claim.verdict is ProofVerdict.PROVEN and not self._complete(claim.name, covered[claim.name]):
                claims[index] = replace(claim, verdict=ProofVerdict.UNPROVEN)  # a rank would have to hold it
        claims += [*self._shown(), *self._sums(), *self.relation.claims]
        return RankProof(len(self.actual), claims, len(self.expressions.all), dict(self.constants.roundings))

    def _shown(self) -> Iterator[Claim]:
        """Losses and metrics of a step, or outputs of a forward model."""
        usual = "metric" if self.training.states else "output"
        for name, whole in self.expected.shown.items():
            apart: list[tuple[int, int, int]] = []
            parts: set[Piece] = set()
            complete = False
            for rank, values in zip(self.relation.ranks, self.actual):
                for output, part in rank.outputs.items():
                    if part.value != name or f"output {output}" not in values.step:
                        continue
                    complete |= not part.pieces
                    parts |= set(part.pieces)
                    actual, due = self._output(rank.rank, output, part, whole)
                    if self._apart(actual) != self._apart(due):
                        apart.append((rank.rank, actual, due))
            claim = self._claim(name, "loss" if name in self.training.losses else usual, apart)
            complete = complete or self._complete(name, parts)
            unproven = claim.verdict is ProofVerdict.PROVEN and not complete
            yield replace(claim, verdict=ProofVerdict.UNPROVEN) if unproven else claim

    def _complete(self, name: str, pieces: Iterable[Piece]) -> bool:
        """Return whether pieces on ranks are all of a value of the source."""
        type = self.training.graph.types[name]
        return cover(pieces, type.dims) if type.static else False

    def _output(self, rank: int, output: str, part: SourcePart, whole: int) -> tuple[int, int]:
        """An output of a rank, or the sum of all ranks' terms, and the source's."""
        due = part_of(self.expressions, part, {part.value: whole})
        due = self.expressions.reduced(due, (axis for axis in part.over if axis in self.mesh.data_axes), part.how)
        terms = [axis for axis in part.over if axis not in self.mesh.data_axes]
        actual = self.actual[rank].step[f"output {output}"]
        if terms:
            members = self.mesh.members("+".join(terms), rank)
            numbers = [self.actual[member].step[f"output {self._name_of(member, output, part)}"] for member in members]
            all_coordinates = [{axis: self.mesh.coordinates(member)[axis] for axis in terms} for member in members]
            actual = Members(self.expressions, terms, all_coordinates).reduced(numbers, part.how)
        if part.pieces:
            actual = self.expressions.view(actual, self.expressions.shape(due))
        return actual, due

    def _name_of(self, rank: int, output: str, part: SourcePart) -> str:
        """The output of a rank with such a term; of the same name, if possible."""
        outputs = self.relation.ranks[rank].outputs
        return next(name for name in (output, *outputs) if outputs.get(name) == part)

    def _sums(self) -> Iterator[Claim]:
        """The accumulators of the ranks: empty at the end of a step."""
        apart: dict[str, list[tuple[int, int, int]]] = {}
        for rank, values in zip(self.relation.ranks, self.actual):
            for accumulator in rank.sums:
                name, zero = accumulator.input, self.expressions.linear({}, accumulator.shape)
                different = apart.setdefault(name, [])
                if values.step[name] != zero:
                    different.append((rank.rank, values.step[name], zero))
        for name, different in apart.items():
            yield self._claim(name, "sum of micro-steps", different)

    def _compared(self, state: LocalState, values: RankValues) -> Iterator[tuple[str, int, int]]:
        """The pieces of a rank's state with another expression than expected."""
        due = self.expected.held(self.expressions, state, self.expected.states)
        if state.copy:
            of_source = self.training.graph.types[state.pieces[0].tensor].dtype
            due = as_type(self.expressions, due, of_source, values.dtypes[state.input])
        actual = self.expressions.view(values.step[state.input], (state.elements,))
        alike = state.local or not self.expressions.varies[actual]
        if self.expressions.root(actual) == self.expressions.root(due) and alike:
            return
        position = 0
        for piece in state.pieces:
            parts = [
                self._apart(self.expressions.flat(self.expressions.cut(number, position, position + piece.elements)))
                for number in (actual, due)
            ]
            if parts[0] != parts[1] or not alike:
                yield piece.tensor, parts[0], parts[1]
            position += piece.elements

    def _apart(self, number: int) -> int:
        """A value, flat, with rows and constant rows apart."""
        if self.expressions.elements(number) is None:
            return self.expressions.root(number)
        return self.expressions.flat(self.expressions.apart(number))

    def _claim(self, name: str, kind: str, apart: Sequence[tuple[int, int, int]]) -> Claim:
        if not apart:
            return Claim(name, kind, ProofVerdict.PROVEN)
        rank, actual, due = apart[0]
        inner = self.words.parting(actual, due)
        found_text, due_text = self.words.pair(*inner)
        mismatch = ClaimMismatch(
            rank, len({member for member, _, _ in apart}), self._node_of(rank, inner[0]), found_text, due_text
        )
        try:
            member = self.mesh.coordinates(rank) if rank < self.mesh.ranks else {}  # all trainers push to a server
            example = self.examples.find(actual, due, member)
        except Unevaluable:
            example = None
        verdict = ProofVerdict.UNPROVEN if example is None else ProofVerdict.DIFFERENT
        return Claim(name, kind, verdict, replace(mismatch, example=example))

    def _node_of(self, rank: int, number: int) -> str | None:
        """The first value of a rank's files with a multiple of an expression, or a range of the elements."""
        if rank not in self._nodes:
            first = self._nodes[rank] = {}
            for values in self.actual[rank].files:
                for name, produced in values.items():
                    for root in self.expressions.roots(produced):
                        first.setdefault(self.expressions.bare(root), name)
        return self._nodes[rank].get(self.expressions.bare(number))


class OpenClaim(Exception):
    """A claim without a proof."""


class WithoutOpenClaims(Comparison):
    """Claims, all of them proven. Raises OpenClaim."""

    def proof(self) -> RankProof:
        result = super().proof()
        if not result.proven:  # a piece that no rank holds
            raise OpenClaim
        return result

    def _claim(self, name: str, kind: str, apart: Sequence[tuple[int, int, int]]) -> Claim:
        if apart:
            raise OpenClaim
        return super()._claim(name, kind, apart)
