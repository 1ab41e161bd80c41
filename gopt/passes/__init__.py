"""The visible, ordered table of passes: a new pass is a file and a line here."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from gopt.errors import OptionError
from gopt.ir.graph import RECOMPUTE
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
from gopt.passes.offload import OFFLOAD
from gopt.text.suggestions import did_you_mean

Item = tuple[str, Mapping[str, Any]]
"""A pass's name, and options."""
_ALL = (
    pipeline_stages, tensor_parallel, hoist_casts, shard, refold_optimizers, statistics, stage_transfers,
    fuse_collectives, recompute, overlap, prune, offload,
)  # fmt: skip
PASSES: dict[str, Pass] = {item.PASS.name: item.PASS for item in _ALL}
"""Every pass, in the order in which passes run."""
ON_REQUEST = (RECOMPUTE, OFFLOAD)
DEFAULT = tuple(name for name in PASSES if name not in ON_REQUEST)
"""The default pipeline; a pass of an axis has no use on a mesh without it, and is left out."""


def joined(items: Sequence[Item], names: Container[str]) -> list[Item]:
    """``items`` and those passes of ``names`` that they lack, each before the passes that run behind it."""
    found, order = list(items), list(PASSES)
    for name in order:
        if name in names and all(name != other for other, _ in found):
            behind = order[order.index(name) + 1 :]
            at = next((place for place, (other, _) in enumerate(found) if other in behind), len(found))
            found.insert(at, (name, {}))
    return found


def find(name: str) -> Pass:
    """The pass of a name; raises OptionError with the nearest known name."""
    if name not in PASSES:
        raise OptionError(f"no pass is called {name!r}", did_you_mean(name, PASSES) or f"there are {', '.join(PASSES)}")
    return PASSES[name]
