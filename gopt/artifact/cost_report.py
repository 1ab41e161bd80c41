"""The figures of a sharded step against their bounds: traffic, calls, casts, overlap. No rank's graph is needed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gopt.analysis.parameter_uses import low_precision_uses, parameter_users, trained_bytes
from gopt.artifact.pass_facts import bucket_cap
from gopt.artifact.report_record import CallCounts, CastCounts, Figures, Traffic
from gopt.collectives.layout import ITEM_BYTES, parse_shapes, total_elements
from gopt.ir.graph import COMM
from gopt.ir.types import LOW_PRECISION
from gopt.lower.phases import LoweredPhase, phases
from gopt.lower.rank_graph import RankGraph, RankState
from gopt.operators.kinds import CASTS
from gopt.spmd.pass_records import PassRun
from gopt.spmd.program import SpmdProgram
from gopt.spmd.stage_plan import transfers
from gopt.spmd.step_memory import overlap_of
from gopt.spmd.traffic import CallContent, CollectiveCall, Overlap, calls_of, transferred


@dataclass(frozen=True, slots=True)
class CostReport:
    """Traffic and calls of a step beside their minimum; bytes are a rank's mean per update."""

    traffic: Traffic
    calls: CallCounts
    overlap: Overlap


def cost_report(
    program: SpmdProgram, ran: Sequence[PassRun], calls: Sequence[CollectiveCall],
    lowered: Sequence[LoweredPhase] | None = None,
) -> CostReport:  # fmt: skip
    """Compute the costs of a step after all passes; ``calls`` and ``lowered``: of the program, not of the variants."""
    report = _report(program, ran, calls, lowered)
    if not program.others:
        return report
    traffics = [_report(variant, ran, calls_of(variant)).traffic for variant in program.others]
    weights = [len(variant.places) for variant in program.variants]
    return replace(report, traffic=_mean([report.traffic, *traffics], weights))


def _report(
    program: SpmdProgram, ran: Sequence[PassRun], calls: Sequence[CollectiveCall],
    lowered: Sequence[LoweredPhase] | None = None,
) -> CostReport:  # fmt: skip
    """The figures of a variant's ranks."""
    files = phases(program) if lowered is None and program.micro_steps > 1 else lowered or ()
    times = _times(files)
    cap = bucket_cap(run.record for run in ran)
    counts = [times.get(call.node.outputs[0], 1) for call in calls]
    places = Counter(node.outputs[0] for phase in files for node in phase.graph.nodes if node.domain == COMM)
    standing = [call for call in calls for _ in range(max(places[call.node.outputs[0]], 1))]  # in several actions
    kinds = {kind.value: round(sum(c.sent_as(kind) * n for c, n in zip(calls, counts))) for kind in CallContent}
    between_stages = round(transferred(program, times))
    kinds[CallContent.OTHER.value] += between_stages
    by_kind = {kind: nbytes for kind, nbytes in kinds.items() if nbytes}
    sent = round(sum(call.sent * count for call, count in zip(calls, counts))) + between_stages
    bound = traffic_bound(program, calls) + between_stages
    return CostReport(
        Traffic(sent, by_kind, bound, round(sent / bound, 6) if bound else 1.0),
        CallCounts(len(standing), packing_bound(program, standing, cap), cap),
        overlap_of(program),
    )


def _times(lowered: Sequence[LoweredPhase]) -> dict[str, int]:
    """First output of a call -> runs in an update with all micro-steps."""
    times: dict[str, int] = {}
    for phase in lowered:
        for node in phase.graph.nodes:
            if node.domain == COMM or transfers(node):
                times[node.outputs[0]] = times.get(node.outputs[0], 0) + phase.times
    return times


def traffic_bound(program: SpmdProgram, calls: Sequence[CollectiveCall]) -> int:
    """Minimum traffic: bytes that a rank sends at least, on average, with any sharding (bandwidth-optimal ring).

    G bytes of gradients as the backward makes them, P of parameters as forward and backward read them; D ranks see
    different data, in M groups of N sharing states. Nothing shared: an all-reduce, 2(D-1)/D·G. Else (N-1)/N·G to
    scatter, 2(M-1)/M·G/N between the groups, (N-1)/N·P to gather once. The bound follows from the source, not from the
    calls: a stage with two gathers is at 1.5 times the bound. Scalars and statistics are not counted. The ranks of a
    pipeline have the gradients and parameters of their stage alone, on average.
    """
    data = program.mesh.data_group
    ranks = program.mesh.size(data) if data else 1
    stages = program.stages.stages if program.stages is not None else 1
    gradients, parameters = (nbytes / stages for nbytes in trained_bytes(program.training))
    members = program.mesh.shard_ranks
    if members == 1 or not _shares(program, calls):
        return round(2 * (ranks - 1) / ranks * gradients)
    groups = ranks // members
    scatter = (members - 1) / members * (gradients + parameters)
    return round(scatter + 2 * (groups - 1) / groups * gradients / members)


def _shares(program: SpmdProgram, calls: Sequence[CollectiveCall]) -> bool:
    """Return whether members of the sharding group hold different pieces, or exchange new parameters."""
    return any(h.sharded for h in program.states) or any(call.carries is CallContent.PARAMETERS for call in calls)


