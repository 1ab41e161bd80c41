"""A rank whose states in common drift away is named, and the last checkpoint on which all agreed stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import FIXTURES, edit_rank
from onnx import ModelProto, numpy_helper

import gopt
from gopt.errors import OptionError, RunError
from gopt.runtime.training.audit import fingerprint

BATCH = {"x": np.linspace(-1, 1, 64 * 32, dtype=np.float32).reshape(64, 32), "y": np.arange(64) % 10}


@pytest.mark.parametrize("bit", [0, 31, 32, 63, 77, 103])
def test_a_fingerprint_sees_every_bit(bit: int) -> None:
    data = np.arange(13, dtype=np.uint8)
    changed = data.copy()
    changed[bit // 8] ^= 1 << bit % 8
    assert fingerprint([data]) != fingerprint([changed])
    assert fingerprint([data]) == fingerprint([data.copy()])


@pytest.mark.parametrize("size", [4096, 4097, 8200, 8205])
def test_a_fingerprint_of_several_values_sees_every_bit(size: int) -> None:
    draw = np.random.default_rng(size)
    values = [draw.integers(0, 256, each, dtype=np.uint8) for each in (5, size, 0, 16)]
    whole = fingerprint(values)
    for number in (0, 1, 3):
        for place in {0, len(values[number]) - 1, int(draw.integers(len(values[number])))}:
            for bit in (0, 7):
                values[number][place] ^= 1 << bit
                assert fingerprint(values) != whole
                values[number][place] ^= 1 << bit
    assert fingerprint(values) == whole


def folder_of(tmp_path: Path, stage: int, mesh: str) -> Path:
    gopt.shard(FIXTURES / "mlp_adamw.onnx", mesh, stage=stage).write(tmp_path / "out")
    return tmp_path / "out"


def one_beta(model: ModelProto) -> None:
    """Another constant of the update on one rank."""
    for each in model.graph.initializer:
        if not each.external_data and numpy_helper.to_array(each).size == 1:
            value = numpy_helper.to_array(each)
            if value.dtype == np.float32 and value.reshape(()) == np.float32(0.9):
                each.CopyFrom(numpy_helper.from_array(np.full_like(value, 0.65), each.name))
                return
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t") and numpy_helper.to_array(attribute.t).size == 1:
                value = numpy_helper.to_array(attribute.t)
                if value.dtype == np.float32 and value.reshape(()) == np.float32(0.9):
                    attribute.t.CopyFrom(numpy_helper.from_array(np.full_like(value, 0.65)))
                    return
    raise AssertionError("no beta")


@pytest.mark.parametrize(("mesh", "first", "rank"), [("dp=2", 0, 1), ("dp=3", 0, 1)])
def test_a_rank_that_drifts_is_named_and_its_step_is_not_kept(tmp_path: Path, mesh: str, first: int, rank: int) -> None:
    folder = folder_of(tmp_path, 0, mesh)
    kept = tmp_path / "kept"
    gopt.run(folder, BATCH, 2, settings={"lr": 0.1}, checkpoint=kept)
    edit_rank(folder, rank, one_beta)
    with pytest.raises(
        RunError, match=rf"step 3: rank {rank} and rank {first} hold different values of 'fc1.\w+"
    ) as caught:
        gopt.run(folder, BATCH, 3, settings={"lr": 0.1}, checkpoint=kept, resume=True)
    assert "bucket b0" in caught.value.message and "continues from the last checkpoint" in caught.value.hints[-1]
    assert sorted(path.name for path in kept.glob("step_*")) == ["step_00000002"]
    with pytest.raises(RunError, match="step 4: rank"):
        gopt.run(folder, BATCH, 9, settings={"lr": 0.1}, audit=4)
    gopt.run(folder, BATCH, 3, settings={"lr": 0.1}, checkpoint=kept, resume=True, audit=0)


def test_ranks_that_agree_are_not_stopped(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 2, "dp=2,shard=2")
    assert len(gopt.run(folder, BATCH, 3, settings={"lr": 0.1}, audit=1).losses) == 3


def test_trainers_have_nothing_to_compare(tmp_path: Path) -> None:
    gopt.split(FIXTURES / "mlp_adamw.onnx", gopt.SplitOptions(trainers=2, servers=1)).write(tmp_path / "split")
    with pytest.raises(OptionError, match="audit"):
        gopt.run(tmp_path / "split", BATCH, 1, settings={"lr": 0.1}, audit=1)
