"""The source against the rank holding most: nodes, bytes by kind, calls, traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gopt.analysis.training import StateKind, TrainingGraph
from gopt.artifact.report_record import BeforeAfter, RankBytes, RankUsage, SourceEntry, StepSize
from gopt.ir.tensor import Tensor
from gopt.lower.rank_graph import RankGraph, RankState
from gopt.records.mesh import PIPELINE
from gopt.spmd.program import SpmdProgram
from gopt.spmd.step_memory import live, live_in_source
from gopt.spmd.traffic import calls_of


def before_after(
    program: SpmdProgram,
    source: SourceEntry,
    common: Sequence[RankState],
    ranks: Sequence[RankGraph],
    usages: Sequence[RankUsage],
) -> BeforeAfter | None:
    """The sizes of both. ``usages``: of ``ranks``; a rank's phases follow one another there. Of equally large ranks,
    the first counts; of ranks differing in states alone, one gives the peak."""
    if not usages:
        return None
    peaks: dict[tuple[int, int], int] = {}

    def peak(rank: int) -> int:
        variant, coordinates = program.of(rank), program.mesh.coordinates(rank)
        key = id(variant), coordinates.get(PIPELINE, 0)
        if key not in peaks:
            peaks[key] = live(variant, calls_of(variant), coordinates).peak
        return peaks[key]

    def held(usage: RankUsage) -> int:
        return usage.nbytes.parameters + usage.nbytes.optimizer_states - usage.nbytes.host

    most = max(usages, key=held)
    if program.others or program.stages is not None:
        most = max(usages, key=lambda usage: held(usage) + peak(usage.rank))
    parts = [rank for rank in ranks if rank.rank == most.rank]
    largest = StepSize(
        peak_live=peak(most.rank),
        initializers=_stored(program, common, parts),
        host=most.nbytes.host,
        **rank_sizes(most, parts),
    )
    before = StepSize(peak_live=live_in_source(program.source).peak, **source_sizes(program.source, source))
    return BeforeAfter(most.rank, before, largest)


def source_bytes(training: TrainingGraph) -> RankBytes:
    """Bytes held by a single process running the source itself."""
    types = training.graph.types
    nbytes = dict.fromkeys(StateKind, 0)
    for state in training.states:
        nbytes[state.kind] += types[state.tensor].nbytes
    return RankBytes(
        parameters=nbytes[StateKind.PARAMETER],
        optimizer_states=nbytes[StateKind.OPTIMIZER_STATE] + nbytes[StateKind.ACCUMULATOR],
        gradients=sum(types[name].nbytes for name in set(training.gradients.values())),
    )


def source_sizes(training: TrainingGraph, source: SourceEntry) -> dict[str, int]:
    """The sizes of the source, for a table beside ranks or roles."""
    stored = sum(tensor.nbytes for tensor in training.graph.initializers.values())
    counts = {"nodes": source.counts["nodes"], "calls": len(training.calls), "traffic": 0, "initializers": stored}
    return counts | source_bytes(training).by_kind


def rank_sizes(usage: RankUsage, parts: Sequence[RankGraph]) -> dict[str, int]:
    """The sizes of a rank with some files, except for the stored bytes."""
    nodes = sum(len(block.nodes) for part in parts for block in part.blocks)
    calls = sum(call.calls for call in usage.communication)
    return {"nodes": nodes, "calls": calls, "traffic": usage.bytes_sent} | usage.nbytes.by_kind


def _stored(program: SpmdProgram, common: Sequence[RankState], parts: Sequence[RankGraph]) -> int:
    """Bytes behind the files of a rank: constants, and states with source values."""
    values: Mapping[str, Tensor] = program.source.graph.initializers
    states = [state for state in (*common, *parts[0].states) if state.pieces and state.pieces[0].tensor in values]
    constants = {name: array.nbytes for part in parts for name, array in part.constants.items()}
    constants_size = sum(tensor.nbytes for tensor in parts[0].phase.graph.initializers.values())
    return sum(state.type.nbytes for state in states) + sum(constants.values()) + constants_size
