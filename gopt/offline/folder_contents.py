"""Reads an output folder or a checkpoint: the source, and the current value of each state, in pieces.

A value is a list of byte ranges in the ranks' files, not kept in memory. Files of a checkpoint are read once, in
blocks, for their digests."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx

from gopt.analysis.role_map import RoleMap
from gopt.analysis.training import StateKind
from gopt.api import Source, alone, load_stored_source, stored_roles
from gopt.api import load as load_source
from gopt.artifact.checkpoint_index import (
    INDEX_FILE,
    check_states_file,
    open_index,
    rank_states_file,
    read_index,
)
from gopt.artifact.graph_check import check_rank, check_source
from gopt.artifact.integrity import FileEntry, check_files
from gopt.artifact.manifest import MANIFEST_FILE, Manifest
from gopt.artifact.manifest_check import check_graphs, read_manifest
from gopt.artifact.manifest_entries import LocalState, RankEntry
from gopt.artifact.pass_facts import SplitFacts, SplitSettings, split_records
from gopt.artifact.path_diagnostics import check_folder
from gopt.artifact.pieces import Place, place_shape, put
from gopt.artifact.report_check import read_report
from gopt.artifact.report_record import REPORT_FILE, Report
from gopt.artifact.table_parts import drawn_tables
from gopt.errors import InputError, OptionError, RunError
from gopt.importers.load import holds_step
from gopt.ir.external_data import load_state
from gopt.ir.graph import Graph
from gopt.ir.load import load
from gopt.ir.opaque.expand import expand
from gopt.ir.tensor import Tensor
from gopt.ir.twin_files import TwinFiles
from gopt.ir.types import TensorType, numpy_dtype
from gopt.offline.part_order import check_part_order
from gopt.passes.base import dashed
from gopt.passes.pipeline import build_pipeline
from gopt.records.boxes import in_grid, rows_of
from gopt.records.mesh import Mesh
from gopt.text.amounts import rank_ranges
from gopt.text.sanitize import show

StoredPieces = Mapping[str, Mapping[Place, Mapping[int, Tensor]]]
"""State -> place -> first element there -> the stored elements."""

_AGAIN = "write the folder again with gopt shard or gopt split"
_EDITED = "the manifest was edited: write the folder again"


@dataclass(slots=True)
class FolderContents:
    """The source graph with the ranks' values, the roles, the manifest and the report."""

    graph: Graph
    roles: RoleMap
    manifest: Manifest
    report: Report
    missing: list[str]
    """States without a value."""
    trained: bool
    """Whether the values come from a checkpoint."""
    startup: Graph | None = None
    """The source's start-up graph; None for a checkpoint, whose values it would replace."""
    pieces: StoredPieces = field(default_factory=dict)
    """The stored ranges that make each value of ``graph``."""


def read_folder(path: str | os.PathLike[str]) -> FolderContents:
    """Read an output folder, or one step of a checkpoint; raises InputError for a missing or different part, RunError
    for a damaged checkpoint."""
    folder, home = Path(path), _home(path)
    checkpoint = home != folder
    manifest, mesh = read_manifest(home)
    check_files(home, manifest.files)
    report = read_report(home, manifest)
    if checkpoint and manifest.parameter_server is not None:
        manifest = open_index(folder).of_run(manifest)  # its trainers may be others than the file's
    _check_pipeline(home, report, manifest, mesh)
    source = home / "source.onnx"
    if not source.is_file():
        raise InputError(f"{home} has no {source.name}", _AGAIN)
    graph = load(source, own=True)
    roles = stored_roles(graph, source)
    check_source(manifest, graph, home)
    tensors = _tensors(folder, manifest, checkpoint)
    pieces = stored_pieces(manifest, tensors)
    types = {name: graph.types[name] for name in graph.inputs}  # every state is an input of the kept source
    values = put_together(manifest, types, pieces)
    if not checkpoint:
        check_part_order(_states(manifest, tensors))
    if not checkpoint and manifest.parameter_server is not None:
        values |= drawn_tables(manifest.parameter_server, graph)
    _check_complete(home, manifest, values)
    missing = [state.tensor for state in manifest.states if state.tensor not in values]
    whole = replace(_without_own_metadata(graph), initializers={**graph.initializers, **values})
    startup = None if checkpoint or manifest.startup is None else _startup(home / manifest.startup)
    whole_pieces = {name: pieces[name] for name in values if name in pieces}
    return FolderContents(whole, roles, manifest, report, missing, checkpoint, startup, whole_pieces)


