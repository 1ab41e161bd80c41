"""Steps of optimizers that read norms, extremes and single elements of parameters, where a rank has one element of one:
``fixtures/updates`` has the exports."""

from __future__ import annotations

import tarfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from helpers import FIXTURES, edit_ranks
from onnx import ModelProto, numpy_helper
from products import part

import gopt

(ARCHIVE,) = (FIXTURES / "updates").glob("*.tar.xz")
MESHES = ("tp=3", "shard=3", "dp=2,tp=2")


@cache
def steps() -> dict[str, bytes]:
    with tarfile.open(ARCHIVE) as archive:
        return {entry.name[:-5]: file.read() for entry in archive if (file := archive.extractfile(entry)) is not None}


def ranks(name: str, mesh: str, folder: Path) -> Path:
    (folder / "step.onnx").write_bytes(steps()[name])
    gopt.shard(folder / "step.onnx", mesh).write(folder / "out")
    return folder / "out"


ALL = [(name, mesh) for name in sorted(steps()) for mesh in MESHES]


@pytest.mark.parametrize(("name", "mesh"), [*((name, "tp=2") for name in sorted(steps())), *part(ALL, 4)])
def test_the_step_is_proven(name, mesh, tmp_path):
    assert list(gopt.prove(ranks(name, mesh, tmp_path)).open()) == []


@pytest.mark.parametrize("name", sorted(steps()))
def test_another_constant_of_the_update_is_not_proven(name, tmp_path):
    folder = ranks(name, "tp=2", tmp_path)

    def edit(model: ModelProto) -> None:
        """The last constant of a Mul is a hundredth larger."""
        stored = {
            tensor.name: tensor for tensor in model.graph.initializer if not tensor.dims and tensor.data_type == 1
        }
        read = [name for node in model.graph.node if node.op_type == "Mul" for name in node.input if name in stored]
        value = numpy_helper.to_array(stored[read[-1]])
        stored[read[-1]].CopyFrom(numpy_helper.from_array(np.float32(value * 1.01), read[-1]))

    edit_ranks(folder, edit)
    assert not gopt.prove(folder).proven


@pytest.mark.parametrize(("name", "mesh"), part(ALL, 3))
def test_the_ranks_are_equal_by_numbers(name, mesh, tmp_path):
    assert gopt.verify(ranks(name, mesh, tmp_path), steps=2, confirm=False).equal


@pytest.mark.parametrize(("name", "mesh"), part(ALL, 3))
def test_no_line_of_the_certificate_is_wrong(name, mesh, tmp_path):
    folder = ranks(name, mesh, tmp_path)
    assert gopt.prove(folder, certificate=tmp_path / "step.cert").proven
    assert gopt.check_certificate(tmp_path / "step.cert", folder).exit_code in (0, 4)
