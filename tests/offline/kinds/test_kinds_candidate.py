"""What is read of a path, and when."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import FIXTURES

from gopt.errors import InputError
from gopt.offline.kinds.candidate import HEAD, FileCandidate


def test_a_model_and_its_head(ranks: Path) -> None:
    candidate = FileCandidate(FIXTURES / "mlp_sgd.onnx")
    assert candidate.model is not None and len(candidate.head) == min(HEAD, candidate.size)
    assert FileCandidate(ranks / "rank_0000.onnx").metadata["gopt.rank"] == "0"


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("text")
    candidate = FileCandidate(tmp_path / "t")
    assert candidate.model is None and candidate.metadata == {} and not candidate.is_folder
    assert FileCandidate(tmp_path).head == b"" and FileCandidate(tmp_path).model is None
    with pytest.raises(InputError, match="no such file"):
        _ = FileCandidate(tmp_path / "nothing").head
