"""Each conversion by numbers: the reference of a collective, on values taken apart, gives what its row says."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from chunks import Array, Chunks, agrees, take_apart

from gopt.collectives.call import Call
from gopt.collectives.table import COLLECTIVES
from gopt.records.placements import (
    FLAG_COUNT,
    PER_MEMBER,
    REPLICATED,
    FlatShard,
    OnMember,
    Partial,
    PerMember,
    Placement,
    Replicated,
    Shard,
)
from gopt.spmd.calls import CONVERSIONS, CollectiveUse, beside, convert
from gopt.spmd.rules import Mismatch, Operand

MEMBERS = 4
CUTS = (0, 5, 5, 8, 12)
ROWS = (3, 0, 1, 2)
COLUMNS = (1, 0, 0, 1)
FLAT = FlatShard.whole(CUTS)
PLACEMENTS: list[Placement] = [
    REPLICATED, PER_MEMBER, OnMember(1), FLAT, FlatShard.whole((0, 3, 6, 9, 12)), FlatShard(CUTS, 0, 8),
    Shard(0, ROWS), Shard(1, COLUMNS), Partial("sum"), Partial("mean"), Partial("max"), Partial("min"),
    Partial("sum", FLAT),
]  # fmt: skip
USES: list[tuple[str, dict[str, object]]] = [
    *(("AllReduce", {"reduce": reduce}) for reduce in ("sum", "mean", "max", "min")),
    *(("Reduce", {"reduce": reduce, "root": 1}) for reduce in ("sum", "mean")),
    *(("ReduceScatter", {"reduce": reduce, "cuts": list(CUTS)}) for reduce in ("sum", "mean")),
    ("ReduceScatter", {"reduce": "mean", "axis": 0, "sizes": list(ROWS)}),
    ("AllGather", {"cuts": list(CUTS), "shapes": ["6,2"]}),
    ("AllGather", {"axis": 0, "sizes": list(ROWS)}),
    ("Broadcast", {"root": 1, "dtype": "float64", "shapes": ["6,2"]}),
    ("AllToAll", {"split_axis": 1, "concat_axis": 0, "split_sizes": list(COLUMNS), "concat_sizes": list(ROWS)}),
]  # fmt: skip

SCATTERED: list[tuple[str, dict[str, object]]] = [
    ("ReduceScatter", {"cuts": list(CUTS)}), ("ReduceScatter", {"axis": 0, "sizes": list(ROWS)}),
]  # fmt: skip


def execute(op_type: str, attributes: dict[str, object], chunks: Chunks, whole: Array) -> Chunks | None:
    """All members make the call; None where what they have does not go together."""
    record = COLLECTIVES[op_type]
    given: list[list[Array]] = [[] if chunk is None else [chunk] for chunk in chunks]
    if op_type == "Broadcast":
        given = [each if member == attributes["root"] else [] for member, each in enumerate(given)]
    elif not all(given):
        return None
    known = record.resolve({"group": "shard", **attributes})
    types = tuple((str(each[0].dtype), each[0].shape) for each in given if each)[:1]
    made = record.reference(Call(op_type, known, types, MEMBERS, 0), given)
    return [None if each is None else each[0] for each in made]


CUT = {"reduce": "mean", "cuts": list(CUTS)}
BY_ROWS = {"reduce": "mean", "axis": 0, "sizes": list(ROWS)}
TURNED = {"split_axis": 1, "concat_axis": 0, "split_sizes": list(COLUMNS), "concat_sizes": list(ROWS)}
ACCEPTED: list[tuple[str, dict[str, object], Placement, Placement]] = [
    *(("AllReduce", {"reduce": op}, PER_MEMBER, REPLICATED) for op in ("sum", "mean", "max", "min")),
    *(("AllReduce", {"reduce": op}, Partial(op), REPLICATED) for op in ("sum", "mean", "max", "min")),
    *(("AllReduce", {"reduce": op}, REPLICATED, REPLICATED) for op in ("mean", "max", "min")),
    ("AllReduce", {"reduce": "sum"}, Partial("count"), FLAG_COUNT),
    ("Reduce", {"reduce": "mean", "root": 1}, PER_MEMBER, OnMember(1)),
    ("Reduce", {"reduce": "sum", "root": 1}, Partial("sum"), OnMember(1)),
    ("ReduceScatter", CUT, PER_MEMBER, FLAT),
    ("ReduceScatter", {**CUT, "reduce": "sum"}, Partial("sum"), FLAT),
    ("ReduceScatter", BY_ROWS, PER_MEMBER, Shard(0, ROWS)),
    ("AllGather", {"cuts": list(CUTS), "shapes": ["6,2"]}, FLAT, REPLICATED),
    ("AllGather", {"axis": 0, "sizes": list(ROWS)}, Shard(0, ROWS), REPLICATED),
    ("Broadcast", {"root": 1}, OnMember(1), REPLICATED),
    ("Broadcast", {"root": 1}, REPLICATED, REPLICATED),
    ("AllToAll", TURNED, Shard(0, ROWS), Shard(1, COLUMNS)),
]


@pytest.mark.parametrize(("op_type", "attributes", "placement", "made"), ACCEPTED, ids=str)
def test_what_passes_write_is_accepted(op_type, attributes, placement, made):
    assert convert(CollectiveUse(op_type, attributes), Operand("x", placement)) == made


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize(("op_type", "more"), [("AllReduce", {}), ("Reduce", {"root": 1}), *SCATTERED], ids=str)
def test_members_own_values_are_reduced_as_terms(op_type, more, reduce):
    """What is made of them is their sum, mean, maximum or minimum, placed as the rule says: uneven and empty shards."""
    generator = np.random.default_rng(3)
    chunks: Chunks = [generator.standard_normal((6, 2)) for _ in range(MEMBERS)]
    attributes = {"reduce": reduce, **more}
    made = convert(CollectiveUse(op_type, attributes), Operand("x", PER_MEMBER))
    whole = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}[reduce](np.stack(chunks), axis=0)
    found = execute(op_type, attributes, chunks, whole)
    assert found is not None and not isinstance(made, PerMember)
    assert agrees(found, made, whole)


def test_a_number_of_flags_is_a_sum():
    """Each member has how many flags it saw; the sum over members is more than zero where one is set."""
    generator = np.random.default_rng(5)
    for whole in (np.array([0.0, 1.0, 0.0]), np.zeros(3), np.ones(3)):
        chunks: Chunks = [whole * generator.integers(0, 3, 3) for _ in range(MEMBERS - 1)] + [whole]
        made = convert(CollectiveUse("AllReduce", {"reduce": "sum"}), Operand("x", Partial("count")))
        found = execute("AllReduce", {"reduce": "sum"}, chunks, whole)
        assert found is not None and agrees(found, made, whole)


@pytest.mark.parametrize(("op_type", "attributes"), USES, ids=str)
def test_what_is_accepted_is_right(op_type, attributes):
    generator = np.random.default_rng(0)
    accepted = 0
    for placement in PLACEMENTS:
        whole = generator.standard_normal((6, 2))
        try:
            made = convert(CollectiveUse(op_type, attributes), Operand("x", placement))
        except Mismatch:
            continue
        accepted += 1
        if isinstance(made, PerMember) or isinstance(placement, PerMember):
            continue  # of members' own values there is no whole to compare with
        if isinstance(placement, (Shard, Replicated)) and op_type in ("AllReduce", "Reduce", "ReduceScatter"):
            continue  # what is made of them is another value: members' own, reduced
        chunks = execute(op_type, attributes, take_apart(whole, placement, MEMBERS, generator), whole)
        assert chunks is not None, placement
        assert agrees(chunks, made, whole), f"{placement} -> {made}"
    assert 0 < accepted < len(PLACEMENTS)


def test_every_collective_of_a_group_has_a_row():
    assert CONVERSIONS.keys() == {name for name, record in COLLECTIVES.items() if not record.pairwise}


WRONG = [
    ("AllReduce", {"reduce": "max"}, Partial("count"), "terms of a max"),
    ("AllReduce", {"reduce": "sum"}, OnMember(1), "a whole value of each member"),
    ("Reduce", {"reduce": "sum", "root": 1}, REPLICATED, "it is reduced already"),
    ("ReduceScatter", {"reduce": "sum", "cuts": list(CUTS)}, Partial("mean"), "terms of a sum"),
    ("AllGather", {"cuts": list(CUTS), "shapes": ["6,2"]}, FlatShard(CUTS, 0, 8), "as its cuts say"),
    ("AllToAll", {**TURNED, "concat_sizes": [2, 2, 1, 1]}, Shard(0, ROWS), "sharded along dimension 0"),
    ("Broadcast", {"root": 1}, Partial("sum"), "a value on member 1"),
    ("AllReduce", {"reduce": "sum"}, REPLICATED, "it is reduced already"),
    ("ReduceScatter", {"reduce": "sum", "cuts": list(CUTS)}, REPLICATED, "it is reduced already"),
    ("AllReduce", {"reduce": "mean"}, Partial("sum"), "terms of a mean"),
    ("AllReduce", {"reduce": "sum"}, Partial("max"), "terms of a sum"),
    ("AllReduce", {"reduce": "sum"}, Partial("sum", FLAT), "terms that all members have"),
    ("AllReduce", {"reduce": "mean"}, FLAT, "a whole value of each member"),
    ("AllGather", {"cuts": list(CUTS), "shapes": ["6,2"]}, FlatShard.whole((0, 3, 6, 9, 12)), "as its cuts say"),
    ("AllGather", {"cuts": list(CUTS), "shapes": ["6,2"]}, REPLICATED, "shards"),
    ("AllGather", {"axis": 0, "sizes": list(ROWS)}, PER_MEMBER, "shards"),
    ("AllGather", {"axis": 0, "sizes": list(ROWS)}, Shard(0, (2, 2, 1, 1)), "sharded along dimension 0"),
    ("Broadcast", {"root": 1}, PER_MEMBER, "a value on member 1"),
    ("Broadcast", {"root": 0}, OnMember(1), "a value on member 0"),
]


def test_rows_that_statistics_keep_are_joined():
    """Each member has rows of its own samples, and all get those of all."""
    generator = np.random.default_rng(7)
    chunks: Chunks = [generator.standard_normal((2, 3)) for _ in range(MEMBERS)]
    attributes = {"axis": 0, "sizes": [2] * MEMBERS}
    call = CollectiveUse("AllGather", attributes, statistic=True)
    whole = np.concatenate(chunks)
    found = execute("AllGather", attributes, chunks, whole)
    assert convert(call, Operand("x", PER_MEMBER)) == REPLICATED
    assert found is not None and agrees(found, REPLICATED, whole)


@pytest.mark.parametrize(("op_type", "attributes", "placement", "expected"), WRONG, ids=str)
def test_what_is_wrong_is_refused(op_type, attributes, placement, expected):
    with pytest.raises(Mismatch) as caught:
        convert(CollectiveUse(op_type, attributes), Operand("x", placement))
    assert expected in caught.value.expected


@pytest.mark.parametrize(("op_type", "placement"), product(("AllReduce", "AllGather"), (REPLICATED, PER_MEMBER)))
def test_a_call_of_the_source_is_taken_at_its_word(op_type, placement):
    attributes: dict[str, object] = {"reduce": "sum", "axis": 0, "sizes": [1, 1, 1, 1]}
    assert convert(CollectiveUse(op_type, attributes, own=False), Operand("x", placement)) == REPLICATED


def test_a_reduction_passes_only_through_terms_with_which_it_may_change_places():
    """The maximum over one axis of terms of a sum over another is not a term."""
    for reduce, op, fits in (("max", "sum", False), ("sum", "max", False), ("mean", "sum", True), ("max", "max", True)):
        call, operand = CollectiveUse("AllReduce", {"reduce": reduce}), Operand("x", Partial(op))
        assert beside(call, operand, moved=False) == Partial(op)
        if fits:
            assert beside(call, operand, moved=True) == Partial(op)
            continue
        with pytest.raises(Mismatch):
            beside(call, operand, moved=True)


def test_what_a_call_outside_the_axis_leaves():
    """Members' own values stay so, and a gather of terms is one of terms."""
    reduces = CollectiveUse("AllReduce", {"reduce": "max"})
    assert beside(reduces, Operand("x", PER_MEMBER), moved=True) == PER_MEMBER
    assert beside(reduces, Operand("x", REPLICATED), moved=True) == REPLICATED
    assert beside(CollectiveUse("AllGather", {}), Operand("x", Partial("max")), moved=True) == Partial("max")


