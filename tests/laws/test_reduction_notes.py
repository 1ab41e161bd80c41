"""What gopt says of every fixture's gradients: sums, means, quotients by a count, and where ranks' step is another one.

``GOPT_UPDATE_GOLDENS=1 pytest -m "" tests/laws/test_reduction_notes.py`` writes what it says now; review the diff then.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from helpers import FIXTURES

import gopt
from gopt.analysis.coupling import analyse_couplings, find_couplings, notes
from gopt.errors import GoptError

GOLDEN = Path(__file__).with_suffix(".txt")
NONE = "no step without more roles"
HEAD = "What gopt says of the gradients of every fixture, and the fixtures that it says it of."


def steps() -> dict[str, Path]:
    """All fixtures by name: files, and folders of ONNX Runtime's artifacts."""
    files = (path for path in FIXTURES.rglob("*.onnx") if "ort" not in path.parts)
    folders = (path.parent for path in (FIXTURES / "ort").glob("*/training_model.onnx"))
    return {path.relative_to(FIXTURES).with_suffix("").as_posix(): path for path in sorted((*files, *folders))}


def told(path: Path) -> str | None:
    """What gopt says of a step; None of a file that needs roles, or is no step."""
    try:
        training = gopt.load(path).training
    except GoptError:
        return None
    readings = analyse_couplings(training).readings
    kinds = Counter(
        f"{each.relation.value}{' by a count' * bool(each.by)}{'' if each.sure else ' (not sure)'}"
        for each in readings.values()
    )
    single = len(kinds) == 1
    text = ", ".join(kind if single else f"{number} {kind}" for kind, number in sorted(kinds.items()))
    said = [note.replace("not the step of one large batch: ", "") for note in notes(find_couplings(training))]
    return "\n".join([f"gradients: {text or 'not read'}", *(f"note: {each}" for each in said)])


def drawn_up() -> str:
    by_text: dict[str, list[str]] = {}
    for name, path in steps().items():
        by_text.setdefault(told(path) or NONE, []).append(name)
    parts = (f"{text}\n    " + "\n    ".join(names) for text, names in sorted(by_text.items()))
    return "\n\n".join([HEAD, *parts]) + "\n"


def test_what_is_said_of_some_fixtures() -> None:
    blocks = GOLDEN.read_text().split("\n\n")
    for name, path in list(steps().items())[::9]:
        text = told(path) or NONE
        assert [name in block.split() for block in blocks if block.startswith(f"{text}\n    ")] == [True], (name, text)


@pytest.mark.slow
def test_what_is_said_of_all_fixtures() -> None:
    found = drawn_up()
    if os.environ.get("GOPT_UPDATE_GOLDENS") == "1":
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text()
