"""A model and the file of its values: what of older values stays."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gopt.cli.main import main
from helpers import FIXTURES, accept

import gopt.offline.merge as merging

MODEL = str(FIXTURES / "mlp_sgd.onnx")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["shard", MODEL, "--ranks", "2", "-o", "out"]) == 0


def test_a_copy_of_a_model_keeps_its_values(monkeypatch):
    monkeypatch.setattr(merging, "EMBED", 0)
    assert main(["merge", "out", "-o", "m.onnx"]) == 0
    [old] = Path().glob("m.onnx.*.data")
    shutil.copy("m.onnx", "best.onnx")
    raw = bytearray(Path("out/states.bin").read_bytes())
    raw[1] ^= 1
    Path("out/states.bin").write_bytes(raw)
    accept(Path("out"))
    assert main(["merge", "out", "-o", "m.onnx", "--force"]) == 0
    assert len(list(Path().glob("m.onnx.*.data"))) == 2 and old.exists()
    Path("best.onnx").unlink()
    assert main(["merge", "out", "-o", "m.onnx", "--force"]) == 0
    assert len(list(Path().glob("m.onnx.*.data"))) == 1 and not old.exists()


def test_values_of_somebody_else_stay(monkeypatch):
    monkeypatch.setattr(merging, "EMBED", 0)
    for name in ("m.onnx.data", "m.onnx.0123abcd.data", "other.onnx.data"):
        Path(name).write_text("mine")
    assert main(["merge", "out", "-o", "m.onnx"]) == 0
    assert main(["merge", "out", "-o", "m.onnx", "--force"]) == 0
    assert all(Path(n).read_text() == "mine" for n in ("m.onnx.data", "m.onnx.0123abcd.data", "other.onnx.data"))


@pytest.mark.parametrize("name", ["trained.pt", "trained.safetensors", "trained.npz"])
@pytest.mark.parametrize("option", [[], ["--inference"], ["--training-info"]])
def test_a_model_is_not_written_under_the_name_of_a_file_of_values(option, name, capsys):
    """``gopt merge CKPT -o trained.pt`` wrote an ONNX file that torch.load could not read."""
    assert main(["merge", "out", *option, "-o", name]) == 2 and not Path(name).exists()
    assert "--state-dict" in capsys.readouterr().err
