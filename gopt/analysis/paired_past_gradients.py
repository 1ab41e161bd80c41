"""Outputs that were paired with an input which they reach through gradients alone.

A narrow parameter beside its master is a cast of the master's new value, and reads no old value of its own. Where
forward and backward are element by element, the walk goes on through the gradient, to any narrow parameter of that
shape.
"""

from __future__ import annotations

from collections.abc import Collection

from gopt.analysis.state_matching import match_copies, refuse_open, walk_to_states
from gopt.analysis.step_skeleton import StepSkeleton


def paired_anew(step: StepSkeleton, gradients: Collection[str]) -> dict[str, str]:
    """Return what such outputs replace instead, input -> output: as copies of new values; empty where that is known.

    Pairs of the user stay. Raises UnsupportedError for an output that is no copy of a new value.
    """
    index, roles, known = step.index, step.roles, set(gradients)
    past: list[str] = []
    for name, output in step.updated.items():
        if name in roles.states or output not in step.tainted or name not in step.forward_values:
            continue
        if not _reads_old(step, name, output, known) and _reaches(step, name, output):
            past.append(output)
    if not past:
        return {}
    pairs = {output: name for output, name in step.replaces.items() if output not in past}
    free = set(index.graph.inputs) - set(pairs.values()) - set(step.batch)
    copies = match_copies(index, pairs, free)
    for output in past:
        if output not in copies:
            refuse_open({output: [step.replaces[output]]})
    changed = any(copies[output] != step.replaces[output] for output in past)
    return {copies[output]: output for output in past} if changed else {}


def _reads_old(step: StepSkeleton, name: str, output: str, gradients: set[str]) -> bool:
    """Return whether an output is made of an input element by element, past all gradients."""
    gradients.add(name)  # one set for all: it has the size of the gradients
    found = any(each == name for each, _ in walk_to_states(step.index, output, gradients, step.tainted))
    gradients.discard(name)
    return found


def _reaches(step: StepSkeleton, name: str, output: str) -> bool:
    return any(each == name for each, _ in walk_to_states(step.index, output, {name}, step.tainted))
