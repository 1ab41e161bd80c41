"""Prove the ranks of a folder equal to the source in real arithmetic, for all values, without a run.

By induction over steps: ranks with the manifest's pieces of all states at the start of a step have the same pieces of
the source's new states at the end, for the combined gradients of all batches."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gopt.artifact.graph_check import check_rank
from gopt.artifact.integrity import check_files
from gopt.artifact.manifest import RankEntry
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.path_diagnostics import check_folder
from gopt.errors import InputError, UnsupportedError
from gopt.ir.graph import COMM, Graph
from gopt.ir.graph_index import GraphIndex, descendants
from gopt.ir.opaque.expand import expand
from gopt.runtime.inlined_functions import inlined
from gopt.system.garbage import gc_paused
from gopt.system.progress import ProgressCallback, no_progress
from gopt.verification.folder_check import check_all_ranks, check_roles, check_starts
from gopt.verification.proof.comparison import Comparison, RankValues
from gopt.verification.proof.constants import ConstantTable
from gopt.verification.proof.expected import MICRO, Expected, Specification, held_pieces
from gopt.verification.proof.expressions import Expressions, elements
from gopt.verification.proof.operators import NodeReader, as_type
from gopt.verification.proof.result import Claim, ClaimMismatch, ProofVerdict, RankProof
from gopt.verification.proof.sweep import Sweep, UnpairedCall, Values
from gopt.verification.rank_programs import Held, RankPrograms, joined, load_rank, start_values
from gopt.verification.verify import source_training


class Prover:
    """The source and the ranks of an output folder, ready to be compared."""

    def __init__(self, folder: str | os.PathLike[str], advance: ProgressCallback = no_progress) -> None:
        self.folder, self.advance = Path(folder), advance
        check_folder(self.folder)
        self.manifest, self.mesh = read_manifest(self.folder)
        check_files(self.folder, self.manifest.files)
        if self.manifest.parameter_server is not None:
            raise UnsupportedError(
                f"{folder} holds trainers and servers: gopt prove reads ranks", "gopt verify runs them"
            )
        if self.manifest.split is not None:
            axes = ", ".join(self.manifest.split)
            raise UnsupportedError(
                f"the mesh of {folder} splits the computation along {axes}: gopt prove has no laws for that yet",
                "gopt verify compares the ranks by numbers",
            )
        check_all_ranks(self.manifest, self.folder)
        advance("reading the source")
        self.training, _ = source_training(self.folder, None, self.manifest, self.mesh)
        check_roles(self.manifest, self.training, self.folder)
        micro = {MICRO: self.manifest.accumulate} if self.manifest.accumulate > 1 else {}
        self.expressions = Expressions({**dict(self.mesh.axes), **micro})
        self.constants = ConstantTable(self.expressions)
        self.varying = frozenset(axis for axis in (*self.mesh.data_axes, *micro) if self.expressions.extents[axis] > 1)
        self.types = {state.tensor: state.dtype for state in self.manifest.states}
        self.shapes: dict[tuple[int, str], tuple[int, ...]] = {}
        """The declared shapes of the inputs of each rank, which the next step reads again."""
        self.ranks: list[RankValues] = []

    def run(self) -> RankProof:
        """Read the source and all ranks, and compare."""
        with gc_paused():
            expected = Specification(
                self.expressions, self.constants, self.training, self.manifest, self.varying
            ).read()
            graphs = self._read()
            try:
                self.ranks = self._ranks(expected, graphs)
            except UnpairedCall as wrong:
                mismatch = ClaimMismatch(wrong.rank, 1, wrong.node, wrong.actual, wrong.expected)
                return RankProof(self.mesh.ranks, [Claim(wrong.node, "call", ProofVerdict.DIFFERENT, mismatch)])
            return Comparison(
                self.expressions, self.constants, self.training, self.manifest, expected, self.ranks
            ).proof()

    def _read(self) -> list[dict[str, Graph]]:
        """The graphs of all ranks, by phase. Raises InputError for a missing file, a contradiction to the manifest,
        or different start values of a state."""
        read, programs = [], []
        arrays: Held = {}
        for number, entry in enumerate(self.manifest.ranks, 1):
            graphs = load_rank(self.folder, entry, list(self.manifest.schedule))
            check_rank(self.manifest, entry, graphs, self.folder)
            for phase, graph in graphs.items():
                self._check_versions(graph, self.folder / entry.files[phase])
            programs.append(RankPrograms({}, self.manifest.states_of(entry), (), start_values(graphs, arrays), entry))
            read.append({phase: inlined(expand(graph)) for phase, graph in graphs.items()})
            self.advance("reading ranks", number, len(self.manifest.ranks))
            sums = {accumulator.input for accumulator in entry.accumulators}
            if any(value.any() for name, value in programs[-1].values.items() if name in sums):
                raise InputError(
                    f"rank {entry.rank} has an accumulator that does not start at zero",
                    "a file of the folder was edited: write the folder again",
                )
        stored = joined(programs, "input", [rank.values for rank in programs], self.training.graph.types)
        check_starts(programs, stored, self.folder)
        return read

    def _check_versions(self, graph: Graph, path: Path) -> None:
        """Raise InputError for another version of operators than the source's: they may compute something else."""
        versions = {entry.domain: entry.version for entry in self.training.graph.header.opset_import}
        for entry in graph.header.opset_import:
            if versions.get(entry.domain, entry.version) != entry.version:
                raise InputError(
                    f"{path} is of operator set {entry.version}, the source of {versions[entry.domain]}",
                    "a file of the folder was edited: write the folder again",
                )

    def _ranks(self, expected: Expected, graphs: Sequence[Mapping[str, Graph]]) -> list[RankValues]:
        """The values of every rank."""
        ranks = [RankValues(self._start(entry, expected)) for entry in self.manifest.ranks]
        sweep = Sweep(self.expressions, self.constants, self.mesh, self.varying)
        for phase, times in self.manifest.schedule.items():
            self.advance(f"comparing {phase}")
            of_phase = [graphs_of_rank[phase] for graphs_of_rank in graphs]
            inputs = [
                self._inputs(times, expected, entry, graph, values.step)
                for entry, graph, values in zip(self.manifest.ranks, of_phase, ranks)
            ]
            results = sweep.run(of_phase, inputs)
            for entry, graph, values, result in zip(self.manifest.ranks, of_phase, ranks, results):
                values.files.append(result)
                self._carry(entry, graph, values, result, times, expected)
        return ranks

    def _start(self, entry: RankEntry, expected: Expected) -> Values:
        """A rank's inputs at the start of a step."""
        values = {name: expected.start[name] for name in (*self.training.batch, *self.training.hyper)}
        for fed in entry.fed:
            values[fed.input] = self.expressions.apply("box", fed.box, [values[fed.input]], None)
        for state in self.manifest.states_of(entry):
            values[state.input] = held_pieces(self.expressions, state, expected.start)
        for accumulator in entry.accumulators:
            values[accumulator.input] = self.expressions.linear({}, accumulator.shape)
        return values

    def _summed(self, entry: RankEntry, graph: Graph, results: Values) -> Values:
        """The accumulators after all micro-steps from zero, by output; ``results``: of the first micro-step.

        Each micro-step must add a term to an accumulator, for any values of all accumulators."""
        terms = {sum: results[sum.output] for sum in entry.accumulators if sum.output in graph.outputs}
        before = {sum.input: self._any(sum.input, entry.rank, term) for sum, term in terms.items()}
        after = self._behind(graph, results, before)
        new: Values = {}
        for accumulator, term in terms.items():
            name, output = accumulator.input, accumulator.output
            due = self.expressions.elementwise(self.expressions.added, [term, before[name]])
            if after is not None and after.get(output) == due:
                new[output] = self.expressions.reduced(term, (MICRO,), "sum")
            else:
                new[output] = self._iterated(entry, graph, results, before, name, output)
        return new

    def _any(self, name: str, rank: int, like: int) -> int:
        """A value without any known fact, in ranges as those of another."""
        pieces = [
            (self.expressions.leaf("sum so far", (name, rank, index), self.expressions.shape(root)), start, stop)
            for index, (root, start, stop) in enumerate(self.expressions.pieces(like))
        ]
        return self.expressions.view(self.expressions.flat(pieces), self.expressions.shape(like))

    def _iterated(self, entry: RankEntry, graph: Graph, results: Values, before: Values, name: str, output: str) -> int:
        """An accumulator after all micro-steps, by more than a term; unknown if several accumulators decide."""
        shape = self.expressions.shape(results[output])
        whole = self.expressions.leaf("sum so far", (name, entry.rank), shape)
        after = self._behind(graph, results, {**before, name: whole})
        if after is None:
            return self._unknown(entry, name, results[output])
        number = after.get(output, results[output])
        rest = [value for input, value in before.items() if input != name]
        if self.expressions.depend([number], {leaf for value in rest for leaf, _, _ in self.expressions.pieces(value)}):
            return self._unknown(entry, name, results[output])
        return self.expressions.iterated(number, whole, MICRO, self.expressions.linear({}, shape))

    def _unknown(self, entry: RankEntry, name: str, number: int) -> int:
        """A value of micro-steps beyond a sum of terms."""
        return self.expressions.leaf("a value of micro-steps", (name, entry.rank), self.expressions.shape(number))

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

    def _inputs(self, times: int, expected: Expected, entry: RankEntry, graph: Graph, values: Values) -> Values:
        """The inputs of a rank's graph, in the declared shapes and types; micro-steps move the states that a phase
        makes anew."""
        inputs: Values = {}
        states = {state.input: state for state in self.manifest.states_of(entry)}
        for name, type in graph.inputs.items():
            if name not in values:
                continue
            number = values[name]
            if times > 1 and name in states and states[name].output in graph.outputs:
                number = held_pieces(self.expressions, states[name], expected.during)
                if MICRO not in self.expressions.varies[number]:  # the source does not move it in a micro-step
                    shape, moving = self.expressions.shape(number), frozenset({MICRO})
                    number = self.expressions.leaf("moved state", (name, entry.rank), shape, moving)
            if name in states and type.static:
                number = self.expressions.view(number, type.shape)
                number = as_type(self.expressions, number, self.types[states[name].pieces[0].tensor], type.dtype)
            inputs[name] = number
            if type.static:
                self.shapes[entry.rank, name] = tuple(type.dims)
        return inputs

    def _carry(
        self, entry: RankEntry, graph: Graph, values: RankValues, results: Values, times: int, expected: Expected
    ) -> None:
        """Store the new states, accumulators and outputs of a phase."""
        states = values.step
        sums = {accumulator.output for accumulator in entry.accumulators}
        moved = {state.input: state for state in self.manifest.states_of(entry)}
        if times > 1 and sums:
            begun = {accumulator.input for accumulator in entry.accumulators}
            for name in descendants(GraphIndex(graph), begun).intersection(graph.outputs) - sums:
                results[name] = self._unknown(entry, name, results[name])
        summed = self._summed(entry, graph, results) if times > 1 else {}
        for output, name in self.manifest.next_inputs(entry).items():
            if output in graph.outputs:
                number = results[output]
                if times > 1 and output in sums:
                    number = summed[output]
                elif times > 1:
                    moving = self.expressions.root(held_pieces(self.expressions, moved[name], expected.during))
                    number = self.expressions.iterated(number, moving, MICRO, self.expressions.root(states[name]))
                shape = self.expressions.shape(results[output])
                if elements(shape) is not None and self.shapes.get((entry.rank, name), shape) != shape:
                    number = self._unknown(entry, f"{name}, in another shape", number)
                states[name] = number
                values.dtypes[name] = graph.outputs[output].dtype
        for name in graph.outputs:
            if name in self.training.shown and states.setdefault(f"output {name}", results[name]) != results[name]:
                states[f"output {name}"] = self._unknown(entry, name, results[name])  # two phases show two values
