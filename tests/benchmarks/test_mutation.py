"""The errors that the mutation score plants: each changes its module, and no file."""

from __future__ import annotations

import ast
import marshal
import subprocess
import sys

import mutation
import pytest
from helpers import ROOT


@pytest.mark.parametrize("path", ["gopt/spmd/rules.py", "gopt/operators/dims/link.py"])
def test_every_error_compiles_and_changes_the_module(path):
    source = (ROOT / path).read_text(encoding="utf-8")
    original = marshal.dumps(compile(ast.parse(source), str(ROOT / path), "exec"))
    errors = mutation.mutants(path)
    changed = [marshal.dumps(mutation.code(path, error.number)) != original for error in errors[::7]]
    assert len(changed) > 9 and all(changed)
    assert (ROOT / path).read_text(encoding="utf-8") == source


@pytest.mark.rest
def test_a_draw_repeats_and_takes_as_many_of_each_module():
    paths = mutation.modules()
    errors = mutation.drawn(paths, 2 * len(paths), seed=3)
    assert errors == mutation.drawn(paths, 2 * len(paths), seed=3) != mutation.drawn(paths, 2 * len(paths), seed=4)
    assert {path: sum(error.path == path for error in errors) for path in paths} == dict.fromkeys(paths, 2)


def test_an_error_is_in_the_module_that_tests_import():
    path = "gopt/operators/operator.py"
    number = next(error.number for error in mutation.mutants(path) if (error.before, error.after) == ("5", "6"))
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import mutation\n"
        f"sys.meta_path.insert(0, mutation.Planted({path!r}, {number}))\n"
        "from gopt.operators.table import operator; print(int(operator('Exp').slope(0)))"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "6\n"
