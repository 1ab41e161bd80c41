"""A folder whose micro-batches run in another way than its ranks were written for is refused by proof and check."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import FIXTURES

import gopt
from gopt.errors import GoptError
from gopt.verification.certificate.check import check

Edit = Callable[[dict[str, Any], list[str]], None]


def times(phase: str, count: int) -> Edit:
    """Other runs of a phase."""

    def edit(manifest: dict[str, Any], _: list[str]) -> None:
        next(each for each in manifest["phases"] if each["name"] == phase)["times"] = count

    return edit


def exchanged(_: dict[str, Any], lines: list[str]) -> None:
    """A member takes two micro-batches in the other order."""
    one, two, *_ = (at for at, line in enumerate(lines) if line.split()[:2] == ["1", "forward"])
    lines[one], lines[two] = lines[two], lines[one]


def without(_: dict[str, Any], lines: list[str]) -> None:
    """A micro-batch without its gradients."""
    lines.remove(next(line for line in lines if line.split()[:2] == ["1", "weight"]))


EDITS = {
    "forward once": times("forward", 1), "weight twice": times("weight", 2), "exchanged": exchanged,
    "without": without,
}  # fmt: skip


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the folder of ranks, and the certificate."""
    home = tmp_path_factory.mktemp("schedules")
    gopt.shard(FIXTURES / "real/mlp_adamw.onnx", "pp=2", accumulate=4, schedule="zb-h1").write(home / "ranks")
    assert gopt.prove(home / "ranks", certificate=home / "certificate").proven
    return home


@pytest.mark.parametrize("edit", EDITS)
def test_micro_batches_that_run_otherwise_are_refused(edit: str, proven: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    shutil.copytree(proven / "ranks", folder)
    manifest, schedule = folder / "manifest.json", folder / "schedule.txt"
    record, lines = json.loads(manifest.read_text()), schedule.read_text().split("\n")
    EDITS[edit](record, lines)
    manifest.write_text(json.dumps(record))
    schedule.write_text("\n".join(lines))
    with pytest.raises(GoptError):
        gopt.seal(folder)
        gopt.prove(folder)
    with pytest.raises(GoptError):
        check(folder, (proven / "certificate").read_text())
