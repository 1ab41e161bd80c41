"""``gopt diff --markdown``: it fits a comment, and no name breaks it."""

from __future__ import annotations

from dataclasses import replace

from gopt.cli.markdown_diff import MOST_BYTES, markdown_diff

from gopt.offline.diff.result import Diff, FileDifference
from gopt.offline.diff.sections import Section


def diff(*sections: Section, text: str = "x") -> Diff:
    return Diff("a", "b", (FileDifference("record", text),), 0, ("a note",), sections)


def test_the_cause_is_open_and_the_rest_folded() -> None:
    cause = Section("Cause", ("what", "before", "after"), (("mesh", "shard=2", "shard=3"),))
    shown = markdown_diff(diff(cause, Section("States", ("what",), (("w",), ("v",))))).splitlines()
    assert shown[0] == "### gopt diff: not equal: 1 difference (1 record)"
    assert "| `mesh` | `shard=2` | `shard=3` |" in shown and "- `w`" in shown and shown[-1] == "- a note"
    assert shown.index("**Cause**") < shown.index("<details><summary>States (2)</summary>") < shown.index("</details>")


def test_it_fits_a_comment_whatever_there_is() -> None:
    long = [Section(f"S{place}", ("a", "b"), (("é" * 400, "y" * 400),) * 500) for place in range(12)]
    shown = markdown_diff(diff(*long))
    assert len(shown.encode()) <= MOST_BYTES and "(500)" in shown and "and 497 more" in shown


def test_names_are_shown_as_they_are() -> None:
    name = "a|b`c</details>\x1b[0m\n@user"
    shown = markdown_diff(diff(Section("Ranks", ("x", "y"), ((name, "z"),))))
    (row,) = [line for line in shown.splitlines() if line.endswith("| `z` |")]
    assert row == "| `` a\\|b`c</details>\\x1b[0m @user `` | `z` |"


def test_models_have_a_table_for_each_kind() -> None:
    shown = markdown_diff(Diff("a", "b", (FileDifference("added", "x"), FileDifference("removed", "y")), 2))
    assert "<details><summary>Added operators (1)</summary>" in shown and "2 inner values" in shown


def test_descriptions_are_text_and_names_are_code() -> None:
    section = Section("States", ("kind", "what", "of"), (("state", "held in other pieces", "@user and 2 more"),))
    assert "| `state` | `held in other pieces` | `@user and 2 more` |" in markdown_diff(diff(section)).splitlines()
    words = replace(section, prose=frozenset({"what"}))
    assert "| `state` | held in other pieces | `@user and 2 more` |" in markdown_diff(diff(words)).splitlines()
