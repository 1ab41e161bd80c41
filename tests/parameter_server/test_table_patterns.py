"""Options by the names of tables: the first entry that fits, and none that says nothing."""

from __future__ import annotations

import pytest

from gopt.errors import OptionError
from gopt.parameter_server.table_patterns import chosen, fits

NAMES = ("emb.user", "emb.item", "bias", "a[1]")


def test_the_first_entry_that_fits_counts() -> None:
    assert chosen({"emb.item": "x", "emb.*": "y"}, NAMES) == {"emb.item": "x", "emb.user": "y"}
    assert chosen({}, NAMES) == {}


def test_a_name_is_no_pattern() -> None:
    assert fits("a[1]", NAMES) == ["a[1]"] and fits("?ias", NAMES) == ["bias"] and fits("x*", NAMES) == []


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"emb.usr": "x"}, "'emb.usr' matches no table", "emb.user"),
        ({"*": "x", "bias": "y"}, "'bias' for tables has no effect", "put it before them"),
    ],
)
def test_what_decides_nothing_is_refused(given: dict[str, str], message: str, hint: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        chosen(given, NAMES)
    assert hint in caught.value.hints[0]
    with pytest.raises(OptionError, match="matches no table") as caught:
        chosen({"x": "y"}, ())
    assert caught.value.hints == ("there is no table",)
