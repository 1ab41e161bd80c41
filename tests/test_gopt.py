"""The package's own names: there at once, and loaded when they are used."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import pydoc
import subprocess
import sys

import numpy as np
import pytest
from helpers import FIXTURES

import gopt
import gopt.api

VERBS = sorted(name for name in gopt.__all__ if name[0].islower())


def test_every_public_name_is_there():
    assert {name: getattr(gopt, name, None) for name in gopt.__all__ if getattr(gopt, name, None) is None} == {}
    assert gopt.load is gopt.api.load and gopt.split is gopt.api.split


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'gopt' has no attribute 'nix'"):
        gopt.nix  # noqa: B018


def test_the_import_alone_loads_nothing_heavy():
    code = "import sys, gopt; print(sorted({'onnx', 'numpy', 'click', 'gopt.api'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_no_module_hides_a_verb():
    """A module of a verb's name would stand in its place once it is imported."""
    assert {module.name for module in pkgutil.iter_modules(gopt.__path__)}.isdisjoint(gopt.__all__)
    importlib.import_module("gopt.cli.main")
    assert [name for name in VERBS if not callable(getattr(gopt, name))] == []


def test_help_lists_every_verb():
    text = pydoc.plain(pydoc.render_doc(gopt))
    assert [name for name in VERBS if f"\n        {name} " not in text] == [], "a line in the docstring of gopt"
    assert [name for name in VERBS if f"\n    {name}(" not in text] == []


@pytest.mark.parametrize("verb", VERBS)
def test_the_example_of_a_verb_runs(verb, tmp_path, monkeypatch):
    (tmp_path / "fixtures").symlink_to(FIXTURES)
    monkeypatch.chdir(tmp_path)
    found = doctest.DocTestFinder(recurse=False).find(getattr(gopt, verb), verb, globs={"gopt": gopt, "np": np})
    assert found and found[0].examples, "no example"
    told: list[str] = []
    assert doctest.DocTestRunner().run(found[0], out=told.append).failed == 0, "".join(told)
