"""What is seen of a JSON text before it is parsed."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest
from refusals import ROLES_TEXT, many, refused

from gopt import limits
from gopt.documents import prescan
from gopt.documents.prescan import check_prescan
from gopt.errors import InputError


@pytest.mark.parametrize("number", [0.00012345678901234567, -1.2345678901234567e-05, 1 / 3e4, 12345678901234567.0])
def test_digits_of_a_fraction_are_not_counted(number):
    """A loss between 1e-4 and 1e-3 has twenty and more of them."""
    check_prescan(json.dumps({"loss": number}).encode(), "a.json")


@pytest.mark.parametrize("text", ["," * 200, "[" * 200, '"' * 900])
def test_values_are_counted_before_they_are_made(text, monkeypatch):
    monkeypatch.setattr(limits, "DOCUMENT_VALUES", 100)
    assert "has more than 100 values" in refused(text)


def test_a_refusal_takes_no_memory():
    """A hundred thousand open brackets: as an object it would not fit in the stack, the refusal is a few copies."""
    text = b"[" * 10**6
    tracemalloc.start()
    refused(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * len(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'"\\' * 100_000, "is not JSON"),
        (b'"\\' * 3_000_000, "has a text of more than"),
        (b'{"a": "' + b'\\"' * 3_000_000, "has a text of more than"),
        (b'{"a": "' + b"\\" * 3_000_000, "has a text of more than"),
        (b"[" + b'"' * 5_000_000, "is not JSON"),
    ],
)
def test_texts_that_do_not_end(text, said):
    started = time.process_time()
    for _ in range(10):
        text.replace(b'"', b"'").count(b"\\")
    passed = time.process_time()
    assert said in refused(text)
    assert time.process_time() - passed < 1000 * (passed - started)  # quadratic: 100 000 times, on any machine


def test_texts_over_the_borders_of_blocks(monkeypatch):
    """The same is seen, wherever a block ends: what stands in texts is no key and no number, what stands beside is."""
    text = ROLES_TEXT.replace('"l"', r'"[[\\\"{[:,99999999999999999999\\"').encode()
    bounds = {"DOCUMENT_TEXT": 40, "DOCUMENT_KEYS": 4, "DOCUMENT_TABLES": 4}
    for size in range(1, len(text) + 1):
        monkeypatch.setattr(prescan, "_BLOCK", size)
        for name, most in bounds.items():
            monkeypatch.setattr(limits, name, most)
            check_prescan(text, "a")
            monkeypatch.setattr(limits, name, most - 10 if name == "DOCUMENT_TEXT" else most - 1)
            with pytest.raises(InputError, match=name):
                check_prescan(text, "a")
            monkeypatch.setattr(limits, name, most)


@pytest.mark.parametrize(("text", "limit"), [("[[], [], []]", "TABLES"), ('{"a": {"b": 1}, "c": 2}', "KEYS")])
def test_tables_and_keys_are_counted(text, limit, monkeypatch):
    monkeypatch.setattr(limits, f"DOCUMENT_{limit}", 2)
    assert f"(DOCUMENT_{limit})" in refused(text)


@pytest.mark.parametrize("shape", [(4096, 12, 3), (65_536, 2, 1)])
def test_the_largest_manifests_are_let_in(shape):
    check_prescan(json.dumps(many(*shape)).encode(), "a.json")
