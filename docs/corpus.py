"""Write docs/corpus.md from the planted errors of tests/corpus: ``python docs/corpus.py``, about three minutes."""

from __future__ import annotations

import datetime
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from corpus.judge import Judgement, judge  # noqa: E402
from corpus.plants import KINDS, PLANTS, Plant  # noqa: E402

import gopt  # noqa: E402

PAGE = HERE / "corpus.md"
INTRO = """\
# A corpus of real sharding errors

Errors that reached users of distributed training, or that papers report, and that no run showed: each loaded, ran and
trained a wrong model. Each is planted as one edit in the rank files of a small step
(`tests/corpus/plants.py`), and `python examples/corpus/write.py DIR` writes all folders with and without their error,
[for other tools, too](../examples/corpus/README.md). `python docs/corpus.py` writes this page, and
`tests/corpus/test_corpus.py` plants each error again and compares. Written on {date}.

- load: what gopt reads before anything runs, the files against `manifest.json`. `onnx.checker` accepts all files.
- calls: whether all members of a group make the same calls. Empty where `gopt prove` does not come so far.
- prove: the verdict of `gopt prove`.
- named: whether the first node that the proof names is the edited one, one behind it, or one before it.
- verify: the outcome of `gopt verify --steps 2 --no-confirm`; `refused` is an error before a value is compared.

Error 21 alone is seen by neither: its step is right, and begins with wrong values. Of those, a folder holds one copy.

Kinds: {kinds}.

| number | source | kind | what goes wrong | folder | load | calls | prove | named | verify |
|---|---|---|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The page as it should stand in docs/corpus.md."""
    rows = []
    with tempfile.TemporaryDirectory() as home:
        for plant in PLANTS:
            folder = Path(home, plant.name)
            plant.recipe.write(folder)
            rows.append((plant.number, row(plant, judge(plant, folder))))
    kinds = ", ".join(f"{letter} {kind}" for letter, kind in KINDS.items())
    intro = INTRO.format(date=datetime.date.today().isoformat(), kinds=kinds)
    return intro + "".join(f"{line}\n" for _, line in sorted(rows, key=lambda each: each[0]))


def told(plant: Plant) -> str:
    """What a row says before any check."""
    return f"| {plant.number} | {plant.source} | {plant.kind} | {plant.wrong} | {plant.where} |"


def row(plant: Plant, found: Judgement) -> str:
    return f"{told(plant)} {found.load} | {found.calls} | {found.prove} | {found.named} | {found.verify} |"


def verdict(folder: Path) -> str:
    """What ``gopt prove`` says of a folder."""
    try:
        return gopt.prove(folder).verdict.value
    except gopt.UnsupportedError:
        return "unproven"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
