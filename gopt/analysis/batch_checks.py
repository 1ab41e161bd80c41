"""Refuses inputs that the user names as batches and the update replaces."""

from __future__ import annotations

from gopt.analysis.state_matching import reachable_states
from gopt.analysis.step_skeleton import StepSkeleton
from gopt.errors import OptionError
from gopt.operators.kinds import COPIES, SUMS
from gopt.text.sanitize import show


class ReplacedBatchError(OptionError):
    """An input called a batch, and the output that replaces the input."""

    def __init__(self, name: str, output: str) -> None:
        what = f"{show(name)} is given as a batch, but it is a state"
        super().__init__(f"{what}: output {show(output)} replaces it", f"leave {show(name)} out of --batch")
        self.name, self.output = name, output


def refuse_state_batches(step: StepSkeleton) -> None:
    """Raise OptionError where the role map calls an input a batch and the update replaces that input.

    The map goes before the data flow, and may rightly exclude an input that merely looks like a state. The input is no
    batch, however, where an output outside of the forward adds to the input, or starts from the stored value of the
    input."""
    index, batch = step.index, set(step.roles.batch)
    if not batch:
        return
    free = batch - step.updated.keys()
    for name in batch & step.updated.keys():
        raise OptionError(f"{show(name)} is given as a batch and as a state", "leave one of them out")
    for output in index.graph.outputs:
        node = index.producers.get(output)
        if output in step.replaces or node is None or id(node) in step.forward:
            continue
        initializers = index.graph.initializers
        for name in reachable_states(index, output, free):
            if name in initializers or _adds(step, output, name):
                raise ReplacedBatchError(name, output)


def _adds(step: StepSkeleton, output: str, name: str) -> bool:
    """Return whether the output is the input plus an addend."""
    pending, visited = [(output, False)], set()
    while pending:
        value, added = pending.pop()
        if value == name and added:
            return True
        node = step.index.producers.get(value)
        if (value, added) not in visited and node is not None and node.is_in(SUMS | COPIES):
            pending += [(name, added or len(node.inputs) > 1) for name in node.inputs]
        visited.add((value, added))
    return False
