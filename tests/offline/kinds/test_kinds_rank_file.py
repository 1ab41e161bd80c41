"""One rank's file by itself."""

from __future__ import annotations

import shutil
from pathlib import Path

from gopt.offline.kinds.candidate import FileCandidate
from gopt.offline.kinds.rank_file import inspect_rank_file, is_rank_file


def test_calls_and_states(ranks: Path, tmp_path: Path) -> None:
    candidate = FileCandidate(ranks / "rank_0001.onnx")
    assert is_rank_file(candidate) and not is_rank_file(FileCandidate(ranks / "source.onnx"))
    record = inspect_rank_file(candidate)
    assert (record.rank, record.mesh) == ("1", "shard=2")
    assert record.calls == {"ReduceScatter shard": 1, "AllGather shard": 1}
    assert record.next == f"gopt inspect {ranks} shows all ranks"
    for name in ("rank_0001.onnx", "states.bin"):
        shutil.copy(ranks / name, tmp_path / name)
    assert "not beside it" in inspect_rank_file(FileCandidate(tmp_path / "rank_0001.onnx")).next
