"""The relation of an output folder: the manifest and the files of all ranks."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from gopt.analysis.training import TrainingGraph
from gopt.artifact.graph_check import CheckedRanks, check_rank
from gopt.artifact.integrity import check_files
from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_check import check_all_ranks, read_manifest
from gopt.artifact.manifest_entries import RankEntry
from gopt.artifact.path_diagnostics import check_folder
from gopt.artifact.pieces import Piece
from gopt.errors import InputError
from gopt.ir.alike_files import AlikeFiles
from gopt.ir.graph import Graph
from gopt.ir.opaque.expand import expand
from gopt.records.boxes import box_elements
from gopt.records.mesh import Mesh
from gopt.runtime.inlined_functions import inlined
from gopt.runtime.step_runs import check_schedule
from gopt.system.garbage import gc_paused
from gopt.system.progress import ProgressCallback, no_progress
from gopt.verification.folder_check import check_roles, check_starts
from gopt.verification.message_rounds import check_rounds
from gopt.verification.proof.relation import BY_NUMBERS, ProofRelation, RankRelation, SourcePart, check_versions
from gopt.verification.proof.rounds import check_tables
from gopt.verification.rank_programs import Held, RankPrograms, joined, load_rank, start_values
from gopt.verification.verify import source_training

Peers: TypeAlias = Mapping[int, Mapping[str, int]]
_AGAIN = "a file of the folder was edited: write the folder again"


def folder_relation(folder: str | os.PathLike[str], advance: ProgressCallback = no_progress) -> ProofRelation:
    """Read a folder. Raises InputError for a missing file, a contradiction to the manifest, or different start values
    of a state; UnsupportedError for trainers and servers."""
    home = Path(folder)
    check_folder(home)
    manifest, mesh = read_manifest(home)
    check_files(home, manifest.files)
    if manifest.parameter_server is not None:
        check_rounds(manifest.parameter_server)
    check_all_ranks(manifest, home)
    check_schedule(home, manifest, mesh)
    advance("reading the source")
    training, _ = source_training(home, None, manifest, mesh)
    check_roles(manifest, training, home)
    return ranks_relation(home, manifest, training, mesh, advance)


def ranks_relation(
    folder: Path, manifest: Manifest, training: TrainingGraph, mesh: Mesh, advance: ProgressCallback = no_progress,
    peers: Peers = MappingProxyType({}),
) -> ProofRelation:  # fmt: skip
    """The relation of the files of ranks in a folder to the source by a manifest; ``peers``: of ranks that share files,
    phase -> the rank with the peers in the file. Raises InputError."""
    with gc_paused():
        ranks = tuple(_ranks(folder, manifest, training, advance, peers))
    if manifest.parameter_server is not None:
        check_tables(manifest.parameter_server, ranks[0].graphs)
    return ProofRelation(
        training=training, mesh=mesh, ranks=ranks, schedule=manifest.schedule, accumulate=manifest.accumulate,
        loss_reduction=manifest.loss_reduction, reduce_dtype=manifest.reduce_dtype, statistics=manifest.statistics,
        reductions=manifest.reductions,
        synchronised=manifest.synchronised, plan=manifest.parameter_server,
        remedy=_AGAIN, instead=BY_NUMBERS,
    )  # fmt: skip


def _rank_relation(
    manifest: Manifest, training: TrainingGraph, entry: RankEntry, graphs: Mapping[str, Graph]
) -> RankRelation:
    """The graphs of a rank by phase, and parts of the source's values by the manifest's entry."""
    settings = {name: SourcePart(name) for name in training.hyper}
    if entry.role == "server":  # it sees no batch
        return RankRelation(entry.rank, graphs, manifest.states_of(entry), settings, {}, entry.accumulators)
    fed = {part.input: Piece(part.input, 0, box_elements(part.box), part.box) for part in entry.fed}
    inputs = {name: SourcePart(name) for name in training.batch} | settings
    inputs |= {name: SourcePart(name, (piece,)) for name, piece in fed.items()}
    outputs = {name: SourcePart(name) for name in training.shown}
    saved = tuple(value.name for value in entry.saved)
    return RankRelation(entry.rank, graphs, manifest.states_of(entry), inputs, outputs, entry.accumulators, saved)


def _ranks(
    folder: Path, manifest: Manifest, training: TrainingGraph, advance: ProgressCallback, peers: Peers
) -> list[RankRelation]:
    """The graphs of all ranks, and parts of the source's values."""
    ranks, programs, loaded = [], [], []
    arrays: Held = {}
    files: Mapping[str, str] = {}
    alike, plain, checked = AlikeFiles(), set[int](), CheckedRanks()
    shared = _SharedFiles(folder, manifest, training, alike, peers)
    for number, entry in enumerate(manifest.ranks, 1):
        if entry.rank in peers:
            ranks.append(shared.rank(entry))
            advance("reading ranks", number, len(manifest.ranks))
            continue
        if entry.files != files:  # trainers have one file
            graphs, files = load_rank(folder, entry, list(manifest.schedule), alike.load), entry.files
            written = {phase: _opened(graph, plain) for phase, graph in graphs.items()}
        loaded.append(graphs)  # the parts that were checked are known by identity
        check_rank(manifest, entry, graphs, folder, checked)
        for graph in graphs.values():
            check_versions(graph, f"a file of rank {entry.rank}", training.graph, _AGAIN)
        ranks.append(_rank_relation(manifest, training, entry, written))
        programs.append(RankPrograms({}, ranks[-1].states, (), start_values(graphs, arrays), entry))
        _check_sums(entry, programs[-1])
        advance("reading ranks", number, len(manifest.ranks))
    stored = joined(programs, "input", [rank.values for rank in programs], training.graph.types)
    check_starts(programs, stored, folder)
    return ranks


class _SharedFiles:
    """Ranks by files of several ranks. gopt has just written the files: they are read without a check for edits."""

    def __init__(
        self, folder: Path, manifest: Manifest, training: TrainingGraph, files: AlikeFiles, peers: Peers
    ) -> None:
        self.folder, self.manifest, self.training, self.peers = folder, manifest, training, peers
        self._read = cache(lambda path: inlined(expand(files.load(path))))
        self._alike: dict[Hashable, RankRelation] = {}

    def rank(self, entry: RankEntry) -> RankRelation:
        """The relation of a rank; ranks with the same pieces share all records."""
        key = tuple(entry.files.items()), id(entry.state), id(entry.accumulators), id(entry.saved), entry.fed
        if key not in self._alike:
            graphs = load_rank(self.folder, entry, list(self.manifest.schedule), self._read)
            self._alike[key] = _rank_relation(self.manifest, self.training, entry, graphs)
        return replace(self._alike[key], rank=entry.rank, peers=self.peers[entry.rank])


def _opened(graph: Graph, plain: set[int]) -> Graph:
    """A graph without opaque operators and functions; ``plain``: the ids of lists of nodes that have none."""
    if id(graph.nodes) in plain:
        return graph
    result = inlined(expand(graph))
    if result is graph:
        plain.add(id(graph.nodes))
    return result


def _check_sums(entry: RankEntry, rank: RankPrograms) -> None:
    """Raise InputError for an accumulator with a start value other than zero."""
    sums = {accumulator.input for accumulator in entry.accumulators}
    if any(value.any() for name, value in rank.values.items() if name in sums):
        raise InputError(
            f"rank {entry.rank} has an accumulator that does not start at zero",
            _AGAIN,
        )
