"""Names of drafts: gopt knows its own again, whatever a target is called."""

from __future__ import annotations

import os

import pytest

from gopt.system.staging_names import NEW, OLD, displaced_copies, find_staged, fresh_name

TARGETS = [
    "out",
    "a b.ranks",
    ".hidden",
    "x.gopt-0000000000000000.new",
    "é" * 120,
    "n" * 250,
    "line\nbreak",
    "a\udcffb",
]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("kind", [NEW, OLD])
def test_a_draft_is_known_by_its_target(name, kind, tmp_path):
    target = tmp_path / name
    draft = fresh_name(target, kind)
    assert draft.parent == tmp_path and len(os.fsencode(draft.name)) <= 255
    draft.mkdir()
    [found] = find_staged(tmp_path, target)
    assert (found.path, found.kind, found.target) == (draft, kind, target)
    assert find_staged(tmp_path, tmp_path / "other") == []


def test_names_of_others_are_no_drafts(tmp_path):
    for name in (".out.gopt-0123.new", ".out.gopt-0123456789abcdeg.new", "out.gopt-0123456789abcdef.new",
                 ".out.gopt-0123456789abcdef.tmp", ".gopt-0123456789abcdef.new"):  # fmt: skip
        (tmp_path / name).touch()
    assert find_staged(tmp_path) == []


def test_what_alone_may_be_needed_comes_first(tmp_path):
    target = tmp_path / "out"
    drafts = [fresh_name(target, kind) for kind in (NEW, OLD, NEW)]
    for draft in drafts:
        draft.touch()
    found = find_staged(tmp_path)
    assert found[0].path == drafts[1] and {each.path for each in found} == set(drafts)
    assert displaced_copies(target) == [drafts[1]] and displaced_copies(tmp_path / "other") == []


def test_a_folder_that_is_gone_has_none(tmp_path):
    assert displaced_copies(tmp_path / "gone" / "out") == []
    with pytest.raises(OSError):
        find_staged(tmp_path / "gone")
