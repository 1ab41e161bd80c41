"""One small output folder and a checkpoint for all tests of kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import FIXTURES

import gopt
from gopt.artifact.checkpoint_index import CheckpointIndex, FileEntry
from gopt.artifact.manifest_check import read_manifest


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds") / "mlp.ranks"
    gopt.shard(gopt.load(FIXTURES / "mlp_sgd.onnx"), gopt.Mesh((("shard", 2),))).write(folder)
    return folder


@pytest.fixture
def checkpoints(ranks: Path, tmp_path: Path) -> Path:
    """A folder with one complete step, whose files hold nothing that is read."""
    step = tmp_path / "checkpoints" / "step_00000004"
    step.mkdir(parents=True)
    (step / "rank_0000.safetensors").write_bytes(bytes(24))
    digest = read_manifest(ranks)[0].digest()
    index = CheckpointIndex(step=4, manifest=digest, files={"rank_0000.safetensors": FileEntry(24, "0" * 64)})
    (step / "index.json").write_text(index.text())
    return step.parent
