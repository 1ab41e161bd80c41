"""A module's tests are found by its name: ``gopt/a/b.py`` is tested by ``tests/a/test_b.py``, ``cli/x.py`` by
``tests/cli/test_x.py``.

Names of test files differ from one another, for their folders are not packages: where two modules have the same name,
the folder's stands in front of it, ``tests/cli/test_cli_plan.py``.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
from helpers import ROOT
from mirror_table import KINDS, OTHERS, TESTED_ELSEWHERE
from test_layers import sources

TESTS = ROOT / "tests"


def test_files(module: str) -> list[Path]:
    """Where the tests of a module may stand, relative to ``tests``: of a package beside its folder as well."""
    *folders, name = module.split(".")[1:] or [module]
    stems = [f"test_{name}.py"] + ([f"test_{folders[-1]}_{name}.py"] if folders else [])
    return [Path(*place, stem) for place in (folders, [*folders, name]) for stem in stems]


test_files.__test__ = False  # type: ignore[attr-defined]


def files() -> set[Path]:
    return {path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}


def with_code(texts: dict[str, str]) -> list[str]:
    """Modules that have more than a docstring."""
    return [module for module, text in texts.items() if len(ast.parse(text).body) > 1]


def untested(modules: list[str], known: set[Path]) -> list[str]:
    """Modules without a test file of their name."""
    return [module for module in modules if not any(path in known for path in test_files(module))]


def test_every_module_has_tests_by_its_name():
    """Or the table says where its behaviour is tested, and why it has no file."""
    missing = set(untested(with_code(sources()), files()))
    assert sorted(missing - set(TESTED_ELSEWHERE)) == [], "add tests of their names, or say in the table where they are"
    assert sorted(set(TESTED_ELSEWHERE) - missing) == [], "these have tests of their names, or are gone"


@pytest.mark.parametrize("module", TESTED_ELSEWHERE)
def test_what_the_table_names_is_there(module):
    exception = TESTED_ELSEWHERE[module]
    assert exception.reason
    assert [path for path in exception.tests if not (TESTS / path).exists()] == []


def test_every_test_file_is_of_a_module_or_of_a_kind():
    known = {path for module in sources() for path in test_files(module)}
    rest = {path for path in files() - known if path.parts[0] not in KINDS}
    assert sorted(map(str, rest - set(map(Path, OTHERS)))) == []
    assert sorted(map(str, set(map(Path, OTHERS)) - rest)) == []


def test_no_two_test_files_have_the_same_name():
    assert [name for name, count in Counter(path.name for path in files()).items() if count > 1] == []


def test_a_module_without_tests_is_found():
    assert untested(["gopt.system.nix", "gopt.nix", "gopt.cli.nix"], files()) == [
        "gopt.system.nix",
        "gopt.nix",
        "gopt.cli.nix",
    ]
    assert untested(["gopt.a.b"], {Path("a/test_b.py")}) == untested(["gopt.a.b"], {Path("a/test_a_b.py")}) == []
    assert untested(["gopt.a.b"], {Path("test_b.py")}) == untested(["gopt.a.b"], {Path("b/test_b.py")}) == ["gopt.a.b"]
    assert untested(["gopt.a.b"], {Path("a/b/test_b.py")}) == [], "beside those of the package's modules"
