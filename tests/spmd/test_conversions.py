"""Which mapping brings a value from one placement to another, and what it sends."""

from __future__ import annotations

from math import inf

import pytest

from gopt.records.placements import PER_MEMBER, REPLICATED, OnMember, Partial, Placement, Shard, Window, WindowTerms
from gopt.spmd.conversions import Conversion, MappingKind
from gopt.spmd.halo import Halo

WINDOW = Window(0, ((-1, 18), (16, 34)), 33)
TERMS = WindowTerms(0, WINDOW.ranges, 33)
ROWS, COLUMNS, SUM = Shard(0, (17, 16)), Shard(1, (33, 32)), Partial("sum")
TABLE: list[tuple[Placement, Placement, MappingKind | None]] = [
    (SUM, REPLICATED, MappingKind.REDUCE),
    (SUM, ROWS, MappingKind.REDUCE_SCATTER),
    (ROWS, REPLICATED, MappingKind.GATHER),
    (REPLICATED, ROWS, MappingKind.SCATTER),
    (ROWS, COLUMNS, MappingKind.TRANSPOSE),
    (Shard(0, (17, 16), runs=2), Shard(0, (34, 32)), MappingKind.TRANSPOSE),
    (ROWS, Shard(0, (16, 17)), MappingKind.HALO_EXCHANGE),
    (ROWS, WINDOW, MappingKind.HALO_EXCHANGE),
    (TERMS, ROWS, MappingKind.HALO_SUM),
    (REPLICATED, WINDOW, MappingKind.SCATTER),
    (ROWS, Shard(1, (17, 16)), MappingKind.TRANSPOSE),
    (COLUMNS, WINDOW, None),
    (Shard(0, (9, 7)), WINDOW, None),
    (Shard(0, (9, 7), runs=2), WINDOW, None),
    (TERMS, REPLICATED, None),
    (TERMS, COLUMNS, None),
    (TERMS, Shard(1, (17, 16)), None),
    (TERMS, Shard(0, (9, 7)), None),
    (WINDOW, REPLICATED, None),
    (ROWS, ROWS, MappingKind.NOTHING),
    (SUM, SUM, MappingKind.NOTHING),
    (REPLICATED, REPLICATED, MappingKind.NOTHING),
    (REPLICATED, SUM, None),
    (ROWS, SUM, None),
    (SUM, Partial("max"), None),
    (PER_MEMBER, REPLICATED, None),
    (REPLICATED, OnMember(0), None),
]


@pytest.mark.parametrize(("before", "after", "mapping"), TABLE)
def test_the_mapping_between_two_placements(before, after, mapping):
    assert Conversion(before, after).mapping == mapping


@pytest.mark.parametrize(("before", "after", "mapping"), TABLE)
def test_what_a_member_sends(before, after, mapping):
    """On a ring: (N-1)/N of the bytes, twice for a sum on all members, 1/N of it where parts change places.

    From parts of a dimension to others of the same, a value is gathered and cut.
    """
    across = isinstance(before, Shard) and isinstance(after, Shard) and before.dim != after.dim
    shares = {
        None: inf, MappingKind.NOTHING: 0, MappingKind.SCATTER: 0, MappingKind.REDUCE: 1.5,
        MappingKind.REDUCE_SCATTER: 0.75, MappingKind.GATHER: 0.75, MappingKind.TRANSPOSE: 0.75 / 4 if across else 0.75,
    }  # fmt: skip
    if mapping in (MappingKind.HALO_EXCHANGE, MappingKind.HALO_SUM) or (isinstance(before, Shard) and before.runs > 1):
        return  # below
    assert Conversion(before, after).sent(1000, 4) == pytest.approx(shares[mapping] * 1000)


def test_every_mapping_has_a_row():
    assert {mapping for *_, mapping in TABLE} == {*MappingKind, None}


def test_a_sum_costs_what_its_two_halves_cost():
    whole = Conversion(SUM, REPLICATED).sent(4096, 8)
    assert whole == Conversion(SUM, ROWS).sent(4096, 8) + Conversion(ROWS, REPLICATED).sent(4096, 8)


def test_a_halo_costs_the_strips_of_others():
    """Member 0 hands out place 16, member 1 place 17: on a ring each of them sends one of 33."""
    for one in (Conversion(ROWS, WINDOW), Conversion(TERMS, ROWS)):
        assert one.sent(3300, 2) == pytest.approx(100)
    assert Conversion(ROWS, Shard(0, (16, 17))).sent(3300, 2) == pytest.approx(100)
    assert Conversion(ROWS, Window(0, ((0, 3), (17, 33)), 33)).sent(3300, 2) == 0
    wide = Window(0, ((0, 33), (0, 33)), 33)
    assert Conversion(ROWS, wide).sent(3300, 2) == pytest.approx(1700), "all of the other's part: that of a gather"


def test_runs_that_are_shared_out_anew_are_gathered():
    assert Conversion(Shard(0, (17, 16), runs=2), Shard(0, (34, 32))).sent(1000, 2) == pytest.approx(500)


def test_a_dimension_of_one_place_and_of_none():
    assert Conversion(Shard(0, (1, 0)), Shard(0, (0, 1))).sent(100, 2) == 100
    assert Conversion(Shard(0, (0, 0)), Window(0, ((0, 0), (-1, 1)), 0)).sent(0, 2) == 0


def test_of_several_runs_no_halo_is_made():
    rows, terms = Shard(0, (17, 17)), WindowTerms(0, WINDOW.ranges, 34)
    two = Shard(0, (9, 8), runs=2)
    for before, after in ((terms, two), (rows, two), (two, rows), (two, Window(0, WINDOW.ranges, 34))):
        assert Conversion(before, after).halo is None
    assert Conversion(terms, rows).halo == Halo((17, 17), WINDOW.ranges, "sum")


def test_the_parts_and_windows_that_a_halo_connects():
    assert Conversion(ROWS, WINDOW).halo == Halo((17, 16), WINDOW.ranges)
    assert Conversion(ROWS, Shard(0, (16, 17))).halo == Halo((17, 16), ((0, 16), (16, 33)))
    assert Conversion(REPLICATED, WINDOW).halo == Halo((33,), WINDOW.ranges, "cut")
    assert Conversion(ROWS, ROWS).halo is Conversion(ROWS, Shard(1, (17, 16))).halo is None
