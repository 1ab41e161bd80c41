"""Draw the README's picture from real output: ``python docs/pictures.py``."""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path

from gopt.cli import render
from gopt.cli.main import main
from rich.console import Console

HERE = Path(__file__).parent


def draw() -> None:
    """Run shard and verify on a shipped fixture and keep what they print as an SVG."""
    screen = Console(record=True, width=110, file=io.StringIO(), highlight=False, force_terminal=True)
    render.console = lambda: screen  # type: ignore[assignment]
    model = str(HERE.parent / "fixtures/gpt_adamw_clip_sched_fp16.onnx")
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/gpt.ranks"
        screen.print("[bold]$ gopt shard gpt_adamw_clip_sched_fp16.onnx --ranks 4 -o gpt.ranks")
        assert main(["shard", model, "--ranks", "4", "-o", out]) == 0
        screen.print("\n[bold]$ gopt verify gpt.ranks")
        assert main(["verify", out]) == 0
    picture = screen.export_svg(title="gopt", unique_id="gopt")
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.S).replace(folder + "/", "")
    (HERE / "gopt.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    draw()
