"""Draw ``gopt verify`` of a large model, with a moment of its progress: ``python docs/verify_picture.py``; a minute."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from rich.text import Text
from terminal_picture import Ran, Terminal, drawn, folded, printed, transcript, workplace

HERE = Path(__file__).parent
PICTURE = HERE / "pictures/verify.svg"
GRAPHS = HERE.parent / "benchmarks/graphs.py"
COLUMNS = 110
NODES = 20_000
_FRAME = re.compile(r"\r\x1b\[2K")
_COUNT = re.compile(r"(\d+) of (\d+)")


def moment(progress: str) -> Text:
    """The frame of the progress at which the longest of its phases was nearest to its middle."""
    frames = [Text.from_ansi(frame.strip("\n")) for frame in _FRAME.split(progress)]
    counted = [(frame, _COUNT.search(frame.plain)) for frame in frames]
    most = max(int(count[2]) for _, count in counted if count)
    left = [(abs(int(count[1]) / most - 0.5), frame) for frame, count in counted if count and int(count[2]) == most]
    return min(left, key=lambda each: each[0])[1]


def draw() -> None:
    """Shard a GPT of 20,000 nodes for 8 ranks, and verify it."""
    command = "gopt verify gpt.ranks"
    with workplace(COLUMNS):
        subprocess.run([sys.executable, GRAPHS, "gpt", str(NODES), "gpt.onnx"], check=True, stdout=subprocess.DEVNULL)
        printed("gopt shard gpt.onnx --ranks 8 -o gpt.ranks -q")
        told, progress = "", Terminal()
        told = printed(command, progress)
    lines = (moment(progress.getvalue()), Text("…", style="dim"), *folded(Text.from_ansi(told.rstrip("\n")), COLUMNS))
    PICTURE.write_text(drawn(transcript([Ran(command, lines, 0)]), "verify", COLUMNS), encoding="utf-8")


if __name__ == "__main__":
    draw()
