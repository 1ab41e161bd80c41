"""The training scripts of the pages for users of FSDP and DeepSpeed, on two processes, print the losses of gopt's."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import page_blocks
import pytest
from helpers import ROOT

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

ABORT = "terminate called without an active exception"


def run(words: list[str]) -> str:
    started = {"gopt": ["-m", "gopt"], "torchrun": ["-m", "torch.distributed.run"]}[words[0]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *started, *words[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    # FSDP2 on gloo (PyTorch 2.13, no gopt in the process) now and then aborts while the interpreter ends, all done.
    aborted = words[0] == "torchrun" and "train_gopt.py" not in words and ABORT in done.stderr
    assert done.returncode == 0 or aborted, done.stderr
    return done.stdout


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss ([\d.]+)$", printed, re.M)}


@pytest.mark.parametrize("name", ["fsdp", "deepspeed"])
def test_both_scripts_of_a_page_print_the_same_losses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
    monkeypatch.chdir(tmp_path)
    page = page_blocks.blocks((ROOT / f"docs/coming-from-{name}.md").read_text(encoding="utf-8"))
    before, after = (block.text for block in page if block.language == "python")
    Path(f"train_{name}.py").write_text(before, encoding="utf-8")
    Path("train_gopt.py").write_text(after, encoding="utf-8")
    theirs = losses(run(shlex.split(f"torchrun --nproc-per-node 2 train_{name}.py")))
    Path("ckpt").rename("theirs")
    commands = [
        line.text for block in page if block.language == "bash" and block.not_run for line in page_blocks.lines(block)
    ]
    ours = losses([run(shlex.split(command)) for command in commands][-1])
    assert list(ours) == list(range(8, 65, 8))
    assert ours == pytest.approx(theirs, abs=2e-4)
