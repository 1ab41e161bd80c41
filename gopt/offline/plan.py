"""The cost of each choice of stage, partition and bucket size; nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gopt.analysis.partition import Item, default_cap, plan_buckets
from gopt.analysis.training import StateKind, TrainingGraph
from gopt.artifact.cost_report import CostReport, cost_report
from gopt.documents.records import to_document
from gopt.ir.graph_index import GraphIndex
from gopt.offline.device import DeviceFigures
from gopt.offline.step_time import Machine, StepTime, step_time
from gopt.offline.times import CommTimes, times
from gopt.passes.base import dashed
from gopt.passes.pipeline import Pipeline, build_pipeline
from gopt.passes.preflight import check_planned
from gopt.records.mesh import Mesh
from gopt.records.topology import Topology
from gopt.spmd.program import SpmdProgram
from gopt.spmd.step_memory import LivePeaks, held, live, members, reduced_gradient_bytes
from gopt.spmd.traffic import calls_of
from gopt.text.amounts import balance

MIB = 1 << 20
STAGES = (0, 1, 2, 3)
PARTITIONS = ("flat", "rows", "whole")
_FIXED = 2
"""So many passes of the default pipeline, from its beginning, do the same for every choice: ``tensor-parallel``."""


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """The options of ``shard`` set by a choice; ``bucket_mb`` None: the default.

    Each field is one dimension of the search space.
    """

    stage: int = 2
    partition: str = "flat"
    bucket_mb: float | None = None

    def pipeline(self, **defaults: dict[str, Any]) -> Pipeline:
        """The default pipeline with these settings; ``defaults``: options of other passes."""
        return build_pipeline(
            defaults={"shard": dashed(asdict(self)), "fuse-collectives": {"cap-mb": self.bucket_mb}, **defaults}
        )

    def __str__(self) -> str:
        cap = "default buckets" if self.bucket_mb is None else f"buckets of {self.bucket_mb:g} MiB"
        return f"stage {self.stage}, {self.partition}, {cap}"


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

    @property
    def held(self) -> int:
        """States and the peak of live values beside them."""
        return self.parameters + self.optimizer_states + self.live.peak

    @property
    def batches(self) -> int:
        """Batches of the source in a step: batches of ranks that compute together count once."""
        return self.mesh.data_ranks

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
        record = asdict(self.settings) | {
            "bytes": {
                "parameters": self.parameters, "optimizer_states": self.optimizer_states,
                "gradients": self.live.gradients, "gathered": self.live.gathered,
                "activations": self.live.activations, "live": self.live.peak, "total": self.held,
            },
            "traffic": {"sent": costs.traffic.sent, "bound": costs.traffic.bound, "ratio": costs.traffic.ratio},
            "calls": to_document(costs.calls),
            "balance": self.balance,
            "hidden_share": costs.overlap.hidden_share,
        }  # fmt: skip
        record |= {} if self.times is None else {"seconds": asdict(self.times)}
        return record | ({} if self.time is None else {"step": asdict(self.time)})


def choices(
    training: TrainingGraph,
    mesh: Mesh,
    *,
    caps: Sequence[float | None] | None = None,
    topology: Topology | None = None,
    device: DeviceFigures | None = None,
    advance: Callable[[str], None] = lambda _: None,
) -> Iterator[PlanChoice]:
    """Run the passes for every choice and weigh the resulting graph; no rank's graph is made.

    ``caps`` in MiB; by default the pass's own, a quarter and four times of it, where buckets differ. The computation is
    split once for all choices. Where no ranks share states, all stages are stage 0. ``device``: for times of whole
    steps, with the links of ``topology``."""
    check_planned(mesh)
    split = split_program(training, mesh, topology)
    yield from split_choices(split, caps=caps, topology=topology, device=device, advance=advance)


def split_choices(
    split: SpmdProgram,
    *,
    caps: Sequence[float | None] | None = None,
    topology: Topology | None = None,
    device: DeviceFigures | None = None,
    advance: Callable[[str], None] = lambda _: None,
) -> Iterator[PlanChoice]:
    """As ``choices``, of a step made by ``split_program``."""
    mesh = split.mesh
    caps = bucket_choices(split.training) if caps is None else caps
    accumulates = any(state.kind is StateKind.ACCUMULATOR for state in split.training.states)
    for partition in PARTITIONS:
        for cap in caps:
            alike: PlanChoice | None = None
            for stage in STAGES if mesh.shard_axis else STAGES[:1]:
                if stage == 0 and partition != PARTITIONS[0]:
                    continue
                settings = ShardSettings(stage, partition, cap)
                advance(f"{mesh}: {settings}")
                if stage == 2 and alike is not None and not accumulates:
                    # Without accumulation the step of stages 1 and 2 is the same (contract section 1).
                    yield replace(alike, settings=settings)
                    continue
                choice = estimate_cost(split, settings, topology, device)
                alike = choice if stage == 1 else None
                yield choice


def split_program(training: TrainingGraph, mesh: Mesh, topology: Topology | None = None) -> SpmdProgram:
    """The step of a mesh behind the passes that no setting changes: the split computation."""
    program = SpmdProgram.start(training, mesh)
    whole = ShardSettings().pipeline(**_linked(topology))
    replace(whole, stages=whole.stages[:_FIXED]).run(program)
    return program


def _linked(topology: Topology | None) -> dict[str, dict[str, Any]]:
    """Options of passes for settling conflicts by time on links."""
    return {} if topology is None else {"tensor-parallel": {"link": topology.text}}


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
    step = split.fork()
    pipeline = settings.pipeline(**_linked(topology))
    ran = replace(pipeline, stages=pipeline.stages[_FIXED:]).run(step)
    calls = calls_of(step)
    rows = held(step)
    even = {**rows, "gradients": reduced_gradient_bytes(step)}
    totals = [sum(bytes) for bytes in zip(*rows.values())]
    largest = members(step)[totals.index(max(totals))]
    variant = step.at(largest)
    machine = None if device is None or topology is None else Machine(device, topology)
    return PlanChoice(
        step.mesh,
        settings,
        max(rows["parameters"]),
        max(rows["optimizer_states"]),
        live(variant, calls_of(variant), largest),
        cost_report(step, ran, calls),
        max(map(balance, even.values())),
        None if topology is None else times(calls, topology),
        None if machine is None else step_time(variant, machine, largest),
    )