def _startup(path: Path) -> Graph:
    if not path.is_file():
        raise InputError(f"there is no file {path}", "shard again, or copy it here")
    return _without_own_metadata(load(path, own=True))


def folder_records(folder: Path) -> tuple[Manifest, Report]:
    """Manifest and report of an output folder; the ranks' graphs are compared with their digests. Raises InputError."""
    check_folder(folder)
    manifest, _ = read_manifest(folder)
    check_graphs(folder, manifest)
    return manifest, read_report(folder, manifest)


def _without_own_metadata(graph: Graph) -> Graph:
    """The graph without gopt's metadata entries."""
    header = onnx.ModelProto()
    header.CopyFrom(graph.header)
    entries = [entry for entry in header.metadata_props if not entry.key.startswith("gopt.")]
    del header.metadata_props[:]
    header.metadata_props.extend(entries)
    metadata = {key: value for key, value in graph.metadata.items() if not key.startswith("gopt.")}
    return replace(graph, header=header, metadata=metadata)


def kept_source(contents: FolderContents) -> Source:
    """The source with the values of a folder's ranks; raises InputError where roles do not fit."""
    training = load_stored_source(expand(contents.graph), contents.roles, "the kept source")
    source = contents.report.source
    return Source(training, source.file, source.sha256, source.nbytes, startup=contents.startup)


def step_at(path: str | os.PathLike[str]) -> Source:
    """The step of an output folder or a checkpoint, with the ranks' values, or of a file or a folder of artifacts;
    raises as ``read_folder`` and ``gopt.load``."""
    folder = Path(path)
    of_gopt = any((folder / name).is_file() for name in (INDEX_FILE, MANIFEST_FILE))
    if folder.is_file() or (not of_gopt and holds_step(folder)):
        return alone(lambda roles: load_source(folder, roles=roles))
    return kept_source(read_folder(path))


def read_mesh(path: str | os.PathLike[str]) -> Mesh:
    """The mesh of an output folder or a checkpoint; raises InputError."""
    return read_manifest(_home(path))[1]


def _home(path: str | os.PathLike[str]) -> Path:
    """Return the folder with the manifest: for a checkpoint, the parent."""
    folder = Path(path)
    check_folder(folder, checkpoints=True)
    if not (folder / INDEX_FILE).is_file():
        return folder
    follow = folder.name in ("", "..") or folder.is_symlink()
    return (Path(os.path.realpath(folder)) if follow else folder).parent


def _check_pipeline(home: Path, report: Report, manifest: Manifest, mesh: Mesh) -> None:
    """Refuse a report with passes that cannot have made these ranks, or with unknown options; raises InputError."""
    split = split_records(report.pipeline)
    if split is not None or manifest.parameter_server is not None:
        _check_split(home, split, manifest)
        return
    items = [(entry.name, dashed(entry.options)) for entry in report.pipeline]
    try:
        build_pipeline(items)
    except OptionError as error:
        raise InputError(f"{home / REPORT_FILE}: pipeline: {error.message}", *error.hints) from None
    needed = {"shard"} if mesh.data_ranks > 1 or manifest.accumulate > 1 else set()
    if mesh.data_ranks > 1 and any(state.kind is StateKind.STATISTIC for state in manifest.states):
        needed.add("statistics")
    for name in sorted(needed - {name for name, _ in items}):
        raise InputError(f"{home / REPORT_FILE}: pipeline: it lacks {name}, which these ranks need", _AGAIN)


def _check_split(home: Path, split: tuple[SplitSettings, SplitFacts] | None, manifest: Manifest) -> None:
    """Refuse a report of other trainers and servers than the manifest's; raises InputError."""
    entry = manifest.parameter_server
    counts = None if entry is None else (entry.servers, entry.mode.value, manifest.accumulate)
    recorded = None if split is None else (split[0].servers, split[0].mode, split[0].accumulate)
    if counts != recorded:
        raise InputError(f"{home / REPORT_FILE}: pipeline: the manifest has other trainers and servers", _AGAIN)


