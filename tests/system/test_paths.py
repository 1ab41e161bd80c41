"""Where a path leads: links before ``..`` are followed, the last name is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gopt.system.paths import real_path


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """``link/..`` is ``else``, and not the folder in which the link lies."""
    monkeypatch.chdir(tmp_path)
    Path("else/dir").mkdir(parents=True)
    Path("link").symlink_to("else/dir")
    Path("last").symlink_to("else")
    return Path(os.path.realpath(tmp_path))


@pytest.mark.parametrize(
    ("given", "leads"),
    [
        ("new", "new"), ("./new", "new"), ("link/../new", "else/new"), ("link/new", "else/dir/new"), ("last", "last"),
        ("else/../last", "last"), ("link/..", "else"), (".", ""), ("", ""), ("else/dir/", "else/dir"),
        ("new/below", "new/below"), ("link/../../last/x", "else/x"),
    ],
)  # fmt: skip
def test_where_it_lies(given, leads, here):
    assert real_path(given) == here / leads
    assert real_path(here / given) == here / leads


@pytest.mark.parametrize("given", ["missing/../new", "n" * 300])
def test_where_the_system_cannot_look(given, here):
    with pytest.raises(OSError):
        real_path(given)
