"""Files of other tools: what they signature like, exit code 3."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest
from helpers import FIXTURES

from gopt.errors import InputError
from gopt.offline.kinds import inspect_path
from gopt.offline.kinds.candidate import FileCandidate
from gopt.offline.kinds.unknown import SIGNATURES, looks_like


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.what)
def test_looks(signature, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\1" * signature.offset + signature.magic + bytes(64))
    with pytest.raises(InputError) as refusal:
        inspect_path(tmp_path / "f")
    assert refusal.value.exit_code == 3 and signature.what in refusal.value.message


def test_torch_files_and_json(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", pickle.dumps({}))
    with pytest.raises(InputError, match=r"torch\.save"):
        inspect_path(tmp_path / "model.pt")
    (tmp_path / "a.json").write_text('{"a": 1}')
    with pytest.raises(InputError, match="has no format of gopt"):
        inspect_path(tmp_path / "a.json")


def test_a_model_looks_like_nothing_else() -> None:
    assert looks_like(FileCandidate(FIXTURES / "mlp_sgd.onnx")) is None
