"""``gopt explain``: the story of an output folder, or of one operator, value, state, parameter, bucket or table."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

from gopt.errors import OptionError
from gopt.offline.explain.folder_index import FolderIndex
from gopt.offline.explain.folder_story import folder_story
from gopt.offline.explain.stories import STORIES
from gopt.offline.explain.story import Fact, Story
from gopt.text.sanitize import show

__all__ = ["Fact", "Story", "explain"]


def explain(path: str | os.PathLike[str], name: str | None = None) -> Story:
    """Return the story of ``name`` in an output folder of ``gopt shard`` or ``gopt split``; of the folder without.

    The story covers the origin, the ranks and their elements, the bucket, the reason for removal or addition, and the
    replacement. The story of a folder covers the choice of ``--auto`` and what each pass did.

    ``name`` is an operator, a value, a state, a parameter, a bucket (``b0``), or a key or table of a split. Raises
    InputError if the folder is broken, OptionError for an unknown name.
    """
    folder = Path(path)
    index = FolderIndex(folder)
    if name is None:
        return Story(str(folder), folder.name, "folder", tuple(folder_story(index.report)))
    kinds: list[str] = []
    facts: list[Fact] = []
    for story in STORIES:
        lines = list(story(index, name))
        if lines:
            kinds.append(lines[0].about)
            facts += lines
    if not facts:
        close, whole = get_close_matches(name, index.names(len(name)), 3), show(os.fspath(folder))
        hint = f"did you mean {' or '.join(map(show, close))}?" if close else f"gopt inspect {folder} shows what it has"
        raise OptionError(f"no operator, value, state or bucket of {whole} is called {show(name)}", hint)
    return Story(str(folder), name, kinds[0], tuple(dict.fromkeys(facts)))
