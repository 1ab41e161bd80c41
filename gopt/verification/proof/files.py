"""The relation of rank files of another tool, by a relation file."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NoReturn

import numpy as np

from gopt.analysis.role_map import RoleMap
from gopt.analysis.roles import carried_states, trained_outputs
from gopt.analysis.source_collectives import adopt_source_collectives
from gopt.analysis.training import TrainingGraph
from gopt.artifact.manifest_entries import LocalState
from gopt.artifact.pieces import Piece, cut, place_shape, put
from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.importers.load import load_step
from gopt.ir.graph import Graph
from gopt.ir.opaque.expand import expand
from gopt.ir.types import TensorType
from gopt.records.boxes import Box, box_elements, box_shape, ranges_of
from gopt.records.mesh import Mesh, axis_kinds
from gopt.runtime.inlined_functions import inlined
from gopt.runtime.memory import bits
from gopt.system.garbage import gc_paused
from gopt.system.progress import ProgressCallback, no_progress
from gopt.text.sanitize import listed, show
from gopt.text.suggestions import did_you_mean
from gopt.verification.proof.rank_collectives import load_rank
from gopt.verification.proof.relation import ProofRelation, RankRelation, SourcePart, check_versions
from gopt.verification.proof.relation_file import (
    InputRelation,
    OutputRelation,
    RankOverrides,
    RelationFile,
    read_relation,
)
from gopt.verification.proof.result import Claim, ClaimMismatch, CounterExample, ProofVerdict

NAMED = 8
"""Values that a hint names."""
FilePath = str | os.PathLike[str]


def files_relation(
    source: FilePath,
    ranks: Sequence[FilePath],
    relation: FilePath | Mapping[str, Any],
    advance: ProgressCallback = no_progress,
) -> ProofRelation:  # fmt: skip
    """Read a source, rank files and the relation file. A single file is of all ranks.

    Raises InputError for a missing or a malformed file, and for a value of a rank without a relation; OptionError for
    an unknown axis of the mesh, or another number of ranks."""
    document, name = read_relation(relation)
    mesh = Mesh(tuple(document.mesh.items()), tuple(axis_kinds(document.axes or {}).items()))
    if len(ranks) not in (1, mesh.ranks):
        raise OptionError(
            f"the mesh {mesh} of {name} has {mesh.ranks} ranks, and {len(ranks)} files are given",
            "give a file for each rank, in order, or one that all ranks run",
        )
    outside = [entry.rank for entry in document.ranks if entry.rank >= mesh.ranks]
    if outside:
        raise InputError(f"{name}: the mesh {mesh} has no rank {outside[0]}", f"ranks are 0 to {mesh.ranks - 1}")
    advance("reading the source")
    training = _training(source, document, mesh)
    alike = frozenset(value for value in training.batch if not _own(document, training, value))
    if mesh.data_ranks > 1 and alike.issuperset(training.batch):
        raise InputError(
            f"{name}: the ranks along {mesh.data_group} see samples of their own, and no input has any",
            f"say which have: [inputs.{next(iter(training.batch), 'NAME')}] own = true",
        )
    readers = []
    with gc_paused():
        for rank in range(mesh.ranks):
            path = os.fspath(ranks[rank if len(ranks) > 1 else 0])
            graph = inlined(expand(load_rank(path, mesh, rank)))
            hint = "make both of one set: onnx.version_converter.convert_version(MODEL, VERSION)"
            check_versions(graph, path, training.graph, hint)
            readers.append(_RankReader(training, document, mesh, rank, graph, path, name))
            advance("reading ranks", rank + 1, mesh.ranks)
        _check_keys(document, readers, name)
        result = tuple(reader.read() for reader in readers)
        claims = tuple(_stored_claims(training, result))
    _check_outputs(training, result, mesh, name)
    return ProofRelation(
        training=training, mesh=mesh, ranks=result, loss_reduction=document.loss_reduction,
        reduce_dtype=document.reduce_dtype, alike=alike, claims=claims,
        remedy=f"look at the file, and at what {name} says of its inputs",
    )  # fmt: skip


def _training(source: FilePath, document: RelationFile, mesh: Mesh) -> TrainingGraph:
    """The source as a step; without any sign of a step, and any role by the user, as a forward model."""
    from gopt.api import load

    roles = RoleMap.of_table(document.roles)
    if not document.forward:
        try:
            step = load(source, roles=roles, axes=document.axes or {})
            return adopt_source_collectives(step.training, step.roles, mesh)
        except (InputError, UnsupportedError) as refusal:
            if document.forward is False or roles != RoleMap() or document.states:
                raise
            graph = load_step(source)
            if trained_outputs(graph, _carried(graph)):
                hint = "write forward = true in the relation if it is a forward model"
                raise type(refusal)(refusal.message, *refusal.hints, hint) from None
    graph = inlined(expand(load_step(source)))
    inputs = [name for name in graph.inputs if name not in graph.initializers]
    return TrainingGraph(graph, (), [], {}, inputs, [], list(graph.outputs), [])


def _carried(graph: Graph) -> dict[str, str] | None:
    try:
        return carried_states(graph)
    except UnsupportedError:
        return None


def _own(document: RelationFile, training: TrainingGraph, value: str) -> bool:
    """Return whether ranks along data axes have different samples in an input of the source."""
    tables = (document.inputs, *(entry.inputs for entry in document.ranks))
    entries = [entry for table in tables for key, entry in (table or {}).items() if (entry.of or key) == value]
    return next((entry.own for entry in entries if entry.own is not None), bool(training.states))


def _check_keys(document: RelationFile, readers: Sequence[_RankReader], name: str) -> None:
    """Raise InputError for an entry of a table about no rank's value."""
    tables = {"inputs": document.inputs, "outputs": document.outputs, "states": document.states}
    for table, entries in tables.items():
        names = {key for reader in readers for key in reader.names(table)}
        _check_known(entries or {}, names, f"{name}: {table}", "no rank has such a value")
    for entry in document.ranks:
        reader = readers[entry.rank]
        for table in tables:
            where = f"{name}: {table} of rank {entry.rank}"
            _check_known(getattr(entry, table) or {}, reader.names(table), where, f"{reader.path} has no such value")


