"""The relation of rank files of another tool, by a relation file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gopt.analysis.role_map import RoleMap
from gopt.analysis.roles import carried_states, trained_outputs
from gopt.analysis.source_collectives import adopt_source_collectives
from gopt.analysis.training import TrainingGraph
from gopt.artifact.pieces import Piece, cut, put
from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.importers.load import load_step
from gopt.ir.graph import Graph
from gopt.ir.opaque.expand import expand
from gopt.records.boxes import ranges_of
from gopt.records.mesh import Mesh, axis_kinds
from gopt.runtime.inlined_functions import inlined
from gopt.runtime.memory import bits
from gopt.system.garbage import gc_paused
from gopt.system.progress import ProgressCallback, no_progress
from gopt.text.sanitize import show
from gopt.verification.proof.rank_collectives import load_rank
from gopt.verification.proof.rank_reader import RankReader, check_known
from gopt.verification.proof.relation import ProofRelation, RankRelation, check_versions
from gopt.verification.proof.relation_file import (
    RelationFile,
    read_relation,
)
from gopt.verification.proof.result import Claim, ClaimMismatch, CounterExample, ProofVerdict

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
            readers.append(RankReader(training, document, mesh, rank, graph, path, name))
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


def _check_keys(document: RelationFile, readers: Sequence[RankReader], name: str) -> None:
    """Raise InputError for an entry of a table about no rank's value."""
    tables = {"inputs": document.inputs, "outputs": document.outputs, "states": document.states}
    for table, entries in tables.items():
        names = {key for reader in readers for key in reader.names(table)}
        check_known(entries or {}, names, f"{name}: {table}", "no rank has such a value")
    for entry in document.ranks:
        reader = readers[entry.rank]
        for table in tables:
            where = f"{name}: {table} of rank {entry.rank}"
            check_known(getattr(entry, table) or {}, reader.names(table), where, f"{reader.path} has no such value")


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
