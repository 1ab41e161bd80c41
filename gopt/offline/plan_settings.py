"""The options of ``gopt shard`` that ``gopt plan`` chooses."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gopt.api import ShardOptions
from gopt.passes.pipeline import Pipeline
from gopt.records.topology import Topology

STAGES = (0, 1, 2, 3)
PARTITIONS = ("flat", "rows", "whole")
ONE_FORWARD = "1f1b"
"""The default schedule."""


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """The options of ``shard`` set by a choice; ``bucket_mb`` None: the default.

    Each field is one dimension of the search space. ``accumulate``: micro-batches of a step; ``schedule``,
    ``recompute`` and ``offload``: None without stages, without a second computation, and with all on the device.
    """

    stage: int = 2
    partition: str = "flat"
    bucket_mb: float | None = None
    accumulate: int = 1
    schedule: str | None = None
    recompute: str | None = None
    offload: str | None = None

    def options(self) -> dict[str, Any]:
        """The fields of ``ShardOptions`` set by the choice; the last four where they are no defaults."""
        values = asdict(self)
        defaults = {"accumulate": 1, "schedule": None, "recompute": None, "offload": None}
        return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}

    def pipeline(self, topology: Topology | None) -> Pipeline:
        """The passes with these settings; tensor parallelism goes by the links of a topology."""
        link = None if topology is None else topology.text
        return ShardOptions(**self.options(), link=link).passes_to_run()

    def __str__(self) -> str:
        cap = "default buckets" if self.bucket_mb is None else f"buckets of {self.bucket_mb:g} MiB"
        steps = f"{self.accumulate} micro-batches" if self.accumulate > 1 else ""
        again = f"recompute {self.recompute}" if self.recompute else ""
        away = f"offload {self.offload}" if self.offload else ""
        parts = (f"stage {self.stage}", self.partition, cap, self.schedule, steps, again, away)
        return ", ".join(filter(None, parts))


DEFAULTS = ShardSettings()
