"""Write the command output into docs/report.md: ``python docs/report.py``."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path

from gopt.cli.main import main

HERE = Path(__file__).parent
PAGE = HERE / "report.md"
MODEL = HERE.parent / "fixtures/mlp_adamw.onnx"
_BLOCK = re.compile(r"```text\n\$ (gopt [^\n]*)\n.*?```", re.S)


def page(text: str) -> str:
    """The page with the output that its commands have now. A block begins with the command."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as home:
        try:
            os.chdir(home)
            Path("step.onnx").write_bytes(MODEL.read_bytes())
            return _BLOCK.sub(lambda found: f"```text\n$ {found[1]}\n{output(found[1])}```", text)
        finally:
            os.chdir(here)


def output(command: str) -> str:
    """What a command prints at 100 columns; ``| jq -c .KEY[0]`` shows the first group of a list of the report."""
    before, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "100"
    try:
        with contextlib.redirect_stdout(io.StringIO()) as told:
            main(command.split()[1:])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return "".join(f"{line.rstrip()}\n" for line in told.getvalue().splitlines())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
