"""The roles of a step as text in a model's metadata."""

from __future__ import annotations

import json

import pytest

from gopt.documents.roles import RolesRecord
from gopt.errors import InputError

FULL = RolesRecord(loss="l", states={"w": "w_out"}, params={"w": "g", "v": ""}, batch=("x", "ß"), shared=("n",))


def test_what_is_written_is_read():
    for record in (FULL, RolesRecord()):
        assert RolesRecord.parse(record.text(), "here") == record


def test_the_text_has_the_keys_of_the_schema_in_order():
    assert list(json.loads(FULL.text())) == ["loss", "states", "params", "batch", "shared"]
    assert RolesRecord().text() == '{"loss": "", "states": {}, "params": {}, "batch": []}'
    assert '"ß"' in FULL.text()


@pytest.mark.parametrize("text", ["{", '{"loss": 1}', FULL.text().replace('"l"', "null")])
def test_a_broken_entry_is_refused_by_its_name(text):
    with pytest.raises(InputError, match="here"):
        RolesRecord.parse(text, "here")
