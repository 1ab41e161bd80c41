"""``gopt.run``: losses and states, from folders and objects, of ranks and of a split."""

from __future__ import annotations

import gc

import numpy as np
import onnx
import pytest
from helpers import Builder, perceptron, sgd, source

import gopt


def batch():
    return {"x": np.ones((16, 32), np.float32), "y": np.arange(16) % 4}


def test_ranks_train_as_one(tmp_path):
    folder = tmp_path / "ranks"
    gopt.shard(source("mlp_sgd"), 2).write(folder)
    seen = []
    ran = gopt.run(folder, batch(), 2, settings={"lr": 0.1}, checkpoint=tmp_path / "kept", on_step=seen.append)
    assert len(ran.losses) == 2 and tuple(seen) == ran.steps and ran.path.is_dir()
    assert set(ran.states) == {state.tensor for state in source("mlp_sgd").training.states}
    more = gopt.run(folder, batch(), 3, settings={"lr": 0.1}, checkpoint=tmp_path / "kept", resume=True)
    assert [step.step for step in more.steps] == [3]
    assert "loss" in repr(more) and "step 3" in more._repr_html_()


def test_a_loss_may_have_dimensions(tmp_path):
    """Losses of one element and of two dimensions, as some exporters write them."""
    b = Builder()
    sgd(b, perceptron(b, (3, 5, 2)))
    at, shown = next(each for each in enumerate(b.outputs) if not each[1].type.tensor_type.shape.dim)
    b.outputs[at] = onnx.helper.make_tensor_value_info("table", 1, [1, 1])
    b.nodes.append(onnx.helper.make_node("Reshape", [shown.name, b.const([1, 1], "int64")], ["table"]))
    data = {"x": np.ones((8, 3), np.float32), "y": np.ones((8, 2), np.float32)}
    assert len(gopt.run(gopt.shard(b.save(tmp_path / "step.onnx"), 2), data, 1).losses) == 1


def test_objects_go_from_verb_to_verb(tmp_path):
    ran = gopt.run(gopt.shard(source("mlp_sgd"), 2), batch(), 1, settings={"lr": 0.1})
    states, path = ran.states, ran.path
    wider = gopt.reshard(ran, "shard=3")
    del ran
    gc.collect()
    assert path.is_dir()
    wider.write(tmp_path / "three")
    gopt.merge(wider, tmp_path / "whole.onnx")
    again = gopt.load(tmp_path / "whole.onnx").training.graph.initializers
    assert all(np.array_equal(again[name].numpy(), value) for name, value in states.items())


def test_a_split_trains():
    split = gopt.split(source("mlp_sgd"), gopt.SplitOptions(trainers=2, servers=1))
    assert len(gopt.run(split, batch(), 1, settings={"lr": 0.1}).losses) == 1


def test_what_does_not_go_together():
    sharded = gopt.shard(source("mlp_sgd"), 2)
    with pytest.raises(gopt.OptionError, match="belongs to an output folder"):
        gopt.run(sharded, batch(), 1, checkpoint="kept")
    with pytest.raises(gopt.OptionError, match="resume needs checkpoint"):
        gopt.run(sharded, batch(), 1, resume=True)
    with pytest.raises(gopt.OptionError, match="steps=0"):
        gopt.run(sharded, batch(), 0)
