"""Programs of ranks with parts of other sizes: where they must agree, a difference is refused before it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers import source

import gopt
from gopt.errors import InvariantError
from gopt.ir.graph import COMM, Node
from gopt.lower.variants import check_variants
from gopt.records.mesh import Mesh
from gopt.spmd.program import SpmdProgram


def program(mesh: str = "shard=2,tp=3") -> SpmdProgram:
    return gopt.shard(source("mlp_adamw"), Mesh.parse(mesh)).program


def test_each_class_of_ranks_has_a_program():
    made = program()
    assert [list(map(dict, each.places)) for each in made.variants] == [[{"tp": 0}], [{"tp": 1}, {"tp": 2}]]
    assert [made.variants.index(made.of(rank)) for rank in range(6)] == [0, 1, 1, 0, 1, 1]
    check_variants(made)


def test_even_parts_make_one_program():
    made = program("shard=2,tp=2")
    assert made.variants == (made,) and made.places == ()
    assert all(made.of(rank) is made for rank in range(4))


def over_tp(made: SpmdProgram) -> list[int]:
    nodes = enumerate(made.graph.nodes)
    return [place for place, node in nodes if node.domain == COMM and node.attributes["group"] == "tp"]


def lose_a_call(other: SpmdProgram) -> None:
    del other.graph.nodes[over_tp(other)[0]]


def another_call(other: SpmdProgram) -> None:
    place = over_tp(other)[0]
    node = other.graph.nodes[place]
    attributes = {"group": "tp", "reduce": "max"}
    other.graph.nodes[place] = Node(node.op_type, node.inputs, node.outputs, domain=COMM, attributes=attributes)


def other_states(other: SpmdProgram) -> None:
    other.states.reverse()


def other_buckets(other: SpmdProgram) -> None:
    other.layout = [names[::-1] for names in other.layout]


def other_common(other: SpmdProgram) -> None:
    place = next(at for at, state in enumerate(other.states) if state.input == "step")
    other.states[place] = replace(other.states[place], local=True)


PLANTED: list[tuple[Callable[[SpmdProgram], None], str]] = [
    (lose_a_call, "calls over groups that have parts"),
    (another_call, "calls over groups that have parts"),
    (other_states, "states"),
    (other_buckets, "buckets"),
    (other_common, "states that all ranks have"),
]


@pytest.mark.parametrize(("plant", "what"), PLANTED, ids=lambda each: getattr(each, "__name__", ""))
def test_a_difference_is_refused(plant, what):
    made = program()
    plant(made.others[0])
    with pytest.raises(InvariantError, match=rf"tp=0 and at tp=1 and tp=2 .* their {what} differ"):
        check_variants(made)


def test_calls_among_ranks_of_one_class_may_differ():
    made = program()
    calls = [node for node in made.others[0].graph.nodes if node.domain == COMM]
    assert any(node.attributes["group"] == "shard" for node in calls)
    mine = [node.attributes.get("cuts") for node in made.graph.nodes if node.domain == COMM]
    assert mine != [node.attributes.get("cuts") for node in calls], "the test is of nothing"
    check_variants(made)