def test_a_root_of_several_axes_in_a_source():
    """It is no member of one axis: each member has something of its own."""
    call = CollectiveUse("Reduce", {"reduce": "mean", "root": 0}, alone=False, own=False)
    assert convert(call, Operand("x", PER_MEMBER)) == PER_MEMBER
    alone = CollectiveUse("Reduce", {"reduce": "mean", "root": 0}, own=False)
    assert convert(alone, Operand("x", PER_MEMBER)) == OnMember(0)


def test_what_a_source_scatters_along_a_dimension_is_each_members_own():
    """Types of a source are those of one rank; cuts are the same in both."""
    own = CollectiveUse("ReduceScatter", BY_ROWS, own=False)
    assert convert(own, Operand("x", PER_MEMBER)) == PER_MEMBER
    assert convert(CollectiveUse("ReduceScatter", CUT, own=False), Operand("x", PER_MEMBER)) == FLAT


def test_a_gather_over_several_axes_takes_no_buckets():
    """Cuts of the group are not those of the axis."""
    call = CollectiveUse("AllGather", {"cuts": list(CUTS), "shapes": ["6,2"]}, alone=False)
    with pytest.raises(Mismatch, match="as its cuts say"):
        convert(call, Operand("x", FLAT))


def test_a_root_of_two_axes_is_refused():
    with pytest.raises(Mismatch):
        convert(CollectiveUse("Reduce", {"reduce": "mean", "root": 0}, alone=False), Operand("x", PER_MEMBER))


