"""The benchmark's graphs are real training steps: gopt reads, shards and proves them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from gopt import api
from gopt.verification.verify import Verifier

ROOT = Path(__file__).parents[2]


def write(path: Path, shape: str, nodes: int, *options: str) -> Path:
    command = [sys.executable, str(ROOT / "benchmarks" / "graphs.py"), shape, str(nodes), str(path), *options]
    subprocess.run(command, check=True, capture_output=True)
    return path


@pytest.mark.rest
@pytest.mark.parametrize("shape", ["mlp", "gpt"])
def test_the_thousand_node_step_is_proven(shape: str, tmp_path: Path) -> None:
    model = write(tmp_path / "step.onnx", shape, 1000)
    onnx.checker.check_model(onnx.load(model), full_check=True)
    source = api.load(model)
    parameters = len(source.training.parameters)
    assert abs(len(source.training.graph.nodes) - 1000) < 200
    api.shard(source, 2).write(tmp_path / "ranks")
    result = Verifier(tmp_path / "ranks", model).run()
    assert result.equal
    assert len(result.gradients) == parameters


@pytest.mark.parametrize("options", [("--own-steps",), ("--clip", "1")])
def test_the_stress_shapes_are_proven(options: tuple[str, ...], tmp_path: Path) -> None:
    model = write(tmp_path / "step.onnx", "mlp", 300, *options)
    api.shard(api.load(model), 3).write(tmp_path / "ranks")
    assert Verifier(tmp_path / "ranks", model).run(confirm=False).equal
