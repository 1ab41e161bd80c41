"""Damaged files of trainers and servers: a run refuses them by name before the first step, or they change nothing."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import FIXTURES, source
from onnx import AttributeProto, ModelProto

import gopt
from gopt.artifact.server_entries import Mode
from gopt.errors import InputError
from gopt.parameter_server.options import SplitOptions

DATA = {"x": np.ones((64, 32), "f4"), "y": np.zeros(64, "i8")}
pytestmark = pytest.mark.usefixtures("unchecked")
MODES = ("sync", "async", "geo")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {mode: tmp_path_factory.mktemp(mode) / "split" for mode in MODES}
    for mode, path in found.items():
        gopt.split(source("mlp_adamw"), SplitOptions(trainers=2, servers=2, mode=Mode(mode))).write(path)
    return found


def run(folder: Path) -> None:
    gopt.run(folder, DATA, 1, settings={"lr": "0.01"}, deadline=20)


def test_a_reported_file(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["async"], tmp_path / "split")
    shutil.copy(FIXTURES / "cases/damaged/async_server_0001.exit70.onnx", folder / "server_0001.onnx")
    np.savez(tmp_path / "data.npz", **DATA)
    options = ["--data", str(tmp_path / "data.npz"), "--steps", "1", "--set", "lr=0.01"]
    # in a process of its own: one in which an earlier test gave onnx the schemas of messages needs no list of types
    command = [sys.executable, "-m", "gopt.cli", "run", str(folder), "--unchecked", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3 and re.search(r"server_0001.onnx: .*'fc1.bias'", done.stderr)


def test_exchanged_files_of_servers(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["sync"], tmp_path / "split")
    shutil.copy(folder / "server_0000.onnx", folder / "server_0001.onnx")
    with pytest.raises(InputError, match=r"server_0001.onnx"):
        run(folder)


def damage(model: ModelProto, r: random.Random) -> None:
    """Change one thing: a name, an attribute, an operator, a type of the interface."""
    graph, how = model.graph, r.choice(["output", "input", "less", "message", "message", "message", "interface"])
    messages = [each for each in graph.node if each.domain]
    node = r.choice(messages if messages and how == "message" else list(graph.node))
    if how == "output":
        node.output[r.randrange(len(node.output))] += "x"
    elif how == "input" and node.input:
        node.input[r.randrange(len(node.input))] += "x"
    elif how == "interface":
        info = r.choice([*graph.input, *graph.output])
        if info.type.tensor_type.shape.dim and r.random() < 0.5:
            info.type.tensor_type.shape.dim[0].dim_value += 1
        else:
            info.name += "x"
    elif how == "message" and node.domain:
        _change(r.choice(node.attribute), r)
    else:
        graph.node.remove(node)


def _change(attribute: AttributeProto, r: random.Random) -> None:
    if attribute.type == AttributeProto.INT:
        attribute.i += r.choice([1, -1, 100])
    elif attribute.type == AttributeProto.STRING:
        attribute.s = r.choice([b"sum", b"float16", b"x", b"before"])
    else:
        place = r.randrange(len(attribute.strings))
        attribute.strings[place] = r.choice([b"7", attribute.strings[place] + b"x"])


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 150))])
def test_a_damaged_file_is_refused_by_name(seed: int, folders: dict[str, Path], tmp_path: Path) -> None:
    r = random.Random(seed)
    folder = shutil.copytree(folders[r.choice(MODES)], tmp_path / "split")
    file = r.choice([each for each in sorted(folder.glob("*.onnx")) if each.name != "source.onnx"])
    model = onnx.load(file, load_external_data=False)
    damage(model, r)
    onnx.save(model, file)
    try:
        run(folder)
    except InputError as error:
        assert file.name in error.message
