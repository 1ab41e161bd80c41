"""Two JSON records, compared leaf by leaf."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gopt.offline.diff.json_records import diff_json

RECORDS = st.recursive(
    st.integers(0, 2) | st.sampled_from(["a", "b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=6,
)


@given(RECORDS, RECORDS)
def test_a_line_where_they_differ_and_none_where_they_are_equal(a, b):
    assert bool(list(diff_json(a, b))) == (a != b)


@pytest.mark.parametrize(
    ("a", "b", "lines"),
    [
        ({"x": 1}, {"x": 2}, ["x: 1 -> 2"]),
        ({"x": {"y": 1}}, {"x": {"y": 1, "z": "é"}}, ['x.z added: "é"']),
        ({"x": [1, 2]}, {"x": [1, 3]}, ["x: [1, 2] -> [1, 3]"]),
        ({"r": [{"rank": 1, "v": 1}, {"rank": 0, "v": 5}]}, {"r": [{"rank": 0, "v": 5}, {"rank": 1, "v": 2}]},
         ["r[1].v: 1 -> 2", "r: order changed"]),
        ({"r": [{"name": "a"}]}, {"r": [{"name": "b"}]}, ["r[a] removed", "r[b] added"]),
        ({"r": [{"name": "a"}, {"name": "a"}]}, {"r": [{"name": "a"}]}, ["r: 0 of 2 entries gone, 0 of 1 new"]),
        ({"removed_ops": [{"name": "a"}]}, {"removed_ops": [{"name": "b"}]},
         ["removed_ops: 1 of 1 entries gone, 1 of 1 new"]),
        ({"x": "n" * 100}, {"x": 1}, [f'x: "{"n" * 76}... -> 1']),
    ],
)  # fmt: skip
def test_lines(a, b, lines):
    assert list(diff_json(a, b)) == lines
