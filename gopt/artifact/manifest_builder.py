"""The manifest of a sharded step (contract section 4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gopt.analysis.coupling.samples_axis import samples_axis
from gopt.analysis.training import TrainingGraph
from gopt.artifact.manifest import Manifest, Piece
from gopt.artifact.manifest_entries import (
    CommonEntry,
    FedInput,
    InputEntry,
    InputKind,
    LocalAccumulator,
    LocalState,
    MeshEntry,
    OutputEntry,
    PhaseEntry,
    PipelineEntry,
    RankEntry,
    SavedValue,
    SourceState,
)
from gopt.artifact.ranks import rank_file
from gopt.artifact.serialize import SOURCE_FILE
from gopt.lower.rank_graph import RankGraph, RankState
from gopt.spmd.program import SpmdProgram
from gopt.spmd.stage_plan import SCHEDULE_FILE


def build_manifest(program: SpmdProgram, common: Sequence[RankState], ranks: Sequence[RankGraph]) -> Manifest:
    """All data needed by a launcher."""
    training = program.source
    by_rank = phases_by_rank(ranks)
    phases = [part.phase for part in next(iter(by_rank.values()), ())]
    return Manifest(
        accumulate=program.micro_steps,
        phases=tuple(PhaseEntry(p.name, p.times) for p in phases) if program.micro_steps > 1 else None,
        pipeline=_pipeline(program),
        loss_reduction=str(program.loss_reduction),
        reduce_dtype=program.reduce_dtype,
        statistics="root" if program.statistics_of_root else "mean",
        reductions=() if program.statistics_of_root else tuple(program.reductions.values()),
        synchronised=program.synchronised,
        host=program.host,
        mesh=MeshEntry.of(program.mesh),
        split=dict(program.split) or None,
        source=SOURCE_FILE,
        loss=training.loss,
        samples_axis=samples_axis(training),
        more_losses=training.losses[1:],
        states=source_states(training),
        common=common_entry(training, common),
        ranks=tuple(rank_entries(program, by_rank, files_of(by_rank))),
    )


def files_of(by_rank: Mapping[int, Sequence[RankGraph]]) -> dict[int, dict[str, str]]:
    """The files of each rank, by phase."""
    return {rank: {part.phase.name: rank_file(rank, part.phase) for part in parts} for rank, parts in by_rank.items()}


def source_states(training: TrainingGraph) -> tuple[SourceState, ...]:
    """Every state of the source."""
    types = training.graph.types
    return tuple(
        SourceState(s.tensor, s.updated, s.kind, s.of, types[s.tensor].dtype, types[s.tensor].shape)
        for s in training.states
    )


def common_entry(training: TrainingGraph, states: Sequence[RankState]) -> CommonEntry:
    """Return the common inputs and outputs, and the states equal on all ranks."""
    types = training.graph.types
    inputs = [(name, InputKind.BATCH) for name in training.batch] + [(name, InputKind.HYPER) for name in training.hyper]
    outputs = training.shown
    return CommonEntry(
        inputs=tuple(
            InputEntry(
                name, types[name].dtype, types[name].shape, kind, training.draws.get(name), training.defaults.get(name)
            )
            for name, kind in inputs
        ),
        outputs=tuple(OutputEntry(name, types[name].dtype, types[name].shape) for name in outputs),
        state=tuple(map(local_state, states)),
    )


def phases_by_rank(ranks: Sequence[RankGraph]) -> dict[int, list[RankGraph]]:
    """The phases of every rank."""
    by_rank: dict[int, list[RankGraph]] = {}
    for part in ranks:
        by_rank.setdefault(part.rank, []).append(part)
    return by_rank


def rank_entries(
    program: SpmdProgram, by_rank: Mapping[int, Sequence[RankGraph]], files: Mapping[int, Mapping[str, str]]
) -> Iterator[RankEntry]:
    """The entries of ranks; ranks of a kind share the records of states, sums and saved values."""
    carried: dict[int, tuple[tuple[LocalState, ...], tuple[LocalAccumulator, ...]]] = {}
    saved_of: dict[tuple[int, ...], tuple[SavedValue, ...]] = {}
    for rank, parts in by_rank.items():
        fed = tuple(FedInput(name, box) for name, box in program.fed_boxes(program.mesh.coordinates(rank)).items())
        key, saved = id(parts[0].states), tuple(id(part.saved) for part in parts)
        if key not in carried:
            carried[key] = tuple(map(local_state, parts[0].states)), local_accumulators(parts[0])
        if saved not in saved_of:
            saved_of[saved] = _saved(parts)
        yield RankEntry(rank, "trainer", dict(files[rank]), *carried[key], saved_of[saved], fed)


def _pipeline(program: SpmdProgram) -> PipelineEntry | None:
    plan = program.stages
    return None if plan is None else PipelineEntry(plan.stages, SCHEDULE_FILE if plan.schedule is not None else None)


def _saved(parts: Sequence[RankGraph]) -> tuple[SavedValue, ...]:
    """The values that a rank carries from the forward to the backward."""
    types = {value.input: value.type for part in parts for value in part.saved}
    return tuple(SavedValue(name, type.dtype, type.shape) for name, type in types.items())


def local_accumulators(part: RankGraph) -> tuple[LocalAccumulator, ...]:
    """The sums carried by a rank between micro-steps."""
    return tuple(
        LocalAccumulator(sums.input, sums.output, sums.type.dtype, sums.type.dims) for sums in part.accumulators
    )


def local_state(state: RankState) -> LocalState:
    """Return the entry of a rank's state: the contained pieces of source states."""
    pieces = tuple(Piece(piece.tensor, piece.start, piece.stop, piece.box) for piece in state.pieces)
    return LocalState(state.input, state.output, pieces, state.local, state.copy)
