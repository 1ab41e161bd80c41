"""Narrow parameters beside masters replace themselves, though the way through the gradient leads to another one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import Builder

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.errors import UnsupportedError
from gopt.verification.verify import Verifier

HALF = onnx.TensorProto.FLOAT16


def step(folder: Path, values: tuple[float, float] = (0.5, 0.75), order: tuple[int, int] = (1, 0)) -> Path:
    """One sample of x · w0 · w1 against y in float16, with float32 masters under momentum; all element by element."""
    b = Builder()
    x, y = (b.op("Cast", b.input(name, (1, 3)), to=HALF) for name in "xy")
    halves = [b.state(f"w{n}", np.full((1, 3), values[n], np.float16)) for n in (0, 1)]
    masters = [b.state(f"m{n}", np.full((1, 3), values[n], np.float32)) for n in (0, 1)]
    rest = b.op("Sub", b.op("Mul", b.op("Mul", x, halves[0]), halves[1]), y)
    loss = b.op("ReduceMean", b.op("Mul", rest, rest), keepdims=0)
    delta = b.op("Mul", b.op("Mul", rest, b.const(2 / 3, "float16")), x)
    b.output("loss", b.op("Cast", loss, to=onnx.TensorProto.FLOAT), ())
    for n in order:
        wide = b.op("Cast", b.op("Mul", delta, halves[1 - n]), to=onnx.TensorProto.FLOAT)
        kept = b.op("Add", b.op("Mul", b.small(f"v{n}", (1, 3)), b.const(0.9)), wide)
        b.output(f"v{n}_new", kept, (1, 3))
        new = b.op("Sub", masters[n], b.op("Mul", kept, b.const(0.1)))
        b.output(f"m{n}_new", new, (1, 3))
        b.output(f"w{n}_new", b.op("Cast", f"m{n}_new", to=HALF), (1, 3), "float16")
    return b.save(folder / "step.onnx")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_half_follows_its_own_master(order, tmp_path):
    source = gopt.load(step(tmp_path, order=order))
    updated = {state.tensor: state.updated for state in source.training.states}
    assert updated == {name: f"{name}_new" for name in ("w0", "w1", "m0", "m1", "v0", "v1")}
    assert {state.tensor: state.of for state in source.training.states if state.of} == {
        "m0": "w0", "v0": "w0", "m1": "w1", "v1": "w1"
    }  # fmt: skip
    gopt.shard(source, 2, stage=2).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2).equal


def test_halves_of_equal_values_are_refused_by_name(tmp_path):
    """Two masters with one stored value: neither structure nor values say which half is whose."""
    path = step(tmp_path, values=(0.5, 0.5))
    with pytest.raises(UnsupportedError, match="may replace any of"):
        gopt.load(path)
    named = gopt.load(path, roles=RoleMap(states={"w0": "w0_new", "w1": "w1_new"}))
    assert {state.tensor: state.updated for state in named.training.states}["w1"] == "w1_new"
