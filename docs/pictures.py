"""Draw the pictures of terminals in the docs from real output: ``python docs/pictures.py [NAME ...]``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from golden import STEP, change
from terminal_picture import Screen, printed, svg

HERE = Path(__file__).parent
FOLDER = HERE / "pictures"
FIXTURES = HERE.parent / "fixtures"
PAGE_WIDTH = 110
"""Columns that fit on a page beside the site's navigation."""
_SAMPLES = """\
import numpy as np

random = np.random.default_rng(0)
x = random.standard_normal((64, 32), dtype=np.float32)
np.savez("samples.npz", x=x, y=random.integers(0, 10, 64))
"""


def _model(name: str) -> None:
    shutil.copy(FIXTURES / name, Path(name).name)


def _gpt() -> None:
    _model("gpt_adamw.onnx")


def _small_gpt() -> None:
    _model("gpt_adamw_clip_sched_fp16.onnx")


def _folder() -> None:
    _gpt()
    printed("gopt shard gpt_adamw.onnx --ranks 4 -o gpt.ranks -q")


def _two_folders() -> None:
    _gpt()
    printed("gopt shard gpt_adamw.onnx --ranks 8 -o before.ranks -q")
    printed("gopt shard gpt_adamw.onnx --ranks 8 --stage 3 -o after.ranks -q")


def _golden() -> None:
    STEP.parent.mkdir()
    change("first")
    printed("gopt golden update goldens")
    change("decay")


def _samples() -> None:
    exec(_SAMPLES, {})


def _mlp_and_samples() -> None:
    _model("mlp_adamw.onnx")
    _samples()


def _checkpoint() -> None:
    _mlp_and_samples()
    printed("gopt shard mlp_adamw.onnx --ranks 4 -o mlp.ranks -q")
    printed("gopt run mlp.ranks --data samples.npz --steps 20 --set lr=1e-3 --checkpoint ckpt --every 10 -q")


SCREENS = (
    Screen(
        "gopt", ("gopt shard gpt_adamw_clip_sched_fp16.onnx --ranks 4 -o gpt.ranks", "gopt verify gpt.ranks"),
        PAGE_WIDTH, _small_gpt, measures=True,
    ),
    Screen("golden-check", ("gopt golden check goldens",), prepare=_golden),
    Screen("diff", ("gopt diff before.ranks after.ranks",), prepare=_two_folders),
    Screen("explain", ("gopt explain gpt.ranks blocks.0.qkv.weight", "gopt explain gpt.ranks b0"), prepare=_folder),
    Screen("plan-80", ("gopt plan gpt_adamw.onnx --ranks 64 --link 8x200GB/s:5us,25GB/s:10us",), 80, _gpt),
    Screen("plan-wide", ("gopt plan gpt_adamw.onnx --ranks 64 --link 8x200GB/s:5us,25GB/s:10us --wide",), 150, _gpt),
    Screen("inspect-model", ("gopt inspect mlp_adamw.onnx",), PAGE_WIDTH, _mlp_and_samples),
    Screen("inspect-folder", ("gopt inspect gpt.ranks",), PAGE_WIDTH, _folder),
    Screen("inspect-checkpoint", ("gopt inspect ckpt",), PAGE_WIDTH, _checkpoint),
    Screen(
        "parameter-server",
        (
            "gopt split mlp_adamw.onnx --trainers 2 --servers 2 -o mlp.split",
            "gopt run mlp.split --data samples.npz --steps 100 --set lr=1e-3 --checkpoint ckpt",
        ),
        PAGE_WIDTH, _mlp_and_samples, measures=True,
    ),
)  # fmt: skip


def draw(names: list[str]) -> None:
    """Draw these screens; all where none is named."""
    for screen in SCREENS:
        if not names or screen.name in names:
            (FOLDER / f"{screen.name}.svg").write_text(svg(screen), encoding="utf-8")


if __name__ == "__main__":
    draw(sys.argv[1:])
