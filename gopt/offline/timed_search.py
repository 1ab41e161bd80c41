"""The search among choices whose steps are timed on a device: only what can be the first is run through the passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from gopt.analysis.training import Phase, TrainingGraph
from gopt.offline.device import DeviceFigures
from gopt.offline.mesh_search import Refusals, attempted, leading, sequence_variants
from gopt.offline.plan import PlanChoice, accumulates, bucket_choices, cut_in_stages, estimate_costs, split_computation
from gopt.offline.plan_ranking import fits
from gopt.offline.plan_settings import DEFAULTS, ONE_FORWARD, PARTITIONS, SEQUENCES, STAGES, ShardSettings
from gopt.offline.roofline import node_works
from gopt.records.mesh import PIPELINE, Mesh
from gopt.records.topology import Topology
from gopt.spmd.local_sizes import LocalSizes
from gopt.spmd.program import SpmdProgram

SIMPLE = ("gpipe", ONE_FORWARD, "zb-h1")
"""Schedules with one stage on each member, which share all passes."""
CHUNKED = ("interleaved:2", "zb-v")
"""Schedules with two stages on each member, each with a placement of its own."""
SAVINGS = (
    ("selective", None), ("full", None), (None, "states"), ("full", "states"), ("full", "states,activations"),
)  # fmt: skip
"""Recompute and offload for less memory, in order until a choice fits."""


@dataclass(frozen=True, slots=True)
class TimedSearch:
    """The limits of a search. ``memory``: bytes of a rank; ``link``: as the user writes links; ``caps``: of buckets in
    MiB, None: the usual ones; ``fixed``: the user's schedule, recompute, offload and micro-batches, 1 for any
    number; ``sequences``: with sequence parallelism or without, the first for all choices, the rest for the best."""

    device: DeviceFigures
    link: str
    memory: int | None = None
    caps: Sequence[float | None] | None = None
    fixed: ShardSettings = DEFAULTS
    advance: Callable[[str], None] = lambda _: None
    refused: Refusals = field(default_factory=Refusals)
    sequences: Sequence[bool] = SEQUENCES
    _computations: dict[tuple[Mesh, bool], SpmdProgram] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def bounds(self, training: TrainingGraph, meshes: Iterable[Mesh]) -> list[tuple[float, Mesh]]:
        """The meshes by a lower bound of the time of a step for each batch: forward and backward, divided evenly, and
        the least wait of stages, as of zb-v."""
        graph, device = training.graph, self.device
        batchwise = [node for node in graph.nodes if node.phase is not Phase.UPDATE]
        works = node_works(batchwise, LocalSizes(graph), graph.outputs, device.fuse_from)
        starts = sum(work.launches for work in works) * device.launch
        work = sum(item.seconds(device) for item in works) - starts
        result = []
        for mesh in meshes:
            stages = mesh.along(PIPELINE)
            together = mesh.ranks // mesh.data_ranks // stages
            count = self.fixed.accumulate if self.fixed.accumulate > 1 else stages * together
            turn = (work / together + starts) / stages
            result.append((turn * (1 + (stages - 1) / (6 * count)) / mesh.data_ranks, mesh))
        return sorted(result, key=lambda item: item[0])

    def outline(self, training: TrainingGraph, mesh: Mesh, batches: int | None) -> Iterator[PlanChoice]:
        """Stage 2 with 1f1b; stage 3 too where stage 2 does not fit."""
        alike = self._alike(mesh, batches)
        shown = [settings for settings in alike if settings.schedule in (None, ONE_FORWARD)] or alike
        topology, split = Topology.parse(self.link, mesh), self._split(training, mesh, shown[0])
        for stage in (2, 3) if mesh.shard_axis else STAGES[:1]:
            choices = list(self._costs(split, [replace(item, stage=stage) for item in shown[:1]], topology))
            yield from choices
            if any(map(self.fits, choices)):
                return

    def whole(self, training: TrainingGraph, mesh: Mesh, batches: int | None) -> Iterator[PlanChoice]:
        """The choices of a mesh with flat buckets and simple schedules; where none fits, computed again in part.

        ``batches``: of the source in a step, over all ranks; None leaves the number open.
        """
        alike, topology = self._alike(mesh, batches), Topology.parse(self.link, mesh)
        several = alike[0].accumulate > 1
        split = self._split(training, mesh, alike[0])
        choices: list[PlanChoice] = []
        shared = STAGES[1:] if several else STAGES  # stage 0 sums as stage 1 does, and updates more
        for stage in shared if mesh.shard_axis else STAGES[:1]:
            if stage == 2 and not several and not accumulates(split):  # the step of stage 1
                ones = [choice for choice in choices if choice.settings.stage == 1]
                choices += [replace(choice, settings=replace(choice.settings, stage=2)) for choice in ones]
            else:
                choices += self._admitted(split, [replace(settings, stage=stage) for settings in alike], topology)
        yield from choices
        if choices and self.memory is not None and not any(map(self.fits, choices)):
            yield from self._again(training, min(choices, key=lambda choice: choice.held), topology)

    def refined(self, training: TrainingGraph, best: PlanChoice) -> Iterator[PlanChoice]:
        """Further partitions, buckets and schedules for the best choice so far; the rest of its settings stays."""
        mesh, settings = best.mesh, best.settings
        topology = Topology.parse(self.link, mesh)
        split = self._split(training, mesh, settings)
        variants = [best]
        for partition in PARTITIONS[1:] if settings.stage and mesh.shard_axis else ():
            variants += self._admitted(split, [replace(settings, partition=partition)], topology)
        divided = self.sequences if mesh.along(PIPELINE) == 1 else ()  # the step would be split and cut once more
        for variant in sequence_variants(leading(variants, self.memory) or best, divided):
            variants += attempted(self._alone(training, mesh, variant, topology))
        top = leading(variants, self.memory) or best
        if top.settings.sequence is not settings.sequence:
            split = self._split(training, mesh, top.settings)
        for cap in (bucket_choices(split.training) if self.caps is None else self.caps)[1:]:
            variants += self._admitted(split, [replace(top.settings, bucket_mb=cap)], topology)
        yield from variants[1:]
        top = leading(variants, self.memory) or best
        for name in self._schedules(CHUNKED) if settings.schedule and self.fixed.schedule is None else ():
            yield from attempted(self._alone(training, mesh, replace(top.settings, schedule=name), topology))

    def remarks(self, training: TrainingGraph, mesh: Mesh) -> Iterator[str]:
        """Nothing: the time of a step includes nodes computed whole."""
        return iter(())

    def fits(self, choice: PlanChoice) -> bool:
        """Return whether a choice is within the memory of a rank."""
        return fits(choice, self.memory)

    def _alike(self, mesh: Mesh, batches: int | None) -> list[ShardSettings]:
        """Settings with flat buckets, different in micro-batches and simple schedules."""
        counts = self._micro_batches(mesh, batches)
        staged = mesh.along(PIPELINE) > 1 and counts[0] > 1
        cap = None if self.caps is None else self.caps[0]
        base = replace(self.fixed, partition=PARTITIONS[0], bucket_mb=cap, sequence=self.sequences[0])
        return [
            replace(base, accumulate=count, schedule=name)
            for count in counts for name in (self._schedules(SIMPLE) if staged else [None])
        ]  # fmt: skip

    def _split(self, training: TrainingGraph, mesh: Mesh, settings: ShardSettings) -> SpmdProgram:
        """The step of a mesh on the stages of ``settings``; its computation is split once."""
        self.refused.check(training, mesh, settings.accumulate)
        key = mesh, settings.sequence
        if key not in self._computations:
            self._computations[key] = split_computation(training, mesh, Topology.parse(self.link, mesh), settings)
        return cut_in_stages(self._computations[key], settings)

    def _costs(self, split: SpmdProgram, alike: Sequence[ShardSettings], topology: Topology) -> Iterator[PlanChoice]:
        self.advance(f"{split.mesh}: {alike[0]}")
        yield from estimate_costs(split, alike, topology, self.device)

    def _admitted(self, split: SpmdProgram, alike: Sequence[ShardSettings], topology: Topology) -> list[PlanChoice]:
        """The choices accepted by ``gopt shard``."""
        return self.refused.admitted(f"{split.mesh}, {alike[0]}", self._costs(split, alike, topology))

    def _alone(
        self, training: TrainingGraph, mesh: Mesh, settings: ShardSettings, topology: Topology
    ) -> Iterator[PlanChoice]:  # fmt: skip
        """The choice of a step split for it alone."""
        yield from self._costs(self._split(training, mesh, settings), [settings], topology)

    def _again(self, training: TrainingGraph, smallest: PlanChoice, topology: Topology) -> Iterator[PlanChoice]:
        """The choice of least memory with tokens divided along ``tp``, then with values of the forward computed again,
        or on the host, until it fits."""
        fixed, alone, mesh = self.fixed, self.device.host_link is None, smallest.mesh
        for variant in sequence_variants(smallest, self.sequences):
            choices = attempted(self._alone(training, mesh, variant, topology))
            yield from choices
            if any(map(self.fits, choices)):
                return
            smallest = min([smallest, *choices], key=lambda choice: choice.held)
        split = self._split(training, mesh, smallest.settings)
        for recompute, offload in SAVINGS:
            if (recompute and fixed.recompute) or (offload and (fixed.offload or alone)):
                continue
            smaller = replace(
                smallest.settings, recompute=recompute or fixed.recompute, offload=offload or fixed.offload
            )
            choices = attempted(self._costs(split, [smaller], topology))
            yield from choices
            if any(map(self.fits, choices)):
                return

    def _schedules(self, names: Sequence[str]) -> Sequence[str]:
        return names if self.fixed.schedule is None else [self.fixed.schedule]

    def _micro_batches(self, mesh: Mesh, batches: int | None) -> Sequence[int]:
        """The numbers of micro-batches that are weighed."""
        if self.fixed.accumulate > 1:
            return [self.fixed.accumulate]
        if batches is not None:
            return [batches // mesh.data_ranks]
        members = mesh.along(PIPELINE)
        return [2 * members, 4 * members] if members > 1 else [1]
