"""The output folder of a split: one file for all trainers, one for each server, values once, manifest and report."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from gopt.analysis.coupling.samples_axis import samples_axis
from gopt.artifact.integrity import Inventory
from gopt.artifact.manifest import MANIFEST_FILE, Manifest
from gopt.artifact.manifest_builder import common_entry, local_accumulators, local_state, source_states
from gopt.artifact.manifest_entries import LocalState, MeshEntry, PhaseEntry, RankEntry
from gopt.artifact.output_folder import output_folder
from gopt.artifact.pieces import cut_stored
from gopt.artifact.ranks import RankFiles, write_ranks
from gopt.artifact.report_record import Report, SourceEntry
from gopt.artifact.serialize import SOURCE_FILE, model_bytes, without_values
from gopt.artifact.startup_graphs import StartupFile, with_startup, write_startup
from gopt.artifact.states_file import INLINE, STATES_FILE, StatesFile
from gopt.artifact.table_parts import part_piece
from gopt.ir.graph import Graph
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.lower.rank_graph import RankState
from gopt.parameter_server.report import build_split_report
from gopt.parameter_server.split import SplitStep
from gopt.records.tables import TableLayout
from gopt.system import background
from gopt.system.files import write_new
from gopt.system.progress import ProgressCallback, no_progress

TRAINER_FILES = RankFiles("trainer", alone=True)
SERVER_FILES = RankFiles("server")


def split_manifest(split: SplitStep, startup: Graph | None = None) -> Manifest:
    """Return the manifest of a split: ranks 0 to T-1 are trainers, the servers follow. ``startup``: the start-up graph
    of the source."""
    training, options = split.training, split.options
    phases = [part.phase for part in split.trainer_graphs.ranks]
    many = len(phases) > 1
    manifest = Manifest(
        accumulate=options.accumulate,
        phases=tuple(PhaseEntry(phase.name, phase.times) for phase in phases) if many else None,
        loss_reduction=str(options.loss_reduction),
        mesh=MeshEntry((("dp", options.trainers),), options.trainers),
        parameter_server=split.entry(),
        source=SOURCE_FILE,
        loss=training.loss,
        samples_axis=samples_axis(training),
        more_losses=training.losses[1:],
        states=source_states(training),
        common=common_entry(training, ()),
        ranks=tuple(_entries(split)),
    )
    return manifest if startup is None else with_startup(manifest, list(_startup_files(split, startup)))


def _entries(split: SplitStep) -> Iterator[RankEntry]:
    graphs = split.trainer_graphs
    files = {part.phase.name: TRAINER_FILES.of(0, part.phase) for part in graphs.ranks}
    sums = local_accumulators(graphs.ranks[0])
    local = [replace(state, copy=_served(split, state)) for state in graphs.common]
    states = tuple(map(local_state, local))
    for trainer in range(split.options.trainers):
        yield RankEntry(trainer, "trainer", files, states, sums)
    shared = tuple(map(local_state, split.server_graphs.common))
    for part in split.server_graphs.ranks:
        number = split.options.trainers + part.rank
        owned = tuple(_table_state(split, state) or local_state(state) for state in part.states)
        yield RankEntry(number, "server", {part.phase.name: SERVER_FILES.of(part.rank, part.phase)}, (*shared, *owned))


def _startup_files(split: SplitStep, startup: Graph) -> Iterator[StartupFile]:
    """Yield the start-up graphs of trainers, and of each server; rows from a seed are in none."""
    drawn = {name for served in split.plan.tables.served for name in served.init}
    trainers, common = range(split.options.trainers), split.server_graphs.common
    local = [state for state in split.trainer_graphs.common if split.sync is not None or not _served(split, state)]
    yield StartupFile.of(startup, "trainer.startup.onnx", trainers, {"gopt.role": "trainer"}, local)
    parts = {name: part_piece(layout, "", server) for name, (layout, server) in split.table_states.items()}
    for part in split.server_graphs.ranks:
        states = [state for state in part.states if state.pieces and state.pieces[0].tensor not in drawn]
        pieces = {
            state.input: replace(parts[state.input], tensor=state.pieces[0].tensor)
            for state in states if state.input in parts
        }  # fmt: skip
        name, metadata = f"server_{part.rank:04d}.startup.onnx", {"gopt.role": "server", "gopt.server": str(part.rank)}
        yield StartupFile.of(startup, name, [len(trainers) + part.rank], metadata, [*common, *states], pieces)


def _served(split: SplitStep, state: RankState) -> bool:
    return state.pieces[0].tensor in split.placement.served


def _table_state(split: SplitStep, state: RankState) -> LocalState | None:
    """Return the record of a state of a table's part, else None."""
    layout = split.table_states.get(state.input)
    if layout is None:
        return None
    piece = part_piece(layout[0], state.pieces[0].tensor, layout[1])
    return LocalState(state.input, state.output, (piece,))


