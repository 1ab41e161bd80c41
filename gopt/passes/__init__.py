"""The visible, ordered table of passes: a new pass is a file and a line here."""

from __future__ import annotations

from gopt.errors import OptionError
from gopt.passes import (
    fuse_collectives,
    hoist_casts,
    offload,
    overlap,
    pipeline_stages,
    prune,
    recompute,
    refold_optimizers,
    shard,
    stage_transfers,
    statistics,
    tensor_parallel,
)
from gopt.passes.base import Pass
from gopt.text.suggestions import did_you_mean

_ALL = (
    pipeline_stages, tensor_parallel, hoist_casts, shard, refold_optimizers, statistics, stage_transfers,
    fuse_collectives, recompute, overlap, prune,
    offload,
)  # fmt: skip
PASSES: dict[str, Pass] = {item.PASS.name: item.PASS for item in _ALL}
DEFAULT = (
    "pipeline",
    "tensor-parallel",
    "hoist-casts",
    "shard",
    "refold-optimizers",
    "statistics",
    "stage-transfers",
    "fuse-collectives",
    "overlap",
    "prune",
)
"""The default pipeline; a pass of an axis has no use on a mesh without it, and is left out."""


def find(name: str) -> Pass:
    """The pass of a name; raises OptionError with the nearest known name."""
    if name not in PASSES:
        raise OptionError(f"no pass is called {name!r}", did_you_mean(name, PASSES) or f"there are {', '.join(PASSES)}")
    return PASSES[name]
