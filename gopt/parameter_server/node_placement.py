"""Assigns every state and node of a step to the servers, or to the trainers.

Servers have the nodes between the gradients and the new values of trained parameters. Trainers have the nodes between
the states that servers hold and the loss, the gradients and the trainers' own states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from gopt.analysis.training import Phase, State, StateKind, TrainingGraph
from gopt.analysis.updates import Updates
from gopt.errors import UnsupportedError
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, copied_from
from gopt.parameter_server.table_choice import TableChoice
from gopt.text.sanitize import show


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """The nodes and states of servers and of trainers.

    ``server_nodes`` and ``trainer_nodes``: nodes of the source in order; some may be in both.
    ``served``: states that servers hold. ``shared``: those that belong to no parameter with a gradient: every server
    has them. ``pulled``: those that trainers read. ``metrics``: outputs that servers compute. ``merged``: values that
    servers read merged over the trainers -> the trainer's value. ``late``: outputs that trainers compute from new
    values of servers.
    """

    server_nodes: tuple[Node, ...]
    trainer_nodes: tuple[Node, ...]
    served: frozenset[str]
    shared: tuple[str, ...]
    pulled: frozenset[str]
    metrics: tuple[str, ...]
    merged: dict[str, str]
    late: tuple[str, ...] = ()


def place_nodes(
    training: TrainingGraph, updates: Updates, weight: str = "", tables: TableChoice = TableChoice()
) -> NodePlacement:
    """Assign states and nodes to servers and trainers.

    ``weight``: a value trainers send with the gradients; ``tables``: parameters that trainers have in single rows
    alone. Raises UnsupportedError, with the value's name, for an update reading a batch or random numbers beside its
    gradients.
    """
    graph, index = training.graph, GraphIndex(training.graph)
    owned = {state.tensor for subgraph in updates.subgraphs.values() for state in subgraph.states}
    cut = {*training.gradients.values(), *training.shared}
    by_input = training.state_of()
    served = dict.fromkeys([*owned, *(state.tensor for state in training.states if _follows(index, state))])
    new = {by_input[name].updated: name for name in served}
    of_trainers, renewed = of_one_trainer(training, new)
    metrics = [name for name in training.metrics if _in_update(index, name) and name not in cut | of_trainers]
    server_ids: set[int] = set()
    reached: set[str] = set()
    pending = [*metrics, *(by_input[name].updated for name in served)]
    while pending:
        walked = _walk(index, pending, cut, server_ids, reached)
        more = [name for name in walked if name in by_input and name not in served]
        served.update(dict.fromkeys(more))
        pending = [by_input[name].updated for name in more]
    _refuse_batch(index, training, metrics, cut, server_ids, reached)
    local = [state.updated for state in training.states if state.tensor not in served]
    late = [name for name in training.metrics if name in of_trainers & renewed]
    wanted = [*training.losses, *(name for name in training.metrics if name not in (*metrics, *late)), *local]
    dense = (name for name in updates.subgraphs if name not in tables.parameters)
    wanted += [
        *(training.gradients[name] for name in dense),
        *training.shared.values(),
        *_read_of_tables(index, tables),
    ]
    trainer_ids: set[int] = set()
    read: set[str] = set()
    stops = {*training.shared, *tables.rows}
    _walk(index, [*wanted, *filter(None, [weight])], stops, trainer_ids, read)
    after: set[str] = set()
    _walk(index, late, stops | new.keys(), trainer_ids, after)
    read |= after | {new[name] for name in after if name in new}
    return NodePlacement(
        tuple(node for node in graph.nodes if id(node) in server_ids),
        tuple(node for node in graph.nodes if id(node) in trainer_ids),
        frozenset(served),
        tuple(state.tensor for state in training.states if state.tensor in served and state.tensor not in owned),
        frozenset(name for name in read if name in served),
        tuple(metrics),
        {value: owner for value, owner in training.shared.items() if value in reached},
        tuple(late),
    )


def of_one_trainer(training: TrainingGraph, new: Collection[str]) -> tuple[set[str], set[str]]:
    """Return the values computed by a single trainer for itself, from its batch and no merged gradient, and values made
    of ``new`` values of servers."""
    local = {*training.batch, *(state.tensor for state in training.states if state.kind is StateKind.STATISTIC)}
    random, renewed = {id(node) for node in training.random}, set(new)
    joint = {*training.gradients.values(), *training.shared}
    for node in training.graph.nodes:
        outputs, reads = [name for name in node.outputs if name and name not in new], node.reads
        if id(node) in random or not local.isdisjoint(reads):
            local.update(outputs)
        if not joint.isdisjoint(reads):
            joint.update(outputs)
        if not renewed.isdisjoint(reads):
            renewed.update(outputs)
    return local - joint, renewed


def _read_of_tables(index: GraphIndex, tables: TableChoice) -> Iterator[str]:
    """Yield the values trainers need for pulling and pushing rows."""
    for served in tables.served:
        yield from (lookup.ids for lookup in served.table.lookups)
        for term in served.table.terms:
            yield from (term.ids, term.rows)
            for node in term.scaling:
                yield from (name for name in node.reads if index.one_element(name))


def _in_update(index: GraphIndex, name: str) -> bool:
    node = index.producers.get(name)
    return node is not None and node.phase is Phase.UPDATE


def _follows(index: GraphIndex, state: State) -> bool:
    """Return whether a state follows the update: neither a running statistic nor frozen."""
    return state.kind is not StateKind.STATISTIC and _in_update(index, state.updated) and not _frozen(index, state)


def _frozen(index: GraphIndex, state: State) -> bool:
    """Return whether the new value of a state is the state itself."""
    return copied_from(index, state.updated) == state.tensor


def _walk(index: GraphIndex, targets: Iterable[str], cut: set[str], ids: set[int], reached: set[str]) -> list[str]:
    """Walk back from values to the inputs, but not past ``cut``. Adds nodes to ``ids`` and values to ``reached``;
    returns the values no node makes."""
    names: list[str] = []
    stack = [name for name in targets if name not in reached]
    while stack:
        name = stack.pop()
        if name in reached:
            continue
        reached.add(name)
        node = index.producers.get(name) if name not in cut else None
        if node is None:
            if name not in cut:
                names.append(name)
        elif id(node) not in ids:
            ids.add(id(node))
            stack += [name for name in node.reads if name not in reached]
    return names


def _behind(index: GraphIndex, name: str, cut: set[str]) -> set[str]:
    """The values behind a value, not past ``cut``."""
    reached: set[str] = set()
    _walk(index, [name], cut, set(), reached)
    return reached


def _refuse_batch(
    index: GraphIndex, training: TrainingGraph, metrics: Iterable[str], cut: set[str], ids: set[int], reached: set[str]
) -> None:
    random = next((node for node in training.random if id(node) in ids), None)
    if random is not None:
        raise UnsupportedError(
            f"the update draws random numbers at {show(random.label)}: servers would draw others than the source",
            "round to nearest, or shard the step with gopt shard",
        )
    batch = next((name for name in training.batch if name in reached), None)
    if batch is not None:
        reader = next(node for node in training.graph.nodes if id(node) in ids and batch in node.reads)
        raise UnsupportedError(
            f"the update reads the batch {show(batch)} beside the gradients, at {show(reader.label)}",
            "servers see no batch: --shared VALUE sends one number of the forward as its mean over the trainers",
            *(
                f"or leave output {show(name)} out of the step"
                for name in metrics
                if batch in _behind(index, name, cut)
            ),
        )
