"""What runs of a product each time: every pair of values, and the rest is not lost."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT
from products import CASES, fewer, kept_rows, part, some_cases, spread


@pytest.mark.parametrize("sizes", [(18, 4, 4), (13, 4, 3), (6, 4, 3), (4, 3, 2, 2)])
def test_every_pair_meets(sizes):
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    kept = kept_rows(spread(*axes))
    assert len(kept) == len(list(itertools.product(*axes[:-1])))
    for first, second in itertools.combinations(range(len(sizes)), 2):
        met = {(row[first], row[second]) for row in kept}
        assert met == set(itertools.product(axes[first], axes[second]))


def test_the_rest_is_slow_and_nothing_is_lost():
    rows = spread("abc", "xy", keep=1)
    assert [tuple(row.values) for row in rows] == list(itertools.product("abc", "xy"))
    assert [row.marks for row in rows if not row.marks] + [row.marks for row in rows if row.marks] == [
        *[()] * 3, *[(pytest.mark.slow,)] * 3,
    ]  # fmt: skip
    assert len(kept_rows(spread(range(8), range(8), keep=3))) == 24


def test_a_part_of_a_list_is_evenly_spread():
    rows = part([(1, "a"), pytest.param(2, "b", id="two"), (3, "c"), 4], 2)
    assert rows[0] == (1, "a") and rows[2] == (3, "c")
    assert [tuple(row.values) for row in (rows[1], rows[3])] == [(2, "b"), (4,)] and rows[1].id == "two"
    assert all(row.marks == (pytest.mark.slow,) for row in (rows[1], rows[3]))
    assert part("abc", 3) == part("abc", 5) == ["a", "b", "c"]


def test_the_docs_name_every_file_with_slow_tests():
    page = (ROOT / "docs/tests.md").read_text(encoding="utf-8")
    signs = ("mark.slow", "from products import")
    table = page.partition("## Slow tests")[2]
    slow = {
        path.name for path in (ROOT / "tests").rglob("test_*.py")
        if path.parent.name != "house" and any(sign in path.read_text() for sign in signs)
    }  # fmt: skip
    assert sorted(name for name in slow if f"{name}`" not in table) == []


class Case(pytest.Item):
    """A case that only has a name and marks."""

    def runtest(self) -> None: ...


def test_some_cases_of_each_test_and_the_marked_are_none_of_them(request):
    names = [f"test_many[{number}]" for number in range(9)] + ["test_one", "test_long[0]", "test_long[1]"]
    items = [Case.from_parent(request.node.parent, name=name) for name in names]
    for item in items[-2:]:
        item.add_marker("rest")
    assert CASES == 2 and [item.name for item in some_cases(items)] == ["test_many[0]", "test_many[4]", "test_one"]


SUITE = """
import pytest


@pytest.mark.parametrize("case", range(6))
def test_many(case): ...


@pytest.mark.rest
def test_long(): ...


@pytest.mark.slow
def test_slow(): ...
"""


@pytest.mark.rest
def test_who_names_nothing_runs_some_cases_and_the_others_are_the_rest(tmp_path):
    shutil.copytree(
        ROOT / "tests", tmp_path / "tests", ignore=lambda _, names: {*names} - {"conftest.py", "products.py"}
    )
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    (tmp_path / "tests/test_suite.py").write_text(SUITE)

    def passed(*words: str) -> int:
        line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        return int(re.search(r"(\d+) passed", done.stdout + done.stderr).group(1))

    assert [passed("-n", "2"), passed("--cases", "rest"), passed("tests")] == [2, 5, 7]


def test_fewer_of_the_rows_that_run():
    rows = fewer(spread("abcd", "xy"), 2)
    assert [tuple(row.values) for row in rows] == list(itertools.product("abcd", "xy"))
    assert kept_rows(rows) == kept_rows(spread("abcd", "xy"))[::2] and fewer(spread("ab", "xy"), 9) == spread(
        "ab", "xy"
    )
