"""The source against a trainer and the fullest server: nodes, bytes by kind, messages, traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gopt.artifact.pass_facts import RoleSize
from gopt.artifact.report_record import RankUsage, SourceEntry
from gopt.artifact.step_size import rank_sizes, source_sizes
from gopt.lower.rank_graph import RankGraph, RankState
from gopt.parameter_server.split import SplitStep


def role_sizes(split: SplitStep, source: SourceEntry, usages: Sequence[RankUsage]) -> Iterator[RoleSize]:
    """The source, a trainer, and the fullest server. ``usages``: of trainers, then servers."""
    trainers = split.options.trainers
    yield RoleSize(role="source", **source_sizes(split.training, source))
    yield _size(split, "trainer", usages[0], split.trainer_graphs.ranks, split.trainer_graphs.common)
    most = max(usages[trainers:], key=lambda usage: usage.nbytes.parameters + usage.nbytes.optimizer_states)
    number = most.rank - trainers
    graphs = [graph for graph in split.server_graphs.ranks if graph.rank == number]
    yield _size(split, f"server {number}", most, graphs, split.server_graphs.common)


def _size(
    split: SplitStep, role: str, usage: RankUsage, graphs: Sequence[RankGraph], common: Sequence[RankState]
) -> RoleSize:
    return RoleSize(role=role, initializers=_stored(split, role, graphs, common), **rank_sizes(usage, graphs))


def _stored(split: SplitStep, role: str, graphs: Sequence[RankGraph], common: Sequence[RankState]) -> int:
    """Bytes of initial values behind the files of a role. A trainer pulls servers' values."""
    values = split.training.graph.initializers
    pulled = split.placement.served if role == "trainer" and split.sync is None else ()
    apart = {*pulled, *(name for served in split.plan.tables.served for name in served.init)}
    states = {state.input: state for state in (*common, *(state for graph in graphs for state in graph.states))}
    names = {name: {piece.tensor for piece in state.pieces} for name, state in states.items()}
    nbytes = sum(
        state.type.nbytes
        for name, state in states.items()
        if names[name] and names[name] <= values.keys() and names[name].isdisjoint(apart)
    )
    constants = {name: array.nbytes for graph in graphs for name, array in graph.constants.items()}
    sizes = {name: tensor.nbytes for graph in graphs for name, tensor in graph.phase.graph.initializers.items()}
    return nbytes + sum((sizes | constants).values())
