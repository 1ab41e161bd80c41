"""Phases of nodes that passes add, from the phases of what reads them."""

from __future__ import annotations

import pytest

from gopt.ir.graph import Node
from gopt.ir.phase import Phase, advance_phases, complete_phases

F, B, U = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE


def node(inputs: str, output: str, phase: Phase | None = None) -> Node:
    """A node of the source where it has a phase, else one that a pass added."""
    made = Node("Op", inputs.split(), [output], made_by="" if phase else "shard")
    made.phase = phase
    return made


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node("w", "part"), node("part x", "loss", F)], [F]),
        ([node("w", "part"), node("part", "g", B), node("part g", "w_out", U)], [B]),
        ([node("w", "part"), node("part x", "loss", F), node("part", "g", B)], [F]),
        ([node("w", "part"), node("part", "again"), node("again", "g", B)], [B, B]),
        ([node("x", "y", F), node("y", "dy", B), node("dy", "reduced"), node("reduced w", "w_out")], [U, U]),
        ([node("x", "mean", F), node("mean", "mean_out")], [F]),
        ([node("x", "mean", F), node("mean w", "w_out"), node("lr", "rate", U), node("rate w", "v_out")], [F, U]),
        ([node("", "constant"), node("w", "w_out")], [U, U]),
    ],
    ids=["forward", "backward", "both", "chain", "update", "statistic", "outputs", "lone"],
)
def test_a_node_has_the_phase_of_the_first_that_reads_it(nodes, expected):
    complete_phases(nodes)
    assert [each.phase for each in nodes if each.made_by] == expected


@pytest.mark.parametrize("phases", [(F, B), (B, F), (U, F)])
def test_a_node_of_two_results_has_the_phase_of_the_first_reader_of_either(phases):
    both = Node("Split", ["w"], ["a", "b"], made_by="shard")
    readers = sorted(
        [node("a", "y", phases[0]), node("b", "z", phases[1])], key=lambda each: list(Phase).index(each.phase)
    )
    complete_phases([both, *readers])
    assert both.phase is F


def test_a_phase_that_a_pass_gave_stays():
    given = node("w", "part", B)
    given.made_by = "tensor-parallel"
    complete_phases([given, node("part", "y", F)])
    assert given.phase is B


def test_nodes_of_the_source_without_a_phase_are_left_alone():
    unread = node("x", "nothing", F)
    unread.phase = None
    complete_phases([unread, node("x", "own")])
    assert unread.phase is None


@pytest.mark.parametrize(
    ("phase", "nodes", "expected"),
    [
        (U, [node("whole", "mean_out", U), node("x whole", "y", F)], F),
        (U, [node("whole", "mean_out", U), node("x whole", "dy", B)], B),
        (B, [node("whole", "dy", B), node("whole", "w_out", U)], B),
        (F, [node("whole", "dy", B)], F),
        (B, [], B),
    ],
)
def test_what_an_earlier_phase_reads_as_well_is_of_that_one(phase, nodes, expected):
    """The update of a statistic may stand in front of the forward that reads the same sum."""
    given = node("mean", "whole", phase)
    given.made_by = "tensor-parallel"
    below = node("whole", "twice", phase)
    below.made_by = "tensor-parallel"
    advance_phases([given, below, *nodes])
    assert (given.phase, below.phase) == (expected, phase)
    chain = node("whole", "again", U)
    chain.made_by, given.phase = "tensor-parallel", U
    advance_phases([given, chain, node("again", "y", F)])
    assert (given.phase, chain.phase) == (F, F)


def test_nodes_of_the_source_keep_their_phases():
    source, unknown = node("x", "mean", U), node("x", "lone")
    advance_phases([source, unknown, node("mean lone", "y", F)])
    assert (source.phase, unknown.phase) == (U, None)
