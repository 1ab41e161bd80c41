"""Outputs paired with an input reached through gradients alone.

A narrow parameter beside a master is a cast of the master's new value, and reads no old value of its own. Where forward
and backward are element by element, the walk goes on through the gradient, to any narrow parameter of that shape."""

from __future__ import annotations

from collections.abc import Collection

from gopt.analysis.state_matching import match_copies, only_by_way_of, refuse_open
from gopt.analysis.step_skeleton import StepSkeleton


def paired_anew(step: StepSkeleton, gradients: Collection[str]) -> dict[str, str]:
    """Return the true pairs of such outputs, input -> output: as copies of new values; empty where already known.

    Pairs of the user stay. Raises UnsupportedError for an output that is no copy of a new value."""
    index, roles, gradients_known = step.index, step.roles, set(gradients)
    past: dict[str, None] = {}
    for name, output in step.updated.items():
        if name in roles.states or output not in step.tainted or name not in step.forward_values:
            continue
        if only_by_way_of(index, output, name, gradients_known, step.tainted):
            past[output] = None
    if not past:
        return {}
    pairs = {output: name for output, name in step.replaces.items() if output not in past}
    free = set(index.graph.inputs) - set(pairs.values()) - set(step.batch)
    copies = match_copies(index, pairs, free)
    for output in past:
        if output not in copies:
            refuse_open(index, {output: [step.replaces[output]]})
    changed = any(copies[output] != step.replaces[output] for output in past)
    return {copies[output]: output for output in past} if changed else {}
