"""JSON for other programs."""

from __future__ import annotations

import json

from gopt.cli.json_text import strict_json


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def test_what_is_no_number_is_null():
    record = {"a": [1.5, float("nan")], "b": {"c": float("inf"), "d": (-float("inf"), "NaN")}, "e": True, "f": 0}
    text = strict_json(record)
    assert json.loads(text, parse_constant=refuse) == {
        "a": [1.5, None], "b": {"c": None, "d": [None, "NaN"]}, "e": True, "f": 0,
    }  # fmt: skip
    assert "\n" not in text and strict_json({"a": [1]}, 1).count("\n") == 4


def test_a_terminal_obeys_none_of_it():
    text = strict_json({"\x9b2J\u202e": "é\x7f"})
    assert "é" in text and text.isprintable() and json.loads(text) == {"\x9b2J\u202e": "é\x7f"}
