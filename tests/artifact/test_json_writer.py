"""Manifest and report as text: every parser reads it, and one change is one line of a diff."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gopt.artifact.json_writer import appended, pretty_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4))
def test_it_is_read_back_as_it_was(document):
    assert json.loads(pretty_json(document)) == document


@given(st.dictionaries(st.text(max_size=3), VALUES, min_size=1, max_size=3), VALUES)
def test_a_last_key_may_come_later(document, value):
    document.pop("last", None)
    if document:
        assert appended(pretty_json(document), "last", value) == pretty_json({**document, "last": value})


def test_one_record_is_one_line():
    document = {
        "format": "é", "mesh": {"axes": [], "ranks": 2}, "ranks": [{"rank": 0, "state": [1, 2]}, {"rank": 1}],
        "common": {"state": [{"input": "w"}, {"input": "b"}], "inputs": []}, "none": [],
    }  # fmt: skip
    assert pretty_json(document) == (
        '{\n"format": "é",\n"mesh": {"axes": [], "ranks": 2},\n'
        '"ranks": [\n{"rank": 0, "state": [1, 2]},\n{"rank": 1}\n],\n'
        '"common": {\n"state": [\n{"input": "w"},\n{"input": "b"}\n],\n"inputs": []\n},\n"none": []\n}\n'
    )


@given(st.lists(VALUES.filter(lambda value: isinstance(value, dict)), min_size=1, max_size=4))
def test_a_table_has_one_line_a_row_whatever_is_in_it(rows):
    lines = pretty_json({"rows": rows}).split("\n")[2:-3]
    assert [json.loads(line.removesuffix(",")) for line in lines] == rows


def test_what_is_no_number_is_not_written():
    with pytest.raises(ValueError, match="not JSON compliant"):
        pretty_json({"loss": float("nan")})
