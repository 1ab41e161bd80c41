"""Plain PyTorch exports, not made by ``gopt export``: what torch.onnx.export writes of a functional step."""

from __future__ import annotations

from pathlib import Path

import pytest
from gopt.cli.main import main
from helpers import FIXTURES
from products import spread

CASES = sorted(path.stem for path in (FIXTURES / "cases/exports").glob("*.onnx"))


@pytest.mark.parametrize(("case", "stage"), spread(CASES, range(4)))
def test_exports_that_were_refused_once(case: str, stage: int, tmp_path: Path) -> None:
    """Constants that are cast like the samples; a backward that keeps a normalisation's mean in half precision."""
    source, out = FIXTURES / "cases/exports" / f"{case}.onnx", tmp_path / "out"
    assert main(["shard", str(source), "--ranks", "2", "--stage", str(stage), "-o", str(out)]) == 0
    assert main(["verify", str(out)]) == 0
