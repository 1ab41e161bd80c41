"""Refuses a second forward: one that reads new values of parameters, such as a generator's behind a discriminator's
update.

Its gradients stand behind an update of the same step. Ranks have that update's result only once they have averaged its
gradients and gathered their shards, and a step is sharded with one forward in front of one update.
"""

from __future__ import annotations

from collections.abc import Sequence

from gopt.analysis.graph_walks import GraphIndex, ancestors, descendants
from gopt.analysis.step_skeleton import StepSkeleton
from gopt.errors import UnsupportedError
from gopt.ir.graph import Node

_MEETS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Gather")
"""Operators in which a parameter meets values of the batch."""


def refuse_second_forward(step: StepSkeleton, losses: Sequence[str]) -> None:
    """Raise UnsupportedError where a new value is read beside the batch to make another state's new value.

    ``losses``: outputs that may be one: the message names the first that the second forward ends in.
    """
    new = _new_values(step)
    if not new:
        return
    index = step.index
    behind = descendants(index, new)
    meeting = [node for node in index.graph.nodes if node.is_a(*_MEETS) and _meets(step, node, behind)]
    if not meeting:
        return
    wanted, _ = ancestors(index, step.updated.values())
    node = next((node for node in meeting if id(node) in wanted), None)
    if node is None:
        return
    made = descendants(index, node.outputs)
    source = _source(index, node, new)
    state = step.replaces[new[source]]
    loss = next((f"the forward of {name!r}" for name in losses if name in made), "a second forward")
    trained = next(name for name, output in step.updated.items() if output in made)
    raise UnsupportedError(
        f"{loss} reads the new value of {state!r} at {node.label!r}, and {trained!r} is updated behind it: gopt shards "
        "a step with one forward before one update",
        "compute all losses from the old values, side by side, or make a step of its own for each update",
    )


def _new_values(step: StepSkeleton) -> dict[str, str]:
    """New values, and what they are copies of, of states that the forward reads and batches move -> their outputs."""
    found: dict[str, str] = {}
    for name, output in step.updated.items():
        if name not in step.forward_values or output not in step.tainted or output in step.forward_values:
            continue
        value, node = output, step.index.producers.get(output)
        found[value] = output
        while node is not None and node.is_a("Identity", "Cast"):
            value = node.inputs[0]
            node = step.index.producers.get(value)
            found[value] = output
    return {name: output for name, output in found.items() if name not in step.forward_values}


def _meets(step: StepSkeleton, node: Node, behind: set[str]) -> bool:
    read = [name for name in node.reads if name in step.tainted]
    return any(name in behind for name in read) and any(name not in behind for name in read)


def _source(index: GraphIndex, node: Node, new: dict[str, str]) -> str:
    """The new value that a node reads, or the first of which it is made."""
    direct = [name for name in node.reads if name in new]
    return direct[0] if direct else next(name for name in new if name in ancestors(index, node.reads)[1])
