"""Tables that people read."""

from __future__ import annotations

from gopt.cli.diff import KINDS

from gopt.offline.diff.sections import MOST_ROWS, TITLES, Section, kind_sections


def test_every_kind_of_difference_has_a_table() -> None:
    assert set(TITLES) == set(KINDS)
    found = kind_sections([(kind, "", kind) for kind in KINDS])
    assert {row for each in found for row in each.rows} == {(kind,) for kind in KINDS}


def test_places_have_a_column_where_there_are_any() -> None:
    (found,) = kind_sections([("added", "rank 0", "x"), ("added", "", "y")])
    assert found == Section("Added operators", ("where", "what"), (("rank 0", "x"), ("", "y")))


def test_short_ones_count_what_they_hide() -> None:
    section = Section("T", ("what",), tuple((str(place),) for place in range(MOST_ROWS + 3)))
    assert (len(section.short().rows), section.short().hidden, section.short(100)) == (MOST_ROWS, 3, section)
    assert section.short().short(1).hidden == MOST_ROWS + 2
