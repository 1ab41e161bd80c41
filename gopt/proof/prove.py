"""Prove the ranks of a folder equal to their source in real arithmetic, for all values, without running them.

By induction over steps: states that the ranks hold as the manifest says at the start of a step are held so at its end,
with the values of the source's step on the combined gradients of all batches."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from gopt.analysis.training import TrainingGraph
from gopt.artifact.graph_check import check_rank
from gopt.artifact.integrity import check_files
from gopt.artifact.manifest import LocalState, Manifest, RankEntry
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.path_diagnostics import check_folder
from gopt.errors import InputError, UnsupportedError
from gopt.ir.graph import COMM, Graph
from gopt.ir.load import load
from gopt.ir.opaque.expand import expand
from gopt.ir.types import TensorType
from gopt.proof.expected import MICRO, Expected, Specification
from gopt.proof.expressions import Expressions, elements
from gopt.proof.operators import Constants, Reader, as_type
from gopt.proof.sweep import Sweep, Values
from gopt.records.mesh import Mesh
from gopt.system.garbage import gc_paused
from gopt.system.progress import ProgressCallback, no_progress
from gopt.verification.folder_check import check_roles
from gopt.verification.verify import source_training


class Verdict(str, Enum):
    """What a proof says of one value."""

    PROVEN = "proven"
    DIFFERENT = "different"
    UNPROVEN = "unproven"


@dataclass(frozen=True, slots=True)
class Claim:
    """One value of the step: a new state, a loss or a metric, and whether all ranks have it."""

    name: str
    kind: str
    verdict: Verdict
    why: str = ""
    rank: int | None = None


@dataclass(slots=True)
class Proof:
    """The claims of a proof, states first."""

    ranks: int
    claims: list[Claim] = field(default_factory=list)
    expressions: int = 0


class Prover:
    """The source and the ranks of one output folder, ready to be compared."""

    def __init__(self, folder: str | os.PathLike[str], advance: ProgressCallback = no_progress) -> None:
        self.folder, self.advance = Path(folder), advance
        check_folder(self.folder)
        self.manifest, self.mesh = read_manifest(self.folder)
        check_files(self.folder, self.manifest.files)
        if self.manifest.parameter_server is not None:
            raise UnsupportedError(f"{folder} holds trainers and servers: gopt prove reads ranks", "gopt verify runs them")
        if len(self.manifest.ranks) != self.manifest.total_ranks:
            raise InputError(
                f"{folder} holds {len(self.manifest.ranks)} of {self.manifest.total_ranks} ranks",
                "shard without --only-ranks",
            )
        advance("reading the source")
        self.training, _ = source_training(self.folder, None, self.manifest, self.mesh)
        check_roles(self.manifest, self.training, self.folder)
        micro = {MICRO: self.manifest.accumulate} if self.manifest.accumulate > 1 else {}
        self.expressions = Expressions({**dict(self.mesh.axes), **micro})
        self.constants = Constants(self.expressions)
        self.own = frozenset({*self.mesh.data_axes, *micro})
        self.dtypes: dict[tuple[int, str], str] = {}

    def run(self) -> Proof:
        """Read the source and all ranks, and compare."""
        with gc_paused():
            expected = Specification(self.expressions, self.constants, self.training, self.manifest, self.own).read()
            found = self._ranks(expected)
        return _Comparison(self.manifest, self.training, self.expressions, expected, found, self.dtypes).proof()

    def _ranks(self, expected: Expected) -> list[Values]:
        """The results of every rank at the end of the step."""
        held = [self._start(entry, expected) for entry in self.manifest.ranks]
        sweep = Sweep(self.expressions, self.constants, self.mesh, self.own)
        for phase, times in self.manifest.schedule.items():
            graphs = []
            for number, entry in enumerate(self.manifest.ranks, 1):
                graphs.append(self._graph(entry, phase))
                self.advance(f"reading ranks, {phase}", number, len(self.manifest.ranks))
            self.advance(f"comparing {phase}")
            given = [self._given(entry, graph, values) for entry, graph, values in zip(self.manifest.ranks, graphs, held)]
            results = sweep.run(graphs, given)
            for entry, graph, values, result in zip(self.manifest.ranks, graphs, held, results):
                self._carry(entry, graph, values, result, times)
        return held

    def _graph(self, entry: RankEntry, phase: str) -> Graph:
        path = self.folder / entry.files.get(phase, "")
        if not path.is_file():
            raise InputError(f"rank {entry.rank} has no file {path}", "write the folder again with gopt shard")
        return expand(load(path, own=True))

    def _start(self, entry: RankEntry, expected: Expected) -> Values:
        """What a rank's inputs are at the start of a step."""
        values = {name: expected.start[name] for name in (*self.training.batch, *self.training.hyper)}
        for fed in entry.fed:
            values[fed.input] = self._boxed(values[fed.input], fed.box)
        for state in self.manifest.states_of(entry):
            values[state.input] = self._held(state, expected.start)
        for accumulator in entry.accumulators:
            values[accumulator.input] = self.expressions.linear({}, accumulator.shape)
        return values

    def _summed(self, entry: RankEntry, graph: Graph, results: Values, output: str, name: str) -> int:
        """What an accumulator has after all micro-steps that begin with zeros: ``results`` are of the first of them.

        Each micro-step must add its term to what the accumulator has, whatever that is."""
        term = results[output]
        begun = [
            (self.expressions.leaf("sum so far", (name, entry.rank, index), self.expressions.shape(root)), start, stop)
            for index, (root, start, stop) in enumerate(self.expressions.pieces(term))
        ]
        before = self.expressions.view(self.expressions.flat(begun), self.expressions.shape(term))
        after = self._behind(graph, results, name, before)
        moved = {behind for behind in graph.outputs if behind in after}
        due = self.expressions.elementwise(self.expressions.added, [term, before])
        if moved != {output} or after[output] != due:
            return self.expressions.leaf("sum of micro-steps", (name, entry.rank), self.expressions.shape(term))
        return self.expressions.reduced(term, (MICRO,), "sum")

    def _behind(self, graph: Graph, results: Values, name: str, number: int) -> Values:
        """The values that depend on an input, for another value of it; those behind a call are left out."""
        reader = Reader(self.expressions, graph, self.own, self.constants)
        changed = {name: number}
        for node in graph.nodes:
            if changed.keys().isdisjoint(node.reads):
                continue
            if node.domain == COMM:
                return {}
            operands = [changed.get(each, results.get(each)) if each else None for each in (*node.inputs, *node.captures)]
            changed.update(zip(node.outputs, reader.results(node, operands)))
        return changed

    def _boxed(self, number: int, box: object) -> int:
        return self.expressions.apply("box", box, [number], None)  # type: ignore[arg-type]

    def _held(self, state: LocalState, whole: Values) -> int:
        return held(self.expressions, state, whole)

    def _given(self, entry: RankEntry, graph: Graph, values: Values) -> Values:
        """The inputs of a rank's graph, in the shapes and types that it declares."""
        types = {state.tensor: state.dtype for state in self.manifest.states}
        given = {}
        states = {state.input: state for state in self.manifest.states_of(entry)}
        for name, type in graph.inputs.items():
            if name not in values:
                continue
            number = values[name]
            if name in states and type.static:
                number = self.expressions.view(number, type.shape)
                number = as_type(self.expressions, number, types[states[name].pieces[0].tensor], type.dtype)
            given[name] = number
        return given

    def _carry(self, entry: RankEntry, graph: Graph, held: Values, results: Values, times: int) -> None:
        """Take over what a phase makes."""
        sums = {accumulator.output for accumulator in entry.accumulators}
        for output, name in self.manifest.next_inputs(entry).items():
            if output in graph.outputs:
                number = results[output]
                if times > 1 and output in sums:
                    number = self._summed(entry, graph, results, output, name)
                elif times > 1:
                    number = self.expressions.iterated(number, self.expressions.root(held[name]), MICRO)
                held[name] = number
                self.dtypes[entry.rank, name] = graph.outputs[output].dtype
        held.update({f"output {name}": results[name] for name in graph.outputs if name in self.training.shown})