def test_over_several_axes_places_in_the_group_are_no_places_along_one():
    call = CollectiveUse("ReduceScatter", {"reduce": "mean", "cuts": list(CUTS)}, alone=False)
    assert convert(call, Operand("x", PER_MEMBER)) == PER_MEMBER


def test_the_first_members_statistics_will_do_for_all_and_no_other_value_will():
    sent = {"root": 0, "dtype": "float32", "shapes": ["2"]}
    own = Operand("running_mean", PER_MEMBER)
    assert convert(CollectiveUse("Broadcast", sent, statistic=True), own) == REPLICATED
    with pytest.raises(Mismatch, match="a value on member 0"):
        convert(CollectiveUse("Broadcast", sent), own)


@pytest.mark.parametrize("given", [Partial("sum"), OnMember(1), Shard(0, ROWS), FLAT])
def test_a_call_without_a_row_takes_whole_values(given):
    call = CollectiveUse("Gossip", {})
    assert convert(call, Operand("x", REPLICATED)) == convert(call, Operand("x", PER_MEMBER)) == PER_MEMBER
    with pytest.raises(Mismatch) as caught:
        convert(call, Operand("x", given))
    assert caught.value.expected == "a whole value of each member"


def test_a_gather_takes_shards():
    """Terms of a sum, and a value of one member, are not parts."""
    for given in (Partial("sum"), OnMember(1)):
        with pytest.raises(Mismatch) as caught:
            convert(CollectiveUse("AllGather", {"axis": 0, "sizes": list(ROWS)}, own=False), Operand("x", given))
        assert caught.value.expected == "shards"


