"""The package's own names: there at once, and loaded when they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gopt
import gopt.api


def test_every_public_name_is_there():
    assert {name: getattr(gopt, name, None) for name in gopt.__all__ if getattr(gopt, name, None) is None} == {}
    assert gopt.load is gopt.api.load and gopt.shard is gopt.api.shard


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'gopt' has no attribute 'nix'"):
        gopt.nix  # noqa: B018


def test_the_import_alone_loads_nothing_heavy():
    code = "import sys, gopt; print(sorted({'onnx', 'numpy', 'click', 'gopt.api'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
