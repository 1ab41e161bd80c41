"""Every command that click knows, with outputs that take nothing, and with names that would forge lines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import every
import onnx
import pytest
from gopt.cli.main import main
from recipes import build

BAD = "\nFORGED\x1b[31m\r\u202e"
FORGED = re.compile("^\\W*FORGED|\x1b\\[31m|\r|\u202e", re.MULTILINE)
"""What a name has done where it was printed as it is."""


def test_every_command_is_in_the_table():
    assert every.missing() == set()


@pytest.mark.parametrize(
    "kind", ["some", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("all", "launched"))]
)
def test_output_that_goes_nowhere(kind):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("streams.py")), kind], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["broken"] == [] and found["shots"] >= found["commands"] > 2


def odd(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model, whose names would print lines of their own."""
    made = onnx.ModelProto.FromString(model.SerializeToString())
    graph = made.graph
    for part in (graph.initializer, graph.input, graph.output, graph.value_info, graph.node):
        for each in part:
            each.name += BAD if each.name else ""
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [name + BAD if name else name for name in names]
    return made


def test_a_name_forges_no_line(tmp_path, monkeypatch, capsys):
    every.prepare(tmp_path, odd(build(every.STEP)))
    monkeypatch.chdir(tmp_path)
    for name in ("other.onnx", "forward.onnx"):
        onnx.save(odd(onnx.load(name)), name)
    commands = [*map(str.split, every.TABLE.values()), *map(str.split, every.MORE.values())]
    commands += [["explain", folder, name + BAD] for folder in ("in.ranks", "in.split") for name in ("w0", "loss", "n")]
    commands += [["diff", "in.ranks", "in.split"], ["diff", "step.onnx", "other.onnx", "--full"]]
    commands += [["shard", "step.onnx", "--ranks", "2", "--dry-run", "--explain", "w0" + BAD]]
    for words in commands:
        main([word if word != "lr=0.01" else f"lr{BAD}=0.01" for word in words])
        said = capsys.readouterr()
        assert "FORGED" not in said.out + said.err or not FORGED.search(said.out + said.err), words
