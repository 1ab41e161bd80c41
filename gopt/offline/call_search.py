"""The search among choices without a device: time added by calls, and memory of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from gopt.analysis.training import TrainingGraph
from gopt.offline.mesh_search import Refusals, attempted, sequence_variants
from gopt.offline.plan import PlanChoice, accumulates, bucket_choices, estimate_costs, split_program
from gopt.offline.plan_settings import PARTITIONS, SEQUENCES, STAGES, ShardSettings
from gopt.passes.preflight import check_planned
from gopt.records.mesh import Mesh
from gopt.records.topology import Topology
from gopt.spmd.program import SpmdProgram


@dataclass(frozen=True, slots=True)
class CallSearch:
    """The limits of a search. ``link``: as the user writes links; ``memory``: bytes of a rank; ``caps``: of buckets in
    MiB, None: the pass's own, a quarter and four times of it, where buckets differ; ``sequences``: with sequence
    parallelism or without, the first for all choices, the rest for the best."""

    link: str | None = None
    memory: int | None = None
    caps: Sequence[float | None] | None = None
    advance: Callable[[str], None] = lambda _: None
    refused: Refusals = field(default_factory=Refusals)
    sequences: Sequence[bool] = SEQUENCES
    _outlined: set[Mesh] = field(default_factory=set, init=False, repr=False, compare=False)
    _splits: dict[tuple[Mesh, bool], SpmdProgram] = field(default_factory=dict, init=False, repr=False, compare=False)

    def bounds(self, training: TrainingGraph, meshes: Iterable[Mesh]) -> list[tuple[float, Mesh]]:
        """All meshes in order, without a bound."""
        return [(0.0, mesh) for mesh in meshes]

    def outline(self, training: TrainingGraph, mesh: Mesh, batches: int | None) -> Iterator[PlanChoice]:
        """All stages, flat, with the first cap of buckets."""
        self._outlined.add(mesh)
        yield from self._stages(training, mesh, PARTITIONS[0], self._caps(training, mesh)[0])

    def whole(self, training: TrainingGraph, mesh: Mesh, batches: int | None) -> Iterator[PlanChoice]:
        """Every stage, partition and cap, without an outline made before. The computation is split once for all. Where
        no ranks share states, all stages are stage 0."""
        for partition in PARTITIONS:
            for cap in self._caps(training, mesh)[mesh in self._outlined and partition == PARTITIONS[0] :]:
                yield from self._stages(training, mesh, partition, cap)

    def refined(self, training: TrainingGraph, best: PlanChoice) -> Iterator[PlanChoice]:
        """The best choice with sequence parallelism; ``whole`` has every other setting."""
        for settings in sequence_variants(best, self.sequences):
            yield from attempted(self._costs(training, best.mesh, settings))

    def remarks(self, training: TrainingGraph, mesh: Mesh) -> Iterator[str]:
        """Yield costs left out of the figures, and the reason for equal stages."""
        split = self._split(training, mesh)
        record = split.passes[0].record
        if split.split and record.note:
            yield record.note
        whole = record.facts.get("computed_whole")
        if whole:
            nodes = "1 node" if len(whole) == 1 else f"{len(whole)} nodes"
            yield f"every rank along {'+'.join(split.split)} computes {nodes} whole"
        if not mesh.shard_axis and mesh.ranks > 1:
            data = mesh.data_ranks
            hint = f" (they share them along shard: shard={data} in place of other axes)" if data > 1 else ""
            yield f"no ranks share states{hint}: stages 1 to 3 are stage 0"

    def _caps(self, training: TrainingGraph, mesh: Mesh) -> Sequence[float | None]:
        return bucket_choices(self._split(training, mesh).training) if self.caps is None else self.caps

    def _split(self, training: TrainingGraph, mesh: Mesh, settings: ShardSettings | None = None) -> SpmdProgram:
        """The step of a mesh, with its computation split as for all choices, or for these ``settings``."""
        settings = settings or ShardSettings(sequence=self.sequences[0])
        key = mesh, settings.sequence
        if key not in self._splits:
            check_planned(mesh)
            self.refused.check(training, mesh, 1)
            self._splits[key] = split_program(training, mesh, self._topology(mesh), settings)
        return self._splits[key]

    def _costs(self, training: TrainingGraph, mesh: Mesh, settings: ShardSettings) -> Iterator[PlanChoice]:
        self.advance(f"{mesh}: {settings}")
        yield from estimate_costs(self._split(training, mesh, settings), [settings], self._topology(mesh), None)

    def _topology(self, mesh: Mesh) -> Topology | None:
        return None if self.link is None else Topology.parse(self.link, mesh)

    def _stages(
        self, training: TrainingGraph, mesh: Mesh, partition: str, cap: float | None
    ) -> Iterator[PlanChoice]:  # fmt: skip
        split, topology, alike = self._split(training, mesh), self._topology(mesh), list[PlanChoice]()
        for stage in STAGES if mesh.shard_axis else STAGES[:1]:
            if stage == 0 and partition != PARTITIONS[0]:
                continue
            settings = ShardSettings(stage, partition, cap, sequence=self.sequences[0])
            self.advance(f"{mesh}: {settings}")
            if stage == 2 and not accumulates(split):
                # Without accumulation the step of stages 1 and 2 is the same (contract section 1).
                yield from (replace(choice, settings=settings) for choice in alike)
                continue
            alike = self.refused.admitted(f"{mesh}, {settings}", estimate_costs(split, [settings], topology, None))
            yield from alike
