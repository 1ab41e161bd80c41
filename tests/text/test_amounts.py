"""Small words of reports: ranges of ranks, ranks that are alike, bytes for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gopt.documents.records import to_document
from gopt.records.pass_facts import PassRecord
from gopt.text.amounts import balance, format_bytes, format_seconds, group_ranks, rank_ranges


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([0], "0"),
        ([0, 1, 2, 5], "0-2,5"),
        ([0, 2, 4], "0,2,4"),
        ([3, 4], "3-4"),
        ([7, 9, 10], "7,9-10"),
        ([0, 2, 1, 3], "0,2,1,3"),
    ],
)
def test_ranges(ranks, text):
    assert rank_ranges(ranks) == text


@given(st.sets(st.integers(0, 40)))
def test_ranges_name_every_rank_once(ranks):
    parts = [part.split("-") for part in rank_ranges(sorted(ranks)).split(",") if part]
    assert [rank for first, *last in parts for rank in range(int(first), int(*last or [first]) + 1)] == sorted(ranks)


def test_ranks_of_which_the_same_is_told():
    assert group_ranks([(0, "a"), (1, "b"), (2, "a"), (3, "c"), (4, "b")]) == [([0, 2], "a"), ([1, 4], "b"), ([3], "c")]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (-2048, "-2.0 KiB"), (1 << 30, "1.0 GiB"),
     (3 << 40, "3.0 TiB"), (5000 << 40, "5000.0 TiB")],
)  # fmt: skip
def test_bytes(nbytes, text):
    assert format_bytes(nbytes) == text


def test_a_note_stands_only_where_there_is_one():
    record = PassRecord("prune", {"a": 1}, {"nodes": 2}, "")
    assert to_document(record) == {"name": "prune", "options": {"a": 1}, "facts": {"nodes": 2}}
    assert to_document(PassRecord("prune", {}, {}, "nothing to do"))["note"] == "nothing to do"


def test_balance_is_the_fullest_over_the_mean():
    assert balance((30, 10, 20)) == 1.5
    assert balance((5, 5)) == balance((7,)) == balance((0, 0)) == balance(()) == 1.0
    assert balance((8, 0)) == 2.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (1.5e-7, "0.150 us"),
        (9.999e-4, "1.00 ms"),
        (0.12345, "123 ms"),
        (2.0, "2.00 s"),
        (345.0, "345 s"),
    ],
)
def test_seconds_for_people(seconds, text):
    assert format_seconds(seconds) == text
