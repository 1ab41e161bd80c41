"""The visible, ordered table of passes: a new pass is one file and one line here."""

from __future__ import annotations

from difflib import get_close_matches

from gopt.errors import OptionError
from gopt.passes import hoist_casts, keep_optimizers, prune, shard, statistics
from gopt.passes.base import Pass

PASSES: dict[str, Pass] = {
    each.name: each for each in (hoist_casts.PASS, shard.PASS, keep_optimizers.PASS, statistics.PASS, prune.PASS)
}
DEFAULT = ("hoist-casts", "shard", "keep-optimizers", "statistics", "prune")
"""The pipeline when the user says nothing."""


def find(name: str) -> Pass:
    """The pass of that name; raises OptionError with the nearest known name."""
    if name not in PASSES:
        close = get_close_matches(name, PASSES, 1)
        raise OptionError(
            f"no pass is called {name!r}",
            f"did you mean {close[0]!r}?" if close else f"there are {', '.join(PASSES)}",
        )
    return PASSES[name]
