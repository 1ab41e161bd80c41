"""Manifest and report as text: every parser reads it, and one change is one line of a diff."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gopt.artifact.json_writer import write_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4))
def test_it_is_read_back_as_it_was(tmp_path_factory, record):
    path = tmp_path_factory.mktemp("json") / "record.json"
    write_json(path, record)
    assert json.loads(path.read_text()) == record


def test_one_record_is_one_line(tmp_path):
    record = {
        "format": "é", "mesh": {"axes": [], "ranks": 2}, "ranks": [{"rank": 0, "state": [1, 2]}, {"rank": 1}],
        "common": {"state": [{"input": "w"}, {"input": "b"}], "inputs": []}, "none": [],
    }  # fmt: skip
    write_json(tmp_path / "record.json", record)
    assert (tmp_path / "record.json").read_text(encoding="utf-8") == (
        '{\n"format": "é",\n"mesh": {"axes": [], "ranks": 2},\n'
        '"ranks": [\n{"rank": 0, "state": [1, 2]},\n{"rank": 1}\n],\n'
        '"common": {\n"state": [\n{"input": "w"},\n{"input": "b"}\n],\n"inputs": []\n},\n"none": []\n}\n'
    )


def test_what_is_no_number_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "record.json", {"loss": float("nan")})
    assert not (tmp_path / "record.json").exists()


def test_nothing_is_written_over(tmp_path):
    write_json(tmp_path / "record.json", {"a": 1})
    with pytest.raises(FileExistsError):
        write_json(tmp_path / "record.json", {"a": 2})
    assert json.loads((tmp_path / "record.json").read_text()) == {"a": 1}
