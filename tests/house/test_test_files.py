"""Every package has tests in its folder, and no two test files have one name: their folders are not packages."""

from __future__ import annotations

from collections import Counter

from helpers import ROOT

TESTS = ROOT / "tests"


def test_every_package_has_tests():
    packages = {path.parent.relative_to(ROOT / "gopt").parts[0] for path in (ROOT / "gopt").glob("*/*.py")} | {"cli"}
    assert sorted(name for name in packages if not any((TESTS / name).rglob("test_*.py"))) == []


def test_no_two_test_files_have_one_name():
    assert [name for name, count in Counter(path.name for path in TESTS.rglob("test_*.py")).items() if count > 1] == []