def _check_known(entries: Iterable[str], names: Collection[str], where: str, fault: str) -> None:
    for key in entries:
        if key not in names:
            raise InputError(f"{where}: {show(key)}: {fault}", did_you_mean(key, names) or _there_are(names))


def _there_are(names: Iterable[str]) -> str:
    return f"there are {listed([*map(show, names)], NAMED)}"


class _RankReader:
    """Relates the values of a rank's graph to the source."""

    def __init__(
        self, training: TrainingGraph, document: RelationFile, mesh: Mesh, rank: int, graph: Graph, path: str, name: str
    ) -> None:
        self.training, self.mesh, self.rank, self.graph, self.path, self.name = training, mesh, rank, graph, path, name
        entry = next((entry for entry in document.ranks if entry.rank == rank), RankOverrides(rank=rank))
        self.inputs = {**(document.inputs or {}), **(entry.inputs or {})}
        self.outputs = {**(document.outputs or {}), **(entry.outputs or {})}
        self.pairs = {**(document.states or {}), **(entry.states or {})}
        self.states = training.state_of()
        self.readable = {**training.graph.initializers, **training.graph.inputs}
        """Values of the source that may be an input or a stored value of a rank."""

    def names(self, table: str) -> set[str]:
        """The values for a table of the relation."""
        graph = self.graph
        return {*graph.outputs} if table == "outputs" else {*graph.inputs, *graph.initializers}

    def read(self) -> RankRelation:
        """The parts of the source's values on the rank. Raises InputError."""
        states, inputs = [], dict[str, SourcePart]()
        for name in dict.fromkeys([*self.graph.inputs, *(key for key in self.inputs if key in self.names("inputs"))]):
            if name not in self.inputs and name not in self.readable:
                if name not in self.graph.initializers:
                    self._refuse_unrelated(name)
                continue
            part = self._part(f"inputs.{name}", name, self.inputs.get(name, InputRelation()), self.readable)
            pieces = part.pieces or (Piece(part.value, 0, self.training.graph.types[part.value].elements),)
            own = name in self.inputs and self.inputs[name].own is not None
            if own and part.value not in self.training.batch:
                raise InputError(
                    f"{self.name}: inputs.{name}: {show(part.value)} does not belong to the batch of the source: own "
                    "says nothing",
                    "leave own out; roles.batch says which inputs belong to the batch",
                )
            if any(piece.tensor in self.states for piece in pieces):
                states.append(self._state(name, pieces))
            elif name in self.graph.initializers and part.value not in self.training.graph.initializers:
                raise InputError(
                    f"{self.path} stores a value of {show(name)}, of which the source {show(part.value)} has none",
                    "store the value in the source too, or make it an input of the rank",
                )
            else:
                inputs[name] = part
        replaced = {state.output for state in states}
        outputs = {
            name: self._output(name, self.outputs.get(name, OutputRelation()))
            for name in self.graph.outputs
            if name not in replaced and (name in self.outputs or name in self.training.shown)
        }
        return RankRelation(self.rank, {"step": self.graph}, tuple(states), inputs, outputs)

    def _refuse_unrelated(self, name: str) -> NoReturn:
        raise InputError(
            f"{self.path} reads {show(name)}, which is no input of the source, and {self.name} does not say what it is",
            *filter(None, [did_you_mean(name, self.readable)]),
            f'write [inputs.{name}] with of = "NAME", a value of the source; {_there_are(self.readable)}',
        )

    def _part(
        self, where: str, name: str, entry: InputRelation | OutputRelation, values: Collection[str]
    ) -> SourcePart:
        """The part of the source's values behind a value of the rank."""
        value, where = entry.of or name, f"{self.name}: {where}"
        if sum(map(bool, (entry.split, entry.box, entry.pieces))) > 1:
            raise InputError(f"{where}: of split, box and pieces, one says which part it is", "keep one of them")
        for tensor in [piece.tensor for piece in entry.pieces] or [value]:
            if tensor not in values:
                raise InputError(
                    f"{where}: the source has no such value {show(tensor)}",
                    did_you_mean(tensor, values) or _there_are(values),
                )
        if entry.pieces:
            self._check_pieces(where, entry.pieces)
            self._check_type(where, name, TensorType("", (sum(piece.elements for piece in entry.pieces),)), value)
            return SourcePart(entry.pieces[0].tensor, entry.pieces)
        source = self.training.graph.types[value]
        box = entry.box or self._split(where, entry.split, source)
        if box is None:
            self._check_type(where, name, source, value)
            return SourcePart(value)
        piece = Piece(value, 0, box_elements(box), box)
        self._check_pieces(where, (piece,))
        self._check_type(where, name, TensorType(source.dtype, box_shape(box)), value)
        return SourcePart(value, (piece,))

    def _split(self, where: str, split: Sequence[str], source: TensorType) -> Box | None:
        """The rank's box of a value shared out along axes."""
        if not split:
            return None
        if not source.static or len(split) != len(source.dims):
            raise InputError(
                f"{where}: split has {len(split)} dimensions, the source's value is {source}",
                "write a text for each dimension, '' for one that a rank has whole",
            )
        box = []
        for axes, size in zip(split, source.dims):
            count = self._size(where, axes) if axes else 1
            if size % count:
                raise InputError(
                    f"{where}: {axes} has {count} members, which cannot share {size} out evenly",
                    "say in ranks which box each rank has",
                )
            index = self.mesh.index(axes, self.rank) if axes else 0
            box.append((index * size // count, (index + 1) * size // count))
        return tuple(box)

    def _size(self, where: str, axes: str) -> int:
        try:
            return self.mesh.size(axes)
        except OptionError as error:
            raise InputError(f"{where}: {error.message}", "name axes of its mesh, in their order") from None

    def _check_pieces(self, where: str, pieces: Sequence[Piece]) -> None:
        """Raise InputError for a piece beyond the tensor."""
        for piece in pieces:
            type = self.training.graph.types[piece.tensor]
            if not type.static:
                raise InputError(f"{where}: {show(piece.tensor)} is {type}: parts need a known shape", "fix the shapes")
            inside = piece.box is None or (
                len(piece.box) == len(type.dims)
                and all(
                    len(ends) % 2 == 0 and _ascend(ends) and ends[-1] <= size
                    for ends, size in zip(piece.box, type.dims)
                )
            )
            if not inside or not piece.start <= piece.stop <= prod(place_shape(piece.place, type.dims)):
                raise InputError(
                    f"{where}: the part is not inside of {show(piece.tensor)}, which is {type}",
                    "ranges ascend and end with the dimension; start and stop count elements",
                )

    def _check_type(self, where: str, name: str, due: TensorType, value: str) -> None:
        """Raise InputError for a value of the rank of another shape or, but for a state, another type."""
        type = self.graph.types.get(name)
        if type is None or type.shape is None:
            return
        flat = type.static and due.static and len(type.dims) == 1 and type.elements == due.elements
        fits = type.may_have_shape_of(due) or flat or (not due.dtype and type.elements == due.elements)
        alike = value in self.states or not due.dtype or type.dtype == due.dtype
        if not fits or not alike:
            raise InputError(
                f"{self.path}: {show(name)} is {type}, and by {where} it is {due} of {show(value)}",
                'say which part of it the rank has: split = ["", "AXIS"], with a mesh axis for a dimension that is '
                "shared out, or box = [[START, STOP], …]",
            )

    def _state(self, name: str, pieces: tuple[Piece, ...]) -> LocalState:
        tensors = {piece.tensor for piece in pieces}
        missing = next((tensor for tensor in tensors if tensor not in self.states), None)
        usual = self.states[pieces[0].tensor].updated if len(tensors) == 1 and missing is None else ""
        output = self.pairs.get(name, usual)
        if missing is not None or output not in self.graph.outputs:
            fault = f"{show(missing)} is no state" if missing else f"no output {show(output)} replaces {show(name)}"
            raise InputError(
                f"{self.path}: {fault}, and {show(name)} has pieces of states",
                f'write in {self.name} which output replaces it: states.{name} = "OUTPUT"; '
                + _there_are(self.graph.outputs),
            )
        copy = self.graph.types[name].dtype != self.training.graph.types[pieces[0].tensor].dtype
        return LocalState(name, output, pieces, copy=copy)

    def _output(self, name: str, entry: OutputRelation) -> SourcePart:
        where = f"{self.name}: outputs.{name}"
        part = self._part(f"outputs.{name}", name, entry, self.training.shown)
        if entry.sum and entry.mean:
            raise InputError(f"{where}: it is a sum and a mean", "keep one of them")
        over = entry.sum or entry.mean
        if over:
            self._size(where, over)
        return replace(part, how="sum" if entry.sum else "mean", over=tuple(over.split("+"))) if over else part


def _ascend(ends: Sequence[int]) -> bool:
    """Return whether ranges ascend and are apart; a single range may be empty."""
    return list(ends) == sorted(set(ends)) or (len(ends) == 2 and ends[0] == ends[1])


def _check_outputs(training: TrainingGraph, ranks: Sequence[RankRelation], mesh: Mesh, name: str) -> None:
    """Raise InputError for an output of the source on no rank, beside an output of a rank without a relation, and for
    terms on some ranks alone."""
    claimed = {part.value for rank in ranks for part in rank.outputs.values()}
    for rank in ranks:
        for output, part in rank.outputs.items():
            terms = [axis for axis in part.over if axis not in mesh.data_axes]
            members = mesh.members("+".join(terms), rank.rank) if terms else ()
            lacking = next((member for member in members if part not in ranks[member].outputs.values()), None)
            if lacking is not None:
                raise InputError(
                    f"{name}: outputs.{output} of rank {rank.rank} is a term of {show(part.value)}, and rank {lacking} "
                    "has no such term",
                    "say in outputs of the rank which of its outputs it is",
                )
    missing = [output for output in training.shown if output not in claimed]
    for rank in ranks:
        related = {*rank.outputs, *rank.next_inputs}
        unrelated = [output for graph in rank.graphs.values() for output in graph.outputs if output not in related]
        if missing and unrelated:
            raise InputError(
                f"no rank has the source's output {show(missing[0])}, and {name} does not say what "
                f"{show(unrelated[0])} of rank {rank.rank} is",
                f'write [outputs.{unrelated[0]}] with of = "{missing[0]}" where it is that',
            )


def _stored_claims(training: TrainingGraph, ranks: Sequence[RankRelation]) -> Iterator[Claim]:
    """Stored values of ranks beside the source's: constants, and start values of states."""
    apart: dict[tuple[str, str], list[ClaimMismatch]] = {}
    whole = {name: np.asarray(tensor.numpy()) for name, tensor in training.graph.initializers.items()}
    for rank in ranks:
        _gather_starts(rank, training, whole)
    for rank in ranks:
        stored = rank.graphs["step"].initializers
        parts = [("constant", name, part.pieces or (Piece(part.value, 0, training.graph.types[part.value].elements),))
                 for name, part in rank.inputs.items()]  # fmt: skip
        parts += [("start value", state.input, state.pieces) for state in rank.states if not state.copy]
        for kind, name, pieces in parts:
            if name not in stored or any(piece.tensor not in whole for piece in pieces):
                continue
            different = apart.setdefault((kind, name), [])
            actual = np.asarray(stored[name].numpy()).reshape(-1)
            due = np.concatenate([cut(piece, whole[piece.tensor]) for piece in pieces])
            unequal = np.flatnonzero(bits(actual) != bits(due.astype(actual.dtype)))
            if unequal.size:
                element = int(unequal[0]) // actual.itemsize
                example = CounterExample(element, float(actual[element]), float(due[element]))
                due_text = ", ".join(map(_piece_text, pieces))
                different.append(ClaimMismatch(rank.rank, 1, name, "other numbers", due_text, example))
    for (kind, name), different in apart.items():
        mismatch = replace(different[0], ranks=len(different)) if different else None
        yield Claim(name, kind, ProofVerdict.DIFFERENT if different else ProofVerdict.PROVEN, mismatch)


def _gather_starts(rank: RankRelation, training: TrainingGraph, whole: dict[str, np.ndarray]) -> None:
    """Put start values of a rank into tensors without a value in the source."""
    stored, missing = rank.graphs["step"].initializers, training.state_of().keys() - training.graph.initializers
    for state in (state for state in rank.states if state.input in stored and not state.copy):
        flat, position = np.asarray(stored[state.input].numpy()).reshape(-1), 0
        for piece in state.pieces:
            if piece.tensor in missing:
                type = training.graph.types[piece.tensor]
                tensor = whole.setdefault(piece.tensor, np.zeros(type.dims, flat.dtype))
                put(tensor, piece.place, flat[position : position + piece.elements], piece.start)
            position += piece.elements


def _piece_text(piece: Piece) -> str:
    """A piece in words."""
    if piece.box is not None:
        ranges = ("+".join(f"{start}:{stop}" for start, stop in ranges_of(ends)) for ends in piece.box)
        return f"{piece.tensor}[{', '.join(ranges)}]"
    return f"elements {piece.start} to {piece.stop} of {piece.tensor}"
