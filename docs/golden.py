"""Write the command output into docs/golden.md: ``python docs/golden.py``."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path

import onnx
from gopt.cli.main import main

HERE = Path(__file__).parent
PAGE = HERE / "golden.md"
MODEL = HERE.parent / "fixtures/mlp_adamw.onnx"
WIDTH = 100
STEP = Path("goldens/mlp_adamw.onnx")
OPTIONS = {"first": (4, ""), "decay": (4, ""), "buckets": (4, ', "--bucket-mb", "0.01"'), "ranks": (8, "")}
"""A change that the page shows -> ranks and more options of its case."""
_BLOCK = re.compile(r"(<!-- (\w+) -->\n```\w+\n)(\$ gopt .*?)```", re.S)
_COMMAND = re.compile(r"^\$ (gopt [^\n]*)$", re.M)
_TOML = """\
[case.mlp]
model = "mlp_adamw.onnx"
options = ["--ranks", "{}", "--stage", "1"{}]
"""


def page(text: str) -> str:
    """The page with the output that its commands have now: a block names its change and begins with its commands."""
    here, columns = Path.cwd(), os.environ.get("COLUMNS")
    with tempfile.TemporaryDirectory() as home:
        try:
            os.chdir(home)
            os.environ["COLUMNS"] = str(WIDTH)
            STEP.parent.mkdir()
            return _BLOCK.sub(lambda found: f"{found[1]}{_shown(found[2], found[3])}```", text)
        finally:
            os.chdir(here)
            del os.environ["COLUMNS"]
            if columns is not None:
                os.environ["COLUMNS"] = columns


def change(name: str) -> None:
    """Make model and options what they are after a change."""
    ranks, more = OPTIONS[name]
    (STEP.parent / "gopt-golden.toml").write_text(_TOML.format(ranks, more))
    model = onnx.load(MODEL)
    for each in model.graph.initializer:
        value = onnx.numpy_helper.to_array(each)
        if name == "decay" and value.shape == () and abs(float(value) - 0.01) < 1e-6:
            each.CopyFrom(onnx.numpy_helper.from_array(value * 2, each.name))
    onnx.save(model, STEP)


def _shown(name: str, block: str) -> str:
    change(name)
    return "".join(f"$ {command}\n{_output(command)}" for command in _COMMAND.findall(block))


def _output(command: str) -> str:
    """What a command prints; of ``gopt shard`` nothing."""
    with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(command.split()[1:])
    if code not in (0, 1):
        raise RuntimeError(f"{command}: {code}: {errors.getvalue()}")
    lines = () if command.startswith("gopt shard") else told.getvalue().splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
