"""Refuses forwards beside the forward of the losses, by name: a step is sharded with one forward in front of one
update.

A second forward reads new values of parameters, as a generator's behind a discriminator's update does. Ranks have that
update's result only after averaging the gradients and gathering the shards.

A hidden forward ends in no output: parameters read there alone would pass for statistics, and fed values for
settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gopt.analysis.step_skeleton import StepSkeleton
from gopt.errors import UnsupportedError
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, ancestors, copy_chain, descendants
from gopt.ir.types import FLOATS
from gopt.operators.kinds import CONTRACTIONS, COPIES

_MEETING = CONTRACTIONS | {"Gather"}
"""Operators in which a state meets values of the batch."""


def refuse_second_forward(step: StepSkeleton, losses: Sequence[str]) -> None:
    """Raise UnsupportedError where a new value is read beside the batch to make another state's new value.

    ``losses``: outputs that may be losses: the message names the first at the end of the second forward."""
    new = _new_values(step)
    if not new:
        return
    index = step.index
    behind = descendants(index, new)
    meeting = [node for node in index.graph.nodes if node.is_in(_MEETING) and _meets(step, node, behind)]
    if not meeting:
        return
    wanted, _ = ancestors(index, step.updated.values())
    node = next((node for node in meeting if id(node) in wanted), None)
    if node is None:
        return
    results = descendants(index, node.outputs)
    _, read = ancestors(index, node.reads)
    state = step.replaces[next(output for name, output in new.items() if name in read)]
    loss = next((f"the forward of {name!r}" for name in losses if name in results), "a second forward")
    trained = next(name for name, output in step.updated.items() if output in results)
    raise UnsupportedError(
        f"{loss} reads the new value of {state!r} at {node.label!r}, and {trained!r} is updated behind it: gopt shards "
        "a step with one forward before one update",
        "compute all losses from the old values, side by side, or make a step of its own for each update",
    )


def _new_values(step: StepSkeleton) -> dict[str, str]:
    """New values, and sources of their copies, for states that the forward reads and batches move -> output."""
    values: dict[str, str] = {}
    for name, output in step.updated.items():
        if name not in step.forward_values or output not in step.tainted or output in step.forward_values:
            continue
        values.update(dict.fromkeys(copy_chain(step.index.producers, output, COPIES), output))
    return {name: output for name, output in values.items() if name not in step.forward_values}


def _meets(step: StepSkeleton, node: Node, behind: set[str]) -> bool:
    read = [name for name in node.reads if name in step.tainted]
    return any(name in behind for name in read) and any(name not in behind for name in read)


def refuse_hidden_forward(step: StepSkeleton) -> None:
    """Raise UnsupportedError where a state read by no loss is multiplied with values of the batch, or any state with a
    fed tensor read by no loss, to make new values of states."""
    index = step.index
    for node, state, fed in _hidden_products(step):
        smooth = _smooth(index, node)
        trained = next((name for name, output in step.updated.items() if output in smooth), None)
        if trained is None:
            continue
        raise UnsupportedError(
            f"{state!r} is multiplied with {fed!r} at {node.label!r}, and {trained!r} is updated by what comes of it, "
            "but no output that could be a loss is made of it",
            "make the loss that it ends in an output of the step, one floating number",
            *([f"if {fed} differs from rank to rank, say --batch {fed}"] if fed in _settings(step) else []),
        )


def _hidden_products(step: StepSkeleton) -> Iterator[tuple[Node, str, str]]:
    """Yield each product, outside of the forward, of a value of the forward or of a fed tensor with a value made of
    states alone; the state; and the factor from the forward, or fed."""
    index, settings = step.index, _settings(step)
    inside = {name for node in index.graph.nodes if id(node) in step.forward for name in node.outputs}
    of_state: dict[str, str] = {}
    for name in step.updated:
        if not index.one_element(name) and index.graph.types[name].dtype in FLOATS:
            of_state[name] = name
    for node in index.graph.nodes:
        reads = node.reads
        if of_state.keys().isdisjoint(reads):
            continue
        states = [of_state[name] for name in reads if name in of_state]
        if node.is_in(CONTRACTIONS) and id(node) not in step.forward:
            for name in reads:
                feeds = name in settings or (name in step.tainted and (name in inside or name in step.batch))
                state = next((state for state in states if name in settings or state not in step.forward_values), None)
                if feeds and state is not None:
                    yield node, state, name
        if step.tainted.isdisjoint(reads) and settings.isdisjoint(reads):
            hidden = next((state for state in states if state not in step.forward_values), states[0])
            of_state.update((name, hidden) for name in node.outputs)


def _settings(step: StepSkeleton) -> set[str]:
    """Return the fed floating tensors outside of batch and states."""
    graph = step.index.graph
    fed = graph.inputs.keys() - graph.initializers.keys() - step.updated.keys() - set(step.batch)
    return {name for name in fed if graph.inputs[name].dtype in FLOATS and not step.index.one_element(name)}


def _smooth(index: GraphIndex, start: Node) -> set[str]:
    """Return the values that depend on a node through floating values."""
    smooth, begun = set[str](), False
    for node in index.graph.nodes:
        begun = begun or node is start
        if begun and (node is start or not smooth.isdisjoint(node.reads)):
            smooth.update(name for name in node.outputs if index.graph.type_of(name).dtype in FLOATS)
    return smooth
