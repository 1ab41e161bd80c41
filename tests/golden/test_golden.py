"""Every case of this folder: what a pass makes of a small step, what it refuses, and where it has nothing to do.

``GOPT_UPDATE_GOLDENS=1 pytest tests/golden`` writes what the cases give now; the diff is then what is reviewed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from golden_case import AFTER, DIFF, HOME, NOTHING, REFUSED, Case, check, paths, read, write

from gopt.passes import PASSES
from gopt.passes.pipeline import parse_pipeline

CASES = [path.relative_to(HOME).with_suffix("").as_posix() for path in paths()]


def case_path(name: str) -> Path:
    return HOME / f"{name}.txt"


def kind(case: Case) -> str:
    """Which section holds what the case expects; empty for a case that was never written out."""
    return case.expected.partition("\n")[0].removeprefix("=== ")


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, tmp_path: Path) -> None:
    if os.environ.get("GOPT_UPDATE_GOLDENS") == "1":
        write(case_path(name), tmp_path)
    check(case_path(name), tmp_path)


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_has_cases(name: str) -> None:
    """One at least that it works on, and one at least on which it does nothing or that it refuses."""
    kinds = {kind(read(path)) for path in paths() if path.parent.name == name}
    assert kinds & {AFTER, DIFF}
    assert kinds & {NOTHING, REFUSED}


def test_a_quarter_is_refused_or_has_nothing_to_do() -> None:
    kinds = [kind(read(path)) for path in paths()]
    assert set(kinds) <= {AFTER, DIFF, NOTHING, REFUSED}
    assert 4 * sum(each in (NOTHING, REFUSED) for each in kinds) >= len(kinds)


@pytest.mark.parametrize("name", CASES)
def test_a_case_stands_in_the_folder_of_its_pass(name: str) -> None:
    case = read(case_path(name))
    passes = [found for found, _ in parse_pipeline(case.header.pipeline)]
    folder = name.split("/")[0]
    assert folder in PASSES
    if kind(case) == REFUSED:  # of a pass that stands in a wrong place, or is missing
        assert folder in passes or f"pass {folder}" in case.expected
    else:
        assert passes[-1] == folder


def test_titles_tell_cases_apart() -> None:
    titles = [read(path).header.title for path in paths()]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("name", sorted(PASSES))
def test_a_changed_character_fails(name: str, tmp_path: Path) -> None:
    """In the first, a middle and the last line of what is expected."""
    path = next(path for path in paths() if path.parent.name == name)
    case, copy = read(path), tmp_path / "case.txt"
    copy.write_text(case.given + case.expected, encoding="utf-8")
    check(copy, tmp_path)
    title = len(case.expected.splitlines()[0]) + 1
    for place in (title, (title + len(case.expected)) // 2, len(case.expected) - 2):
        other = "~" if case.expected[place] != "~" else "-"
        copy.write_text(case.given + case.expected[:place] + other + case.expected[place + 1 :], encoding="utf-8")
        with pytest.raises(AssertionError):
            check(copy, tmp_path)


def test_what_stands_behind_the_expectation_fails(tmp_path: Path) -> None:
    case, copy = read(paths()[0]), tmp_path / "case.txt"
    copy.write_text(case.given + case.expected + "more\n", encoding="utf-8")
    with pytest.raises(AssertionError):
        check(copy, tmp_path)


def test_a_new_case_is_written_out(tmp_path: Path) -> None:
    """A file that ends with its source is not a case yet, and the rewrite makes it one."""
    case, copy = read(paths()[0]), tmp_path / "case.txt"
    copy.write_text(case.given.rstrip() + "\n", encoding="utf-8")
    with pytest.raises(AssertionError):
        check(copy, tmp_path)
    write(copy, tmp_path)
    assert copy.read_text(encoding="utf-8") == case.given + case.expected