def held(expressions: Expressions, state: LocalState, whole: Values) -> int:
    """What a rank holds of a state: its pieces, flat."""
    pieces = []
    for piece in state.pieces:
        number = whole[piece.tensor]
        if piece.box is not None or piece.every is not None:
            number = expressions.apply("box", (piece.box, piece.every), [number], (piece.elements,))
            pieces.append((number, 0, piece.elements))
        else:
            pieces += expressions.cut(number, piece.start, piece.stop)
    return expressions.flat(pieces)


class _Comparison:
    """Found and expected values, claim by claim."""

    def __init__(
        self, manifest: Manifest, training: TrainingGraph, expressions: Expressions, expected: Expected,
        found: Sequence[Values], dtypes: Mapping[tuple[int, str], str],
    ) -> None:  # fmt: skip
        self.manifest, self.training, self.expressions = manifest, training, expressions
        self.expected, self.found, self.dtypes = expected, found, dtypes

    def proof(self) -> Proof:
        types = {state.tensor: state.dtype for state in self.manifest.states}
        claims = {state.tensor: Claim(state.tensor, state.kind.value, Verdict.PROVEN) for state in self.training.states}
        for entry, values in zip(self.manifest.ranks, self.found):
            for state in self.manifest.states_of(entry):
                due = held(self.expressions, state, self.expected.states)
                if state.copy:
                    due = as_type(self.expressions, due, types[state.pieces[0].tensor], self.dtypes[entry.rank, state.input])
                due = self.expressions.root(due)
                number = self.expressions.root(self.expressions.view(values[state.input], (state.elements,)))
                if due != number:
                    name = state.pieces[0].tensor
                    claims[name] = Claim(name, claims[name].kind, Verdict.UNPROVEN, self.words(number, due), entry.rank)
        for name, due in self.expected.shown.items():
            claim = Claim(name, "loss" if name in self.training.losses else "metric", Verdict.PROVEN)
            for entry, values in zip(self.manifest.ranks, self.found):
                number = values.get(f"output {name}")
                if number != due:
                    claim = Claim(name, claim.kind, Verdict.UNPROVEN, self.words(number, due), entry.rank)
            claims[f"output {name}"] = claim
        return Proof(len(self.found), list(claims.values()), len(self.expressions.all))

    def words(self, found: int | None, due: int) -> str:
        return f"{self.text(found, 9)}\n    DUE {self.text(due, 4)}"

    def text(self, number: int | None, depth: int) -> str:
        if number is None:
            return "-"
        e = self.expressions.all[number]
        if not e.operands:
            return f"{e.op}:{e.attributes}"[:60]
        if not depth:
            return f"#{number}"
        inner = ", ".join(self.text(operand, depth - 1) for operand in e.operands[:6])
        attributes = [str(a) for a in e.attributes[:6]] if e.op in ("linear", "product", "flat") else e.attributes
        return f"{e.op}{attributes}({inner})"[:1500]