def test_an_all_to_all_over_several_axes_takes_no_shards():
    """Places in the group are not places along the axis."""
    at = {"split_axis": 1, "concat_axis": 0, "split_sizes": list(COLUMNS), "concat_sizes": list(ROWS)}
    assert convert(CollectiveUse("AllToAll", at), Operand("x", Shard(0, ROWS))) == Shard(1, COLUMNS)
    with pytest.raises(Mismatch) as caught:
        convert(CollectiveUse("AllToAll", at, alone=False), Operand("x", Shard(0, ROWS)))
    assert caught.value.expected.startswith("a value sharded along dimension 0")


@pytest.mark.parametrize("given", [REPLICATED, PER_MEMBER])
def test_an_all_to_all_of_whole_values_leaves_each_member_something_else(given):
    """By numbers: what members get differs, also where they all had the same."""
    made = convert(
        CollectiveUse("AllToAll", {**TURNED, "split_axis": 0, "split_sizes": list(ROWS)}), Operand("x", given)
    )
    assert made == PER_MEMBER
    whole = np.arange(12.0).reshape(6, 2)
    chunks = take_apart(whole, given, MEMBERS, np.random.default_rng(4))
    at = {"split_axis": 0, "concat_axis": 0, "split_sizes": list(ROWS), "concat_sizes": [6] * MEMBERS}
    found = execute("AllToAll", at, chunks, whole)
    assert found is not None and [each.shape for each in found] == [(MEMBERS * rows, 2) for rows in ROWS]


@pytest.mark.parametrize("given", [Partial("sum"), OnMember(1), FLAT, Shard(1, COLUMNS)])
def test_an_all_to_all_takes_no_other_parts(given):
    with pytest.raises(Mismatch, match="a value sharded along dimension 0"):
        convert(CollectiveUse("AllToAll", TURNED), Operand("x", given))


@pytest.mark.parametrize("given", [OnMember(1), FlatShard(CUTS, 0, 4), Partial("sum"), FLAT])
@pytest.mark.parametrize("more", [{}, {"statistic": True}, {"own": False}], ids=str)
def test_over_several_axes_a_root_is_no_member(given, more):
    """A value on the member of that number along one axis is not on the root; no kind of call changes that."""
    with pytest.raises(Mismatch, match="a value on member 1"):
        convert(CollectiveUse("Broadcast", {"root": 1}, alone=False, **more), Operand("x", given))


@pytest.mark.parametrize("given", [OnMember(0), Partial("sum"), FLAT])
def test_a_statistic_that_is_sent_is_a_whole_value(given):
    with pytest.raises(Mismatch, match="a value on member 1"):
        convert(CollectiveUse("Broadcast", {"root": 1}, statistic=True), Operand("x", given))


def test_members_own_data_that_a_source_sends_stay_their_own():
    """To broadcast them reduces nothing: a gradient may not be made of one member's batch."""
    call = CollectiveUse("Broadcast", {"root": 1}, own=False)
    assert convert(call, Operand("x", PER_MEMBER)) == PER_MEMBER
    assert convert(call, Operand("x", OnMember(1))) == REPLICATED
    with pytest.raises(Mismatch, match="a value on member 1"):
        convert(call, Operand("x", OnMember(0)))
