"""The Llama example at a small size, on all axes: proven, and different where a rank has an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from helpers import ROOT

import gopt
from gopt.verification.proof.result import ProofVerdict

SCRIPT = ROOT / "examples" / "llama" / "forward.py"
SIZE = "--layers 2 --width 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 40 --tokens 8"


@pytest.mark.rest
def test_a_rank_that_turns_keys_by_other_angles_is_different(tmp_path: Path) -> None:
    forward, step, folder = (tmp_path / name for name in ("forward.onnx", "step.onnx", "ranks"))
    subprocess.run([sys.executable, SCRIPT, *SIZE.split(), "-o", forward], check=True, capture_output=True)
    onnx.checker.check_model(forward, full_check=True)
    options = gopt.DeriveOptions(
        loss="cross-entropy", class_axis=-1, optimizer="adamw", clip_norm=1.0, trainable=("*.weight",), values=False
    )
    assert gopt.derive(forward, step, options).parameters == 21
    gopt.shard(step, "shard=3,tp=2", bucket_mb=0).write(tmp_path / "thirds")
    assert gopt.prove(tmp_path / "thirds").proven, "thirds of columns end inside of rows"
    gopt.shard(step, "dp=2,shard=2,tp=2").write(folder)
    assert gopt.prove(folder).proven
    path = folder / "rank_0001.onnx"
    model = onnx.load(path)
    (near,) = (node for node in model.graph.node if node.output[0] == "layers.1.attn.k.near")
    near.input[list(near.input).index("cos")] = "sin"
    onnx.save(model, path)
    with gopt.unchecked():
        assert gopt.prove(folder).verdict is ProofVerdict.DIFFERENT