def _check_complete(home: Path, manifest: Manifest, values: Mapping[str, Tensor]) -> None:
    """Raise InputError if ranks with states are missing in a folder."""
    present = {rank.rank for rank in manifest.ranks}
    total = manifest.total_ranks
    if len(present) == total or all(state.tensor in values for state in manifest.states):
        return
    lost = [rank for rank in range(total) if rank not in present]
    name = next(state.tensor for state in manifest.states if state.tensor not in values)
    raise InputError(
        f"{home} holds {len(present)} of {total} ranks: {'rank' if len(lost) == 1 else 'ranks'} "
        f"{rank_ranges(lost)} {'is' if len(lost) == 1 else 'are'} missing, with the values of {show(name)} and others",
        "shard without --only-ranks",
    )


def _tensors(folder: Path, manifest: Manifest, checkpoint: bool) -> list[tuple[int, Mapping[str, Tensor]]]:
    """The stored values of every rank."""
    files = read_index(folder, manifest, manifest.run).files if checkpoint else {}
    holders = _holders(manifest, files)
    if checkpoint and manifest.parameter_server is not None:
        _check_trainers(folder, manifest, holders[0], files)
    twins = TwinFiles("gopt.rank")
    return [
        (rank.rank, _checkpointed(folder, rank, files) if checkpoint else _written(folder, manifest, rank, twins))
        for rank in holders
    ]


def _states(
    manifest: Manifest, tensors: Iterable[tuple[int, Mapping[str, Tensor]]]
) -> Iterator[tuple[int, LocalState, Tensor]]:
    """Each rank's states with their values. Raises InputError for a value of another size than its pieces."""
    ranks = {rank.rank: rank for rank in manifest.ranks}
    for number, stored in tensors:
        for state in manifest.states_of(ranks[number]):
            if state.copy or state.input not in stored:
                continue
            tensor = stored[state.input]
            if tensor.type.elements != state.elements:
                what = f"{show(state.input)} is {tensor.type}, its pieces have another number of elements"
                raise InputError(f"rank {number}: {what}", _EDITED)
            yield number, state, tensor


def stored_pieces(manifest: Manifest, tensors: Iterable[tuple[int, Mapping[str, Tensor]]]) -> StoredPieces:
    """The pieces of every state among the ranks' ``tensors``; replicas are read on the first rank. Raises InputError
    for pieces of another size."""
    pieces: dict[str, dict[Place, dict[int, Tensor]]] = {}
    for _, state, tensor in _states(manifest, tensors):
        start = 0
        for piece in state.pieces:
            inside = pieces.setdefault(piece.tensor, {}).setdefault(piece.place, {})
            if piece.start not in inside:
                inside[piece.start] = tensor.flat_slice(start, start + piece.elements)
            start += piece.elements
    return pieces


def put_together(manifest: Manifest, types: Mapping[str, TensorType], pieces: StoredPieces) -> dict[str, Tensor]:
    """The value of every state with all pieces; ``types``: of states, in the order of the result. Raises InputError for
    pieces that make no tensor."""
    values = {}
    for name, type in types.items():
        if (parts := pieces.get(name)) is None:
            continue
        count = sum(piece.type.elements for inside in parts.values() for piece in inside.values())
        if len(manifest.ranks) == manifest.total_ranks or count >= type.elements:
            values[name] = _put_together(name, type, parts)
    return values


def _holders(manifest: Manifest, files: Collection[str]) -> Sequence[RankEntry]:
    """The ranks with relevant values: of trainers, which have the same states, the first in a checkpoint."""
    if manifest.parameter_server is None:
        return manifest.ranks
    trainers = [rank.rank for rank in manifest.ranks if rank.role != "server"]
    chief = next((rank for rank in trainers if rank_states_file(rank) in files), 0)
    return [rank for rank in manifest.ranks if rank.rank == chief or rank.role == "server"]


