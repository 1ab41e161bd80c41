"""Real silent errors of sharding: what is planted is seen, and docs/corpus.md says by which check."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

import pytest
from helpers import script_of

import gopt
from corpus.judge import judge
from corpus.plants import PLANTS, Plant

QUICK = ("mlp", "cnn")
"""How the names of fixtures begin that take less than a second."""


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return script_of("docs/corpus.py")


@pytest.fixture(scope="module")
def clean() -> dict[str, tuple[Path, str]]:
    """The folders without an error that were written so far, each with what ``gopt prove`` says of it."""
    return {}


def parameters() -> list[object]:
    return [
        pytest.param(plant, marks=() if plant.recipe.fixture.startswith(QUICK) else pytest.mark.slow, id=plant.name)
        for plant in PLANTS
    ]


@pytest.mark.parametrize("plant", parameters())
def test_what_is_planted_is_seen(
    plant: Plant, clean: dict[str, tuple[Path, str]], page: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> None:
    key = str(plant.recipe)
    if key not in clean:
        folder = tmp_path_factory.mktemp("clean") / "ranks"
        plant.recipe.write(folder)
        clean[key] = folder, page.verdict(folder)
    right, verdict = clean[key]
    assert verdict == "proven"
    folder = tmp_path_factory.mktemp("planted") / "ranks"
    shutil.copytree(right, folder)
    found = judge(plant, folder)
    assert (found.verify != "equal" and found.prove != "proven") == plant.step, "a wrong step is called right"
    assert not plant.step or found.prove in ("different", "refused")
    assert page.row(plant, found) in page.PAGE.read_text(encoding="utf-8"), "python docs/corpus.py writes it"


def test_every_error_of_the_sources_is_planted_or_said_not_to_be() -> None:
    assert sorted({plant.number for plant in PLANTS}) == list(range(1, 57))


def test_the_page_lists_the_plants(page: ModuleType) -> None:
    rows = [row for row in page.PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| ")][1:]
    told = [page.told(plant) for plant in sorted(PLANTS, key=lambda plant: plant.number)]
    assert rows == [next(row for row in rows if row.startswith(start)) for start in told]


def test_another_author_gets_every_planted_folder(tmp_path: Path) -> None:
    """``examples/corpus/write.py`` writes folders that gopt reads; here those of two numbers."""
    script = script_of("examples/corpus/write.py")
    script.main([str(tmp_path / "corpus"), "30", "48"])
    folders = sorted(path.name for path in (tmp_path / "corpus").iterdir() if path.is_dir())
    assert folders == [
        "30-mlp_mom_clip_sched-dp2",
        "48-mlp_adamw-trainers2,servers2-minimum16-rank1",
        "48-mlp_sgd-shard2-stage2-rank1",
        "mlp_adamw-trainers2,servers2-minimum16",
        "mlp_mom_clip_sched-dp2",
        "mlp_sgd-shard2-stage2",
    ]
    assert [gopt.prove(tmp_path / "corpus" / name).verdict.value for name in folders] == [
        "different", "different", "different", "proven", "proven", "proven",
    ]  # fmt: skip
