"""The ranks of an output folder in ``verify``: programs by phase, and the pieces of states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from gopt.artifact.graph_check import check_rank
from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_entries import LocalAccumulator, LocalState, RankEntry
from gopt.artifact.pieces import Place, cut, put
from gopt.errors import InputError
from gopt.ir.graph import Graph
from gopt.ir.load import load
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, numpy_dtype
from gopt.runtime.executor import Executor
from gopt.runtime.session import SessionCache
from gopt.verification.compare import Values
from gopt.verification.message_rounds import without_absent_operands
from gopt.verification.random_inputs import RandomInputs, feed_graph
from gopt.verification.reference_graphs import probed
from gopt.verification.source_members import Program
from gopt.verification.variants import FirstRun

Held = dict[tuple[str, int, TensorType], np.ndarray]
"""Values of files by their place."""


@dataclass(slots=True)
class RankPrograms:
    """One rank's programs by phase, the pieces in its inputs, and its accumulators."""

    programs: Mapping[str, Program]
    states: tuple[LocalState, ...]
    sums: tuple[LocalAccumulator, ...]
    values: Values
    """Stored values by input name; ranks share those that they have in common."""
    record: RankEntry
    first_runs: dict[tuple[str, int], FirstRun] = field(default_factory=dict)
    """By phase and micro-step."""

    def type_of(self, input: str) -> TensorType:
        """The type of a state or accumulator in the rank's programs."""
        return next(p.graph.inputs[input] for p in self.programs.values() if input in p.graph.inputs)

    def carry(self, values: Values, outputs: Values) -> None:
        """Store the states and accumulators computed by a phase."""
        carried: tuple[LocalState | LocalAccumulator, ...] = (*self.states, *self.sums)
        for entry in carried:
            if entry.output in outputs:
                values[entry.input] = np.asarray(outputs[entry.output])

    def feeds(self, start: Values) -> Values:
        """Return the rank's feeds for states, cut from whole tensors, and zero accumulators; states are not to be
        written."""
        feeds = {}
        for state in self.states:
            parts = [cut(piece, start[piece.tensor]) for piece in state.pieces]
            value = np.concatenate(parts) if len(parts) != 1 else parts[0]
            type = self.type_of(state.input)
            with np.errstate(over="ignore"):
                feeds[state.input] = value.astype(numpy_dtype(type.dtype), copy=False).reshape(type.dims)
            feeds[state.input].flags.writeable = False  # it may be a part of ``start``, and another rank's
        for accumulator in self.sums:
            feeds[accumulator.input] = np.zeros(accumulator.shape, numpy_dtype(self.type_of(accumulator.input).dtype))
        return feeds


def read_rank(
    folder: Path, record: RankEntry, manifest: Manifest, phases: Iterable[str], probe: set[str],
    terms: Mapping[str, str], cache: SessionCache, random_inputs: RandomInputs, types: Mapping[str, TensorType],
    arrays: Held,
) -> RankPrograms:  # fmt: skip
    """A rank from the manifest's ``record`` and its files; local gradients of ``probe``, and
    ``terms`` of gradients, can be reached.

    ``random_inputs`` are fed, with ``types`` of results in the source. Raises InputError where files are missing or say
    something else. ``arrays``: shared by ranks."""
    states = manifest.states_of(record)
    graphs = load_rank(folder, record, list(phases))
    stored = start_values(graphs, arrays)
    check_rank(manifest, record, graphs, folder)
    graphs = {phase: without_absent_operands(graph) for phase, graph in graphs.items()}
    data = manifest.mesh.mesh().data_axes
    fed = {phase: feed_graph(graph, random_inputs, types) for phase, graph in graphs.items()}
    programs = {phase: Executor(probed(graph, probe, data, terms), cache) for phase, graph in fed.items()}
    return RankPrograms(programs, states, record.accumulators, stored, record)


def load_rank(
    folder: Path, record: RankEntry, phases: Sequence[str], read: Callable[[str], Graph] = partial(load, own=True)
) -> dict[str, Graph]:
    """The graphs of a rank by phase; a server's is of the last phase. Raises InputError for a missing file."""
    graphs = {}
    files = record.files.items() if record.role == "server" else [(p, record.files.get(p, "")) for p in phases]
    for phase, name in files:
        path = folder / name
        if not path.is_file():
            raise InputError(f"rank {record.rank} has no file {path}", "write the folder again with gopt shard")
        graphs[phases[-1] if record.role == "server" else phase] = read(str(path))
    return graphs


def start_values(graphs: Mapping[str, Graph], arrays: Held) -> Values:
    """The stored values of the inputs of a rank's graphs; ``arrays``: shared by ranks."""
    return {
        name: _value(tensor, arrays)
        for graph in graphs.values()
        for name, tensor in graph.initializers.items()
        if name in graph.inputs
    }


def _value(tensor: Tensor, arrays: Held) -> np.ndarray:
    if not tensor.path:
        return tensor.numpy()
    key = tensor.path, tensor.offset, tensor.type
    if key not in arrays:
        arrays[key] = tensor.numpy()
        arrays[key].flags.writeable = False
    return arrays[key]


def joined(
    ranks: Sequence[RankPrograms], key: str, values: Sequence[Values], types: Mapping[str, TensorType]
) -> Values:
    """Tensors joined from every rank's parts: ``values`` by rank, under the ``key`` of a state; ``types``: of whole
    tensors.

    A tensor with a missing element is left out, and so are narrow copies. A tensor of one part shares its memory."""
    parts: dict[str, dict[tuple[Place, int], np.ndarray]] = {}
    for rank, rank_values in zip(ranks, values):
        for state in rank.states:
            name = getattr(state, key)
            if name not in rank_values or state.copy:
                continue
            flat, offset = np.asarray(rank_values[name]).reshape(-1), 0
            for piece in state.pieces:
                key_of_part = (piece.place, piece.start)
                parts.setdefault(piece.tensor, {})[key_of_part] = flat[offset : offset + piece.elements]
                offset += piece.elements
    whole: Values = {}
    for name, pieces_of in parts.items():
        if sum(part.size for part in pieces_of.values()) == types[name].elements:
            (within, start), part = next(iter(pieces_of.items()))
            if within == (None, None) and len(pieces_of) == 1:
                whole[name] = part.reshape(types[name].dims)
                continue
            whole[name] = np.empty(types[name].dims, part.dtype)
            for (within, start), part in pieces_of.items():
                put(whole[name], within, part, start)
    return whole
