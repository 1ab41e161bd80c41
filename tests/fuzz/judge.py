"""What a command may never do, whatever it is given."""

from __future__ import annotations

import re
from pathlib import Path

from fuzz.cases import Command
from fuzz.child import MEMORY, Outcome, in_child

_ERROR = "gopt: error: "
_LINE = 1100
"""Bytes of a line: 1000 and its beginning."""
_ESCAPES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def fault(command: Command, ended: Outcome, folder: Path) -> str:
    """What is wrong with how a command ended; '' where nothing is."""
    if ended.code is None:
        return "hangs"
    if ended.code < 0:
        return f"signal {-ended.code}"
    if "Traceback (most" in ended.said:
        return "traceback"
    if ended.code not in (0, 1, 2, 3, 4, 5):
        return f"exit {ended.code}"
    if ended.peak > MEMORY:
        return f"{ended.peak >> 20} MiB"
    if "out of memory" in ended.said:
        return "out of memory"
    if ended.code > 1:
        # A proof that stays open is a result, not an error.
        unproven = command[0] == "verify" and ended.code == 4 and _ERROR not in ended.said
        return "" if unproven else _spoken(ended.said)
    if "m.onnx" in command and not _legal(folder / "m.onnx"):
        return f"exit {ended.code} of a model that onnx.checker refuses"
    return ""


def untrue(command: Command, ended: Outcome) -> str:
    """What is wrong with a command on ranks that gopt itself has just written; '' where nothing is."""
    # A step whose backward is none is refuted by its gradients, and rightly so.
    if command[0] == "verify" and ended.code == 1 and "--no-confirm" in command:
        return "ranks differ from their source"
    reads = command[0] in ("verify", "merge", "reshard")
    return "gopt refuses what it wrote" if reads and ended.code == 3 else ""


def _spoken(said: str) -> str:
    lines = said.splitlines()
    if sum(line.startswith(_ERROR) for line in lines) != 1:
        return "not one line of error"
    line = next(line for line in lines if line.startswith(_ERROR))
    if len(line.encode(errors="replace")) > _LINE:
        return "a long line"
    return "escapes" if _ESCAPES.search(line) else ""


def _legal(path: Path) -> bool:
    """Whether onnx's checker accepts a model, asked in a child: it may not come back."""

    def check() -> int:
        import onnx

        try:
            onnx.checker.check_model(str(path), full_check=True)
        except Exception:
            return 3
        return 0

    return in_child(check, path.parent).code == 0