def write_split(
    split: SplitStep,
    folder: str | os.PathLike[str],
    source: SourceEntry,
    roles: str,
    startup: Graph | None = None,
    *,
    force: bool,
    advance: ProgressCallback = no_progress,
) -> Report:
    """Write the folder, whole or not at all; returns the report. ``roles``: the roles as metadata of the source;
    ``startup``: its start-up graph.

    Raises OptionError, RunError and StoppedError as ``output_folder`` does.
    """
    advance("building the report")
    values = _plan_states(split)
    task = background.begin(lambda: _source(split, values, roles), len(split.training.graph.nodes))
    report = build_split_report(split, source)
    advance("writing values and trainers")
    with output_folder(Path(folder), force=force) as staged:
        files = Inventory(staged)
        values.write(files)
        trainers, servers = split.trainer_graphs, split.server_graphs
        local = values if split.sync is not None else values.without(split.placement.served)
        for program, parts in split.trainer_files():
            write_ranks(files, program, local, trainers.common, parts, TRAINER_FILES)
        write_ranks(files, split.servers, values, servers.common, servers.ranks, SERVER_FILES, advance)
        if startup is not None:
            types = split.training.graph.types
            write_startup(files, startup, types, values, _startup_files(split, startup))
        with files.create(SOURCE_FILE) as file:
            file.write(task.result())
        report.write(files)
        manifest = replace(split_manifest(split, startup), files=files.files)
        write_new(staged / MANIFEST_FILE, manifest.text().encode())
    return report


def _source(split: SplitStep, values: StatesFile, roles: str) -> bytes:
    """Return the source without the states' values."""
    metadata = {"gopt.format": "gopt-source/1", "gopt.roles": roles}
    return model_bytes(without_values(split.training), values.offset, STATES_FILE, metadata)


def _plan_states(split: SplitStep) -> StatesFile:
    """Return the layout of the states file: states of each server, then local states, then large constants."""
    source = split.training.graph.initializers
    values = StatesFile()
    stored: set[str] = set()
    drawn = {name for served in split.plan.tables.served for name in served.init}
    states_kept: list[RankState] = [*split.server_graphs.common]
    states_kept += [state for part in split.server_graphs.ranks for state in part.states]
    states_kept += [state for state in split.trainer_graphs.common if not _served(split, state)]
    if split.sync is not None:  # trainers have all states, and servers parts of them
        states_kept = [state for state in split.trainer_graphs.common if state.input in source]
    for state in states_kept:
        if state.input in stored or any(piece.tensor not in source or piece.tensor in drawn for piece in state.pieces):
            continue
        stored.add(state.input)
        part = split.table_states.get(state.input)
        tensor = _value(state, source) if part is None else _table_value(state, source[state.pieces[0].tensor], *part)
        values.add([(state.input, tensor)])
    states = {state.tensor for state in split.training.states}
    for name, tensor in source.items():
        if name not in states and name not in stored and tensor.nbytes > INLINE:
            values.add([(name, tensor)])
    return values


def _value(state: RankState, source: dict[str, Tensor]) -> Tensor:
    """Return the start value of a state: pieces, concatenated."""
    if len(state.pieces) == 1 and state.type == source[state.pieces[0].tensor].type:
        return source[state.pieces[0].tensor]
    parts = tuple(_part(source[piece.tensor], piece.start, piece.stop) for piece in state.pieces)
    return Tensor(state.type, parts=parts)


def _table_value(state: RankState, tensor: Tensor, layout: TableLayout, server: int) -> Tensor:
    """Return the start value of a table's part."""
    piece = part_piece(layout, state.pieces[0].tensor, server)
    if piece.place == (None, None):
        return _part(tensor, piece.start, piece.stop)
    return Tensor(state.type, reader=lambda: cut_stored(piece, tensor).reshape(state.type.dims))


def _part(tensor: Tensor, start: int, stop: int) -> Tensor:
    type = TensorType(tensor.type.dtype, (stop - start,))
    if tensor.path:
        return tensor.flat_slice(start, stop)
    return Tensor(type, reader=lambda: np.ascontiguousarray(np.asarray(tensor.read()).reshape(-1)[start:stop]))
