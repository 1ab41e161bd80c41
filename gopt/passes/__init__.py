"""The visible, ordered table of passes: a new pass is a file and a line here."""

from __future__ import annotations

from gopt.errors import OptionError
from gopt.passes import (
    fuse_collectives,
    hoist_casts,
    overlap,
    prune,
    recompute,
    refold_optimizers,
    shard,
    statistics,
    tensor_parallel,
)
from gopt.passes.base import Pass
from gopt.text.suggestions import did_you_mean

_ALL = (tensor_parallel, hoist_casts, shard, refold_optimizers, statistics, fuse_collectives, recompute, overlap, prune)
PASSES: dict[str, Pass] = {item.PASS.name: item.PASS for item in _ALL}
DEFAULT = (
    "tensor-parallel",
    "hoist-casts",
    "shard",
    "refold-optimizers",
    "statistics",
    "fuse-collectives",
    "overlap",
    "prune",
)
"""The default pipeline."""


def find(name: str) -> Pass:
    """The pass of a name; raises OptionError with the nearest known name."""
    if name not in PASSES:
        raise OptionError(f"no pass is called {name!r}", did_you_mean(name, PASSES) or f"there are {', '.join(PASSES)}")
    return PASSES[name]
