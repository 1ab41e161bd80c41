"""Files of values alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from kind_files import npz, safetensors

from gopt.errors import InputError
from gopt.offline.kinds.candidate import FileCandidate
from gopt.offline.kinds.value_files import inspect_npz, inspect_safetensors, is_npz, is_safetensors


def test_safetensors(tmp_path: Path) -> None:
    candidate = FileCandidate(safetensors(tmp_path / "v"))
    assert is_safetensors(candidate) and not is_npz(candidate)
    record = inspect_safetensors(candidate)
    assert (record.kind, record.bytes, record.metadata) == ("safetensors", 16, {"format": "pt"})
    assert [(each.name, each.shape) for each in record.tensors] == [("w", (2, 2))]


def test_npz(tmp_path: Path) -> None:
    candidate = FileCandidate(npz(tmp_path / "v"))
    assert is_npz(candidate) and not is_safetensors(candidate)
    record = inspect_npz(candidate)
    assert {each.name: (each.dtype, each.shape) for each in record.tensors} == {
        "w": ("float32", (2, 3)), "n": ("int64", ()),
    }  # fmt: skip


def test_a_short_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "v")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="truncated"):
        inspect_safetensors(FileCandidate(path))