def _check_trainers(folder: Path, manifest: Manifest, chief: RankEntry, files: Mapping[str, FileEntry]) -> None:
    """Refuse files of the other trainers that are damaged, lack a local state, or have another value of a common state;
    raises RunError."""
    counts = _checkpointed(folder, chief, files)
    for rank in manifest.ranks[: manifest.mesh.ranks]:
        if rank.rank == chief.rank or rank_states_file(rank.rank) not in files:
            continue
        stored = _checkpointed(folder, rank, files)
        for state in manifest.states_of(rank):
            wanted, actual = counts.get(state.input), stored.get(state.input)
            what = ""
            if actual is None:
                what = "has no value" if state.local and wanted is not None else ""
            elif wanted is None or actual.type != wanted.type:
                what = f"has {actual.type}, and {rank_states_file(chief.rank)} {wanted and wanted.type},"
            elif not state.local and actual.numpy().tobytes() != wanted.numpy().tobytes():
                what = f"has another value than {rank_states_file(chief.rank)}"
            if what:
                raise RunError(
                    f"checkpoint {folder}: {rank_states_file(rank.rank)} {what} of {show(state.input)}",
                    f"remove {folder} to continue from the one before",
                )


def _put_together(name: str, type: TensorType, parts: Mapping[Place, Mapping[int, Tensor]]) -> Tensor:
    """A tensor from pieces, by place and start inside; raises InputError where pieces do not tile the tensor."""
    if not _tiled(parts.keys(), type):
        raise InputError(
            f"the pieces of {name} do not tile it: their boxes or rows omit or repeat elements of {type}",
            _EDITED,
        )
    whole = {row: _inside(name, type, row, inside) for row, inside in parts.items()}
    if (None, None) in whole:
        return whole[None, None]
    rows = {rows_of(box, type.dims): tensor for (box, _), tensor in whole.items() if box is not None}
    if rows and None not in rows:
        return Tensor(type, parts=tuple(rows[row] for row in sorted(filter(None, rows))))

    def read() -> np.ndarray:
        array = np.empty(type.dims, numpy_dtype(type.dtype))
        for row, tensor in whole.items():
            put(array, row, tensor.numpy().reshape(-1), 0)
        return array

    return Tensor(type, reader=read)


def _tiled(rows: Collection[Place], type: TensorType) -> bool:
    """Return whether places tile a tensor: all rows dealt out by one step, or a grid of boxes."""
    dealt = [every for box, every in rows if every is not None and box is None]
    if dealt:
        step = dealt[0][1]
        return type.static and len(dealt) == len(rows) and sorted(dealt) == [(start, step) for start in range(step)]
    if any(every for _, every in rows):
        return False
    return in_grid({box for box, _ in rows}, type.dims if type.static else ())


def _inside(name: str, type: TensorType, within: Place, pieces: Mapping[int, Tensor]) -> Tensor:
    """Return the elements of a box, or of some rows, from pieces by start."""
    whole, expected = type if within == (None, None) else TensorType(type.dtype, place_shape(within, type.dims)), 0
    for start in sorted(pieces):
        part = pieces[start].type
        if start != expected or part.dtype != type.dtype:
            raise InputError(f"the pieces of {name} do not tile it: {part} at {start}, expected at {expected}", _EDITED)
        expected += part.elements
    if expected != whole.elements:
        raise InputError(
            f"the pieces of {name} end at {expected} of {whole.elements}: a rank is missing",
            "shard without --only-ranks",
        )
    if len(pieces) == 1:
        return replace(next(iter(pieces.values())), type=whole)
    return Tensor(whole, parts=tuple(pieces[start] for start in sorted(pieces)))


def _written(folder: Path, manifest: Manifest, rank: RankEntry, twins: TwinFiles) -> dict[str, Tensor]:
    """Initial values referred to by a rank's files."""
    graphs = {}
    for phase, file in rank.files.items():
        path = folder / Path(file).name
        if not path.is_file():
            raise InputError(f"rank {rank.rank} has no file {path}", "copy it here, or write the folder again")
        graphs[phase] = twins.load(path)
    check_rank(manifest, rank, graphs, folder)
    return {name: tensor for graph in graphs.values() for name, tensor in graph.initializers.items() if tensor.path}


def _checkpointed(folder: Path, rank: RankEntry, files: Mapping[str, FileEntry]) -> Mapping[str, Tensor]:
    path = folder / rank_states_file(rank.rank)
    check_states_file(path, files.get(path.name))
    return load_state(path)
