"""A first loss that is not a number: where its numbers end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from recipes import Recipe, build

import gopt
from gopt.errors import RunError
from gopt.passes.pipeline import build_pipeline

RATE = {"lr": 0.05}


def sharded(folder: Path, **values: Any) -> Path:
    """Ranks of a step with other start values."""
    model = build(Recipe(widths=(3, 6, 4), lr_input=True))
    for each in model.graph.initializer:
        if each.name in values:
            array = np.full([*each.dims], values[each.name], "f4")
            each.CopyFrom(onnx.numpy_helper.from_array(array, each.name))
    onnx.save(model, folder / "step.onnx")
    pipeline = build_pipeline(defaults={"shard": {"stage": 3}})
    gopt.shard(gopt.load(folder / "step.onnx"), "shard=2", pipeline=pipeline).write(folder / "ranks")
    return folder / "ranks"


def arrays(bad: float = 0.0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    found = {name: random.standard_normal((16, width)).astype("f4") for name, width in (("x", 3), ("y", 4))}
    found["y"][6, 1] = bad or found["y"][6, 1]
    return found


@pytest.mark.parametrize(
    ("values", "bad", "said"),
    [
        ({}, float("nan"), r"rank 1, step 1: the loss is nan in the data: 'y' is NaN in 1 of its 16 .* in row 2"),
        ({"b1": float("nan")}, 0.0, r"in the start values: 'b1' is NaN"),
        ({"b1": 1e30}, 0.0, r"in the first forward: 'v6_0', which Mul computes, is infinite"),
    ],
)
def test_it_is_said_which_input_or_value_is_first(values, bad, said, tmp_path):
    with pytest.raises(RunError, match=said) as error:
        gopt.run(sharded(tmp_path, **values), arrays(bad), 3, settings=RATE, stop_on_nan=True)
    assert "learning rate" not in "".join(error.value.hints)


def test_a_later_one_has_the_learning_rate_for_a_hint(tmp_path):
    with pytest.raises(RunError, match=r"step [2-9]\d*: the loss is (nan|inf)") as error:
        gopt.run(sharded(tmp_path), arrays(), 60, settings={"lr": 1e30}, stop_on_nan=True)
    assert error.value.hints[0].startswith("lower the learning rate")


def test_a_run_that_goes_on_says_it_at_the_end(tmp_path, capsys):
    folder = sharded(tmp_path)
    np.savez(tmp_path / "data.npz", **arrays(float("inf")))
    command = ["run", str(folder), "--data", str(tmp_path / "data.npz"), "--steps", "2", "--set", "lr=0.05"]
    assert main(command) == 0
    assert "first in step 1, rank 1: in the data: 'y' is infinite" in " ".join(capsys.readouterr().out.split())
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_finite"]["cause"].startswith("rank 1: in the data: 'y'")
