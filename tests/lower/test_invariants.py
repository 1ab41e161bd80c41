"""Rank graphs that could go wrong are refused before anything is written: one thing is broken at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from helpers import source

import gopt
from gopt.analysis.training import StateKind
from gopt.api import Sharded
from gopt.errors import InvariantError
from gopt.ir.graph import COMM, SPMD, Node
from gopt.ir.types import TensorType
from gopt.lower.invariants import check_ranks
from gopt.lower.rank_graph import RankBlock, RankGraph, ShardRange
from gopt.records.mesh import Mesh

Break = Callable[[Sharded], None]


def made() -> Sharded:
    return gopt.shard(source("mlp_adamw"), 3)


def set_nodes(rank: RankGraph, nodes: Iterable[Node]) -> None:
    """Give a rank other nodes, all of them its own."""
    rank.blocks = [RankBlock.of(tuple(nodes), shared=False)]


def nodes_without(sharded: Sharded, wanted: Callable[[Node], bool]) -> None:
    """Take the first such node from rank 1."""
    rank = sharded.ranks[1]
    lost = next(node for node in rank.nodes if wanted(node))
    set_nodes(rank, [node for node in rank.nodes if node is not lost])


def is_call(node: Node) -> bool:
    return node.domain == COMM


def lost_node(sharded: Sharded) -> None:
    nodes_without(sharded, lambda node: node.op_type == "MatMul")


def lost_output(sharded: Sharded) -> None:
    loss = sharded.program.training.loss
    nodes_without(sharded, lambda node: loss in node.outputs)


def layout_operator(sharded: Sharded) -> None:
    rank = sharded.ranks[1]
    set_nodes(rank, [*rank.nodes, Node("LocalSlice", [], ["planted"], domain=SPMD, attributes={}, made_by="plant")])


def one_call_more(sharded: Sharded) -> None:
    rank = sharded.ranks[1]
    call = next(node for node in rank.nodes if is_call(node))
    again = [f"{name}.again" for name in call.outputs]
    more = Node(call.op_type, call.inputs, again, domain=COMM, attributes=dict(call.attributes))
    set_nodes(rank, [*rank.nodes, more])


def other_call(sharded: Sharded) -> None:
    rank = sharded.ranks[1]
    place, call = next((place, node) for place, node in enumerate(rank.nodes) if is_call(node))
    attributes = {**call.attributes, "reduce": "max"}
    other = Node(call.op_type, call.inputs, call.outputs, domain=COMM, attributes=attributes)
    set_nodes(rank, [*rank.nodes[:place], other, *rank.nodes[place + 1 :]])


def change_piece(sharded: Sharded, start: int, stop: int) -> None:
    """Move the ends of a piece on rank 1."""
    states = sharded.ranks[1].states
    place, state = next((place, state) for place, state in enumerate(states) if state.pieces)
    piece = state.pieces[0]
    moved = ShardRange(piece.tensor, piece.start + start, piece.stop + stop)
    states[place] = replace(state, pieces=(moved, *state.pieces[1:]))


def other_type_of_the_loss(sharded: Sharded) -> None:
    program = sharded.program
    program.graph.types[program.training.loss] = TensorType("float64", ())


def lost_state(sharded: Sharded) -> None:
    program = sharded.program
    place, state = next((place, state) for place, state in enumerate(program.states) if len(state.slices) > 1)
    program.states[place] = replace(state, slices=state.slices[1:])


BROKEN: dict[str, tuple[Break, str]] = {
    "node": (lost_node, r"rank 1: \w+ .* reads .*, which it does not have"),
    "output": (lost_output, "rank 1 does not compute 'loss'"),
    "layout operator": (layout_operator, "rank 1 keeps the layout operator"),
    "call more": (one_call_more, r"ranks 0 and 1 make \d+ and \d+ calls over shard"),
    "other call": (other_call, "ranks 0 and 1 differ in a call"),
    "gap": (lambda sharded: change_piece(sharded, 1, 0), "omit or repeat elements"),
    "overlap": (lambda sharded: change_piece(sharded, -1, 0), "omit or repeat elements"),
    "type": (other_type_of_the_loss, "output 'loss' changed its type"),
    "state": (lost_state, r"state .* is held 0 of \d+ elements"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_it_is_refused(what):
    plant, said = BROKEN[what]
    sharded = made()
    check_ranks(sharded.program, sharded.ranks, sharded.common, 1)
    plant(sharded)
    with pytest.raises(InvariantError, match=said):
        check_ranks(sharded.program, sharded.ranks, sharded.common, 1)


def test_a_scalar_that_is_some_ranks_own():
    sharded = made()
    scalars = {state.tensor for state in sharded.program.training.states if state.kind is StateKind.SCALAR}
    for rank in sharded.ranks:
        rank.states += [state for state in sharded.common if state.input in scalars]
    common = [state for state in sharded.common if state.input not in scalars]
    with pytest.raises(InvariantError, match=r"scalar state '.*' is not on every rank"):
        check_ranks(sharded.program, sharded.ranks, common, 1)


def counts(sharded: Sharded) -> dict[str, int]:
    """On how many things each invariant held, as the report shows it."""
    return {check.name: check.count for check in sharded.checks}


def test_every_invariant_is_held_against_something():
    found = counts(made())
    assert list(found) == ["reads", "calls", "pieces", "outputs", "updates", "scalars", "agreement"]
    assert all(found.values())


def test_some_ranks_alone_are_checked_as_far_as_that_goes():
    """Pieces of ranks that were not made cannot tile."""
    found = counts(gopt.shard(source("mlp_adamw"), 3, only_ranks=[1]))
    assert found["pieces"] == 0 and found["reads"]


def test_members_are_listed_once_for_each_group(monkeypatch):
    """A list of members for every rank takes the square of their number."""
    asked = []
    real = Mesh.members
    monkeypatch.setattr(Mesh, "members", lambda *given: asked.append(given[1:]) or real(*given))
    gopt.shard(source("mlp_sgd"), "dp=4,shard=8")
    assert len(asked) == len(set(asked)) == 4 + 8
