"""The cost of each choice of stage, partition and bucket size; nothing is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gopt.analysis.partition import Item, default_cap, plan_buckets
from gopt.analysis.training import StateKind, TrainingGraph
from gopt.artifact.cost_report import CostReport, cost_report
from gopt.documents.records import to_document
from gopt.ir.graph_index import GraphIndex
from gopt.lower.variants import check_variants
from gopt.offline.device import DeviceFigures
from gopt.offline.plan_settings import DEFAULTS, ONE_FORWARD, ShardSettings
from gopt.offline.stage_time import StagedStep, ordered
from gopt.offline.step_time import Machine, StepTime, step_time
from gopt.offline.times import CommTimes, times
from gopt.records.mesh import PIPELINE, Mesh
from gopt.records.topology import Topology
from gopt.schedules.builders import build_schedule
from gopt.spmd.pass_records import PassRun
from gopt.spmd.program import SpmdProgram
from gopt.spmd.step_memory import LivePeaks, accumulated, held, live, members, reduced_gradient_bytes
from gopt.spmd.traffic import calls_of
from gopt.text.amounts import balance

MIB = 1 << 20
_STAGES, _COMPUTATION = 1, 2
"""The first pass of the default pipeline, ``pipeline``, and the second, ``tensor-parallel``: both do the same for every
stage of sharding, partition and bucket, the second for every number of micro-batches as well."""


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """One way to shard, and the cost; bytes are the largest over the ranks."""

    mesh: Mesh
    settings: ShardSettings
    parameters: int
    optimizer_states: int
    live: LivePeaks
    costs: CostReport
    balance: float
    times: CommTimes | None
    time: StepTime | None = None
    """Of a step on a device; None where no device is given."""
    accumulated: int = 0
    """Bytes of sums over micro-steps, where ``live`` does not have them as in the order of a schedule."""

    @property
    def held(self) -> int:
        """States, sums, and the peak of live values beside them."""
        return self.parameters + self.optimizer_states + self.accumulated + self.live.peak

    @property
    def batches(self) -> int:
        """Batches of the source in a step: batches of ranks that compute together count once."""
        return self.mesh.data_ranks * self.settings.accumulate

    @property
    def sent(self) -> float:
        """Bytes sent by a rank for each batch, the mean over ranks."""
        return self.costs.traffic.sent / self.batches

    @property
    def seconds(self) -> float:
        """Seconds for each batch, to three digits: of a step on a device, else of calls added to a step; 0 without
        links."""
        added = 0.0 if self.times is None else self.times.exposed
        return float(f"{(added if self.time is None else self.time.seconds) / self.batches:.3g}")

    def __repr__(self) -> str:
        return f"<Choice {self.mesh}, {self.settings}: {self.held} bytes held, {self.costs.calls.count} calls>"

    def to_json(self) -> dict[str, Any]:
        costs = self.costs
        record = self.settings.to_json() | {
            "bytes": {
                "parameters": self.parameters, "optimizer_states": self.optimizer_states,
                "gradients": self.live.gradients, "gathered": self.live.gathered,
                "activations": self.live.activations, "live": self.live.peak, "accumulated": self.accumulated,
                "total": self.held,
            },
            "traffic": {"sent": costs.traffic.sent, "bound": costs.traffic.bound, "ratio": costs.traffic.ratio},
            "calls": to_document(costs.calls),
            "balance": self.balance,
            "hidden_share": costs.overlap.hidden_share,
        }  # fmt: skip
        record |= {} if self.times is None else {"seconds": asdict(self.times)}
        return record | ({} if self.time is None else {"step": asdict(self.time)})


def accumulates(program: SpmdProgram) -> bool:
    """Return whether the source sums gradients over steps."""
    return any(state.kind is StateKind.ACCUMULATOR for state in program.training.states)


def split_program(
    training: TrainingGraph, mesh: Mesh, topology: Topology | None = None, settings: ShardSettings = DEFAULTS
) -> SpmdProgram:
    """The step of a mesh behind the passes for the split of the computation, and for stages: no further setting changes
    these."""
    return cut_in_stages(split_computation(training, mesh, topology, settings), settings)


def split_computation(
    training: TrainingGraph, mesh: Mesh, topology: Topology | None = None, settings: ShardSettings = DEFAULTS
) -> SpmdProgram:
    """The step of a mesh with its computation split, for any stages and any number of micro-batches; of ``settings``
    ``sequence`` counts."""
    program, whole = SpmdProgram.start(training, mesh), replace(DEFAULTS, sequence=settings.sequence).pipeline(topology)
    replace(whole, stages=whole.stages[_STAGES:_COMPUTATION]).run(program)
    return program


def cut_in_stages(split: SpmdProgram, settings: ShardSettings) -> SpmdProgram:
    """The step made by ``split_computation``, left unchanged, on the stages and with the micro-batches of
    ``settings``."""
    program, whole = split.fork(), settings.pipeline(None)
    for variant in program.variants:
        variant.micro_steps = settings.accumulate
    replace(whole, stages=whole.stages[:_STAGES]).run(program)
    return program


def bucket_choices(training: TrainingGraph) -> list[float | None]:
    """Caps in MiB worth trying: the default (None), a quarter of it, four times; one of several with equal buckets."""
    types, index = training.graph.types, GraphIndex(training.graph)
    ready = {name: index.defined_at(name) for name in training.gradients.values()}
    items = [
        Item(name, types[name].elements, types[name].nbytes, types[name].dtype, position, position)
        for name, position in ready.items()
    ]
    cap = default_cap(sum(item.nbytes for item in items))
    distinct: dict[tuple[tuple[str, ...], ...], float | None] = {}
    for times_, value in ((1.0, None), (0.25, cap / 4 / MIB), (4.0, 4 * cap / MIB)):
        buckets = plan_buckets(items, int(cap * times_))
        distinct.setdefault(tuple(tuple(item.name for item in bucket.items) for bucket in buckets), value)
    return list(distinct.values())


def estimate_cost(
    split: SpmdProgram, settings: ShardSettings, topology: Topology | None, device: DeviceFigures | None = None
) -> PlanChoice:
    """The cost of one choice for a step made by ``split_program``, left unchanged."""
    return next(iter(estimate_costs(split, [settings], topology, device)))


def estimate_costs(
    split: SpmdProgram, alike: Sequence[ShardSettings], topology: Topology | None, device: DeviceFigures | None
) -> Iterator[PlanChoice]:
    """The costs of choices with the same passes for a step made by ``split_program``: they differ in schedules of one
    placement, and in the number of several micro-batches. Raises OptionError and UnsupportedError where ``gopt shard``
    refuses the choices."""
    step = split.fork()
    pipeline = alike[0].pipeline(topology)
    ran = replace(pipeline, stages=pipeline.stages[_COMPUTATION:]).run(step)
    check_variants(step)
    yield from costs_of(step, ran, alike, topology, device)


def costs_of(
    step: SpmdProgram, ran: Sequence[PassRun], alike: Sequence[ShardSettings], topology: Topology | None,
    device: DeviceFigures | None,
) -> Iterator[PlanChoice]:  # fmt: skip
    """The costs of a step behind its passes, for choices as in ``estimate_costs``."""
    calls = calls_of(step)
    rows, ranks = held(step), members(step)
    even = max(map(balance, {**rows, "gradients": reduced_gradient_bytes(step)}.values()))
    machine = None if device is None or topology is None else Machine(device, topology)
    added = None if topology is None else times(calls, topology)
    totals = [sum(bytes) for bytes in zip(*rows.values())]
    largest = ranks[totals.index(max(totals))]
    variant = step.at(largest)
    if machine is None or variant.stages is None or variant.stages.schedule is None:
        yield PlanChoice(
            step.mesh, alike[0], max(rows["parameters"]), max(rows["optimizer_states"]),
            live(variant, calls_of(variant), largest), cost_report(step, ran, calls), even, added,
            None if machine is None else step_time(variant, machine, largest), accumulated(step, largest),
        )  # fmt: skip
        return
    staged: dict[bool, StagedStep] = {}
    """By whether backwards are split."""
    costs: dict[int, CostReport] = {}
    for settings in alike:
        count = settings.accumulate
        schedule = build_schedule(settings.schedule or ONE_FORWARD, step.mesh.size(PIPELINE), count)
        for program in step.variants:
            ordered(program, schedule)
        if schedule.splits_backward not in staged:
            staged[schedule.splits_backward] = StagedStep(variant, machine, largest, schedule)
        timed = staged[schedule.splits_backward]
        if count not in costs:
            costs[count] = cost_report(step, ran, calls, None if step.others else timed.phases(count))
        index, peak = max(
            _live_on_stages(variant, ranks, totals).items(), key=lambda item: totals[item[0]] + item[1].peak
        )
        yield PlanChoice(
            step.mesh, settings, rows["parameters"][index], rows["optimizer_states"][index], peak, costs[count], even,
            added, timed.time(schedule),
        )  # fmt: skip


def _live_on_stages(
    program: SpmdProgram, ranks: Sequence[Mapping[str, int]], totals: Sequence[int]
) -> dict[int, LivePeaks]:
    """For each stage, the index of the rank with the largest states, and the peak of live values there."""
    fullest: dict[int, int] = {}
    for index, coordinates in enumerate(ranks):
        member = coordinates[PIPELINE]
        if totals[index] > totals[fullest.setdefault(member, index)]:
            fullest[member] = index
    return {index: live(program, calls_of(program), ranks[index]) for index in fullest.values()}
