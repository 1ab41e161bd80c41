"""What a proof does is counted in calls of functions, beside the same step with larger parameters."""

from __future__ import annotations

import cProfile
import pstats
import subprocess
import sys
from pathlib import Path

import pytest

import gopt

FORWARD = Path(__file__).resolve().parents[3] / "examples/llama/forward.py"


def _calls(width: int, folder: Path) -> int:
    """Calls of functions in a proof of a Llama's rank files."""
    sizes = {"layers": 1, "width": width, "heads": 8, "kv-heads": 4, "ffn": 2 * width, "vocab": width, "tokens": 8}
    forward, ranks = folder / f"forward_{width}.onnx", folder / f"ranks_{width}"
    arguments = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    subprocess.run([sys.executable, FORWARD, "-o", forward, *arguments], check=True, stdout=subprocess.DEVNULL)
    options = gopt.DeriveOptions(
        loss="cross-entropy", class_axis=-1, optimizer="adamw", clip_norm=1, trainable=("*.weight",), values=False
    )
    step = folder / f"step_{width}.onnx"
    gopt.derive(forward, step, options)
    gopt.shard(step, mesh="shard=4,tp=4", prove=False).write(ranks)
    profile = cProfile.Profile()
    assert profile.runcall(gopt.prove, ranks).proven
    return pstats.Stats(profile).total_calls


@pytest.mark.rest
def test_calls_do_not_grow_with_parameters(tmp_path):
    _calls(32, tmp_path)  # what is read once in a process
    small, large = _calls(64, tmp_path), _calls(2048, tmp_path)
    assert large < 1.5 * small, (small, large)
