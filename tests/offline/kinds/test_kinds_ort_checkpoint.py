"""ONNX Runtime's training checkpoint, written by hand after its schema: see ``kind_files``."""

from __future__ import annotations

from pathlib import Path

import pytest
from kind_files import ort_checkpoint

from gopt.errors import InputError
from gopt.offline.kinds.candidate import FileCandidate
from gopt.offline.kinds.ort_checkpoint import inspect_ort_checkpoint, is_ort_checkpoint


def test_parameters_groups_and_properties(tmp_path: Path) -> None:
    record = inspect_ort_checkpoint(FileCandidate(ort_checkpoint(tmp_path / "c")))
    assert [(each.name, each.dtype, each.shape, each.bytes) for each in record.trainable] == [
        ("w", "float32", (4, 2), 32)
    ]
    assert [(each.name, each.shape) for each in record.frozen] == [("f", (3,))]
    group = record.groups[0]
    assert (group.name, group.step, group.learning_rate, group.parameters, group.states) == ("group0", 7, 0.5, 1, 2)
    assert group.bytes == 64 and record.properties == {"epoch": 3} and record.version == 1


def test_any_byte_may_be_wrong(tmp_path: Path) -> None:
    """A damaged file is described or refused, in one line."""
    data = ort_checkpoint(tmp_path / "c").read_bytes()
    refused = 0
    for place in (0, *range(8, len(data), 3)):
        (tmp_path / "d").write_bytes(data[:place] + b"\xff" + data[place + 1 :])
        candidate = FileCandidate(tmp_path / "d")
        assert is_ort_checkpoint(candidate)
        try:
            inspect_ort_checkpoint(candidate)
        except InputError:
            refused += 1
    assert refused > 20


def test_a_cut_one_is_refused(tmp_path: Path) -> None:
    data = ort_checkpoint(tmp_path / "c").read_bytes()
    (tmp_path / "c").write_bytes(data[:40])
    with pytest.raises(InputError, match="damaged checkpoint of ONNX Runtime"):
        inspect_ort_checkpoint(FileCandidate(tmp_path / "c"))
