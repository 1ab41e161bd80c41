"""The options of ``gopt shard`` that ``gopt plan`` chooses."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from gopt.api import ShardOptions
from gopt.passes.pipeline import Pipeline
from gopt.records.topology import Topology

STAGES = (0, 1, 2, 3)
PARTITIONS = ("flat", "rows", "whole")
ONE_FORWARD = "1f1b"
"""The default schedule."""
_TENSOR = "tensor-parallel"
SEQUENCES = (False, True)
"""Sequence parallelism: without for all choices, with for the best."""


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """The options of ``shard`` set by a choice; ``bucket_mb`` None: the default.

    Each field is one dimension of the search space. ``accumulate``: micro-batches of a step; ``schedule``,
    ``recompute`` and ``offload``: None without stages, without a second computation, and with all on the device;
    ``sequence``: ranks along ``tp`` divide the tokens between products.
    """

    stage: int = 2
    partition: str = "flat"
    bucket_mb: float | None = None
    accumulate: int = 1
    schedule: str | None = None
    recompute: str | None = None
    offload: str | None = None
    sequence: bool = False

    def to_json(self) -> dict[str, Any]:
        """The fields by name; the last five where they are no defaults."""
        always = {"stage", "partition", "bucket_mb"}
        return {
            name: value for name, value in asdict(self).items() if name in always or value != getattr(DEFAULTS, name)
        }

    def applied(self, options: ShardOptions) -> ShardOptions:
        """The options with the choice filled in."""
        values, passes = self.to_json(), dict(options.passes)
        if values.pop("sequence", False):
            passes[_TENSOR] = {**passes.get(_TENSOR, {}), "sequence": True}
        return replace(options, **values, passes=passes)

    @staticmethod
    def sequences(options: ShardOptions) -> tuple[bool, ...]:
        """The values of ``sequence`` to choose from: the value given by the user, or both."""
        if "sequence" not in options.passes.get(_TENSOR, {}):
            return SEQUENCES
        return tuple(each.options.sequence for each in options.passes_to_run().stages if each.spec.name == _TENSOR)

    def pipeline(self, topology: Topology | None) -> Pipeline:
        """The passes with these settings; tensor parallelism goes by the links of a topology."""
        link = None if topology is None else topology.text
        return self.applied(ShardOptions(link=link)).passes_to_run()

    def __str__(self) -> str:
        cap = "default buckets" if self.bucket_mb is None else f"buckets of {self.bucket_mb:g} MiB"
        steps = f"{self.accumulate} micro-batches" if self.accumulate > 1 else ""
        again = f"recompute {self.recompute}" if self.recompute else ""
        away = f"offload {self.offload}" if self.offload else ""
        tokens = "sequence parallelism" if self.sequence else ""
        parts = (f"stage {self.stage}", self.partition, cap, self.schedule, steps, again, away, tokens)
        return ", ".join(filter(None, parts))


DEFAULTS = ShardSettings()
