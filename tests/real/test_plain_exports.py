"""Plain PyTorch exports, not made by ``gopt export``: what torch.onnx.export writes of a functional step.

``fixtures/plain`` has every fixture's step, with and without the exporter's optimization, in several opsets.
``GOPT_UPDATE_GOLDENS=1 pytest -m "slow or not slow" tests/real/test_plain_exports.py -k roles`` writes the golden anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gopt.cli.main import main
from helpers import FIXTURES
from products import part, spread

import gopt
from gopt.analysis.coupling import find_couplings
from gopt.errors import GoptError

PLAIN = FIXTURES / "plain"
GOLDEN = PLAIN / "golden.json"
CASES = sorted(path.stem for path in (FIXTURES / "cases/exports").glob("*.onnx"))
LARGE = 60_000
"""Bytes from which a file is read with ``-m slow`` alone."""


def files_of(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as opened:
        return {member.name: file.read() for member in opened if (file := opened.extractfile(member)) is not None}


@cache
def corpus() -> dict[str, bytes]:
    """``VERSION/RECIPE.WAY.OPSET`` -> the file."""
    archives = {path.name.removesuffix(".tar.xz"): path for path in sorted(PLAIN.glob("torch-*.tar.xz"))}
    return {f"{name}/{file}": data for name, path in archives.items() for file, data in files_of(path).items()}


NAMES = sorted(corpus())
SMALL = [name for name in NAMES if len(corpus()[name]) < LARGE]


@cache
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def roles_of(path: Path) -> dict[str, Any]:
    """What gopt finds in a step, or why it refuses it."""
    try:
        training = gopt.load(path).training
    except GoptError as error:
        return {"refused": error.message.replace(f"{path}: ", "")}
    kinds: dict[str, list[str]] = {}
    for state in training.states:
        owner = "" if not state.of or state.tensor.startswith(f"{state.of}.") else f" of {state.of}"
        kinds.setdefault(state.kind.value, []).append(f"{state.tensor}{owner}")
    return {
        "loss": training.loss, "batch": training.batch, "hyper": training.hyper, "metrics": training.metrics,
        "states": {kind: " ".join(names) for kind, names in sorted(kinds.items())},
        "gradients": " ".join(training.gradients.values()),
        "notes": [f"{each.kind.value} at {each.value} ({each.operator})" for each in find_couplings(training)],
    }  # fmt: skip


@pytest.mark.parametrize("name", [*SMALL, *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES if n not in SMALL)])
def test_roles_are_those_of_the_golden(name: str, tmp_path: Path) -> None:
    path = tmp_path / "step.onnx"
    path.write_bytes(corpus()[name])
    found = roles_of(path)
    if os.environ.get("GOPT_UPDATE_GOLDENS") == "1":
        known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        known[name] = found
        GOLDEN.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
        return
    assert found == golden()[name]


def test_every_way_of_writing_a_step_has_the_same_roles() -> None:
    """Optimized or not, in whatever opset: names of inner values differ, roles and notes do not."""
    assert golden().keys() == set(NAMES)
    told: dict[str, set[str]] = {}
    for name, record in golden().items():
        notes = sorted(note.partition(" at ")[0] for note in record.get("notes", ()))
        same = {key: record.get(key) for key in ("loss", "batch", "hyper", "metrics", "states")} | {"notes": notes}
        recipe = name.partition("/")[2].partition(".")[0]
        told.setdefault(recipe, set()).add(json.dumps(same, sort_keys=True))
    assert [recipe for recipe, records in told.items() if len(records) != 1] == []


def held(source: Path, stage: int, out: Path) -> None:
    assert main(["shard", str(source), "--ranks", "2", "--stage", str(stage), "-o", str(out)]) == 0
    assert main(["verify", str(out)]) == 0


def read_as_a_step() -> list[str]:
    return [name for name in NAMES if "refused" not in golden().get(name, {})]


@pytest.mark.parametrize("name", part([name for name in read_as_a_step() if name in SMALL], 3))
def test_ranks_equal_the_source(name: str, tmp_path: Path) -> None:
    """At a stage that goes round with the files."""
    path = tmp_path / "step.onnx"
    path.write_bytes(corpus()[name])
    held(path, NAMES.index(name) % 4, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", read_as_a_step())
def test_every_file_at_every_stage(name: str, stage: int, tmp_path: Path) -> None:
    path = tmp_path / "step.onnx"
    path.write_bytes(corpus()[name])
    held(path, stage, tmp_path / "out")


@pytest.mark.parametrize(("case", "stage"), spread(CASES, range(4)))
def test_exports_that_were_refused_once(case: str, stage: int, tmp_path: Path) -> None:
    """Constants that are cast like the samples; a backward that keeps a normalisation's mean in half precision."""
    held(FIXTURES / "cases/exports" / f"{case}.onnx", stage, tmp_path / "out")


@pytest.mark.torch
@pytest.mark.parametrize("recipe", ["mlp_adamw", "counted_cnn_mom_fp16"])
def test_a_fresh_export_gives_the_golden(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "fresh.tar.xz"
    subprocess.run([sys.executable, PLAIN / "write.py", "-o", out, recipe], check=True, timeout=600)
    fresh = files_of(out)
    assert fresh
    version = next(iter(golden())).partition("/")[0]
    for name, data in fresh.items():
        (tmp_path / "step.onnx").write_bytes(data)
        assert roles_of(tmp_path / "step.onnx") == golden()[f"{version}/{name}"]
