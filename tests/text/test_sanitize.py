"""Text from files as it may be shown: nothing that a terminal obeys, and no endless line."""

from __future__ import annotations

import pytest
from helpers import is_clean

from gopt.limits import LINE, NAME
from gopt.text.sanitize import and_more, clean, line, listed, show


@pytest.mark.parametrize("value", ["n" * 10_000, ["n" * 50] * 10_000, b"n" * 10_000, {"n" * 10_000: 1}])
def test_a_long_value_keeps_its_begin_and_end(value):
    text = show(value)
    assert len(text) == NAME - 19  # 40 fewer, an ellipsis, and the last 20
    assert text[: NAME - 40] == repr(value)[: NAME - 40] and text[NAME - 40] == "…"


def test_a_value_of_just_the_length_is_whole():
    for length in (NAME - 2, NAME - 1):
        assert ("…" in show("n" * length)) is (length + 2 > NAME)


def test_a_number_that_python_would_not_write_out():
    assert show(1 << 256) == "a number of 257 bits"
    assert show((1 << 256) - 1).endswith(str((1 << 256) - 1)[-20:])


def test_line_breaks_and_tabs():
    assert clean("a\tb\n\x1b[2J") == "a    b\n\\x1b[2J"
    assert line(" a \n\t b\x07 ") == "a b\\x07"


@pytest.mark.parametrize("letter", ["n", "é", "\U0001f600"])
def test_a_line_is_cut_in_bytes_and_in_no_character(letter):
    whole = letter * ((LINE - len(" […] ".encode()) - 8) // len(letter.encode()))
    assert line(whole) == whole
    cut = line(letter * LINE)
    assert len(cut.encode()) <= LINE and cut.count(" […] ") == 1 and set(cut.replace(" […] ", "")) == {letter}


def test_text_that_is_no_text():
    """Names of files may be any bytes: Python has half characters for them."""
    shown = line("a\udcff")
    assert is_clean(shown) and shown == "a\\udcff"


def test_a_list_is_cut_short_and_says_so():
    assert listed("abc", 3) == "a, b, c" and listed("abcde", 3) == "a, b, c and 2 more" and listed([]) == ""
    assert and_more(0) == and_more(-1) == "" and and_more(1) == " and 1 more"