def packing_bound(program: SpmdProgram, calls: Sequence[CollectiveCall], cap: int | None) -> int:
    """Return the minimum number of calls that could carry the same tensors without cutting one (anchors: section 4.5).

    By kind, dtype, group and phase: a call for each tensor of at least ``cap`` bytes, and a call for every ``cap``
    bytes of the rest. Buckets are measured in bytes of gradient, so parameters count like gradients. Calls of scalars
    and statistics, one per dependency level, count as they are.
    """
    if cap is None:
        return len(calls)
    weight = _gradient_item(program)
    tensors: dict[tuple[object, ...], list[float]] = {}
    loop_carried: dict[str, list[float]] = {}
    read: set[str] = set()
    fixed = 0
    for call in calls:
        if call.carries is CallContent.OTHER:
            fixed += 1
            continue
        nbytes = _tensors(program, call, loop_carried, weight)
        again = not read.isdisjoint(call.node.inputs)
        if call.carries is CallContent.PARAMETERS:
            read.update(call.node.inputs)
        attributes = call.node.attributes
        dtype = program.graph.types[call.node.outputs[0]].dtype
        extra = (attributes.get("reduce"), attributes.get("root"), call.before_use, again)
        tensors.setdefault((call.node.op_type, dtype, attributes["group"], *extra), []).extend(nbytes)
    return fixed + sum(fewest_calls(sizes, cap) for sizes in tensors.values())


def _tensors(
    program: SpmdProgram, call: CollectiveCall, loop_carried: dict[str, list[float]], weight: int
) -> list[float]:
    """Bytes, as gradients, of the source's tensors in a call; ``loop_carried`` keeps the bytes for later calls."""
    node, types = call.node, program.graph.types
    if call.carries is CallContent.PARAMETERS:
        if "shapes" in node.attributes:
            return [float(total_elements([shape]) * weight) for shape in parse_shapes(node.attributes["shapes"])]
        return [float(types[name].elements * weight) for name in node.outputs]
    size_rows = [loop_carried.get(name, [float(types[name].nbytes)]) for name in node.inputs]
    if len(node.outputs) == len(node.inputs):
        loop_carried.update(zip(node.outputs, size_rows))
    else:
        loop_carried[node.outputs[0]] = [size for sizes in size_rows for size in sizes]
    return [size for sizes in size_rows for size in sizes]


def _gradient_item(program: SpmdProgram) -> int:
    """Bytes of an element of the narrowest gradient."""
    types = program.training.graph.types
    return min((ITEM_BYTES[types[name].dtype] for name in program.training.gradients.values()), default=4)


def fewest_calls(sizes: Sequence[float], cap: int) -> int:
    rest = sum(size for size in sizes if size < cap)
    return sum(size >= cap for size in sizes) + (math.ceil(rest / cap) if rest else 0)


def casts(program: SpmdProgram, common: Sequence[RankState], ranks: Sequence[RankGraph]) -> CastCounts:
    """Casts of parameters to a low precision in a step, and the tensors served; the largest over ``ranks``.

    ``per_update``: behind an update or before a gather; neighbours of a class are cast at once, so there may be fewer
    than ``owned_tensors``, the tensors with elements owned by a rank. ``in_forward``: left at the places of the source.
    """
    training, types = program.training, program.graph.types
    users = parameter_users(training)
    low = {name for name in training.gradients if low_precision_uses(training, users.get(name, ()))}
    wide = {name for state in training.parameters for name in (state.tensor, state.updated)}
    by_rank = [[s for s in (*common, *rank.states) if s.pieces and s.pieces[0].tensor in low] for rank in ranks]
    wide |= {name for states in by_rank for state in states if not state.copy for name in (state.input, state.output)}
    casts_of = {
        id(variant): [
            node
            for node in variant.graph.nodes
            if node.is_in(CASTS) and node.inputs[0] in wide and types[node.outputs[0]].dtype in LOW_PRECISION
        ]
        for variant in program.variants
    }
    counts = []
    for rank in ranks:
        at, nodes = program.mesh.coordinates(rank.rank), casts_of[id(program.of(rank.rank))]
        counts.append(sum(node.sharding.covers(at) for node in nodes if node.made_by))
    owned = [len({piece.tensor for s in states if not s.copy for piece in s.pieces}) for states in by_rank]
    return CastCounts(
        per_update=max(counts, default=0),
        owned_tensors=max(owned, default=0),
        in_forward=sum(not node.made_by for node in casts_of[id(program)]),
    )


def figures(
    program: SpmdProgram,
    ran: Sequence[PassRun],
    common: Sequence[RankState],
    ranks: Sequence[RankGraph],
    calls: Sequence[CollectiveCall],
) -> Figures:
    """The section ``figures`` of the report, of a verified program and the ``calls``."""
    costs = cost_report(program, ran, calls)
    return Figures(costs.traffic, costs.calls, casts(program, common, ranks), costs.overlap)


def _mean(rows: Sequence[Traffic], weights: Sequence[int]) -> Traffic:
    """The traffic of all variants; ``weights``: how many ranks run each."""

    def mean(values: Iterable[int]) -> int:
        return round(sum(value * weight for value, weight in zip(values, weights)) / sum(weights))

    sent, bound = mean(row.sent for row in rows), mean(row.bound for row in rows)
    kinds = dict.fromkeys(kind for row in rows for kind in row.by_kind)
    by_kind = {kind: mean(row.by_kind.get(kind, 0) for row in rows) for kind in kinds}
    return Traffic(sent, by_kind, bound, round(sent / bound, 6) if bound else 1.0)
