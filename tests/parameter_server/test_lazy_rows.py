"""Servers' graphs that update touched rows: what they gather and put back, and reductions over a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import ROOT
from onnx import helper, numpy_helper

from gopt import api
from gopt.errors import OptionError
from gopt.ir.graph import COMM
from gopt.parameter_server.options import SplitOptions
from gopt.verification.verify import Verifier


def split(model: Path, **given: object) -> api.Split:
    options = {"trainers": 2, "servers": 2, "minimum": 16, "tables": {"*": "modulo"}, "rows": {"*": "lazy"}, **given}
    return api.split(api.load(model), SplitOptions(**options))  # type: ignore[arg-type]


def test_every_state_with_rows_is_gathered_and_put_back(tmp_path: Path) -> None:
    split(ROOT / "fixtures/sparse/dlrm_adam.onnx", rows={"table0": "lazy", "*": "dense"}).write(tmp_path / "out")
    graph = onnx.load(tmp_path / "out/server_0001.onnx", load_external_data=False).graph
    root = "gopt.ps.t0.part1"
    names = [f"{root}.{role}" for role in ("parameter", "state1", "state2")]
    gathered = {node.input[0]: node.input[1] for node in graph.node if node.op_type == "Gather"}
    assert gathered == {f"{name}.table": f"{root}.ids" for name in names}
    put = [node.input[0] for node in graph.node if node.op_type == "ScatterND" and node.input[0].startswith(root)]
    assert put == list(gathered)
    assert f"{root}.zeros" not in {made for node in graph.node for made in node.output}
    assert "gopt.ps.t1.part1.zeros" in {made for node in graph.node for made in node.output}


def clipped(path: Path, kind: str) -> Path:
    """SGD whose gradients are made shorter by a reduction over all of them."""
    model = onnx.load(ROOT / "fixtures/sparse/dlrm_sgd.onnx")
    graph = model.graph
    updates = [node for node in graph.node if "lr" in node.input]
    gradients = [next(name for name in node.input if name != "lr") for node in updates]
    graph.initializer.append(numpy_helper.from_array(np.array(0.05, np.float32), "limit"))
    graph.initializer.append(numpy_helper.from_array(np.array(1, np.float32), "most"))
    made = [helper.make_node(kind, [name], [f"size{n}"], keepdims=0) for n, name in enumerate(gradients)]
    sizes = [f"size{n}" for n, _ in enumerate(gradients)]
    made += [
        helper.make_node("Sum" if kind == "ReduceSumSquare" else "Max", sizes, ["size"]),
        helper.make_node("Abs", ["size"], ["positive"]), helper.make_node("Sqrt", ["positive"], ["norm"]),
        helper.make_node("Div", ["limit", "norm"], ["ratio"]), helper.make_node("Min", ["ratio", "most"], ["factor"]),
    ]  # fmt: skip
    for number, (node, name) in enumerate(zip(updates, gradients, strict=True)):
        made.append(helper.make_node("Mul", [name, "factor"], [f"clipped{number}"]))
        node.input[list(node.input).index(name)] = f"clipped{number}"
    late, behind = [], {name for node in made for name in node.output}
    early = []
    for node in graph.node:
        (late if behind.intersection(node.input) else early).append(node)
        behind.update(node.output if late and node is late[-1] else ())
    del graph.node[:]
    graph.node.extend([*early, *made, *late])
    onnx.save(model, path)
    return path


def test_a_norm_over_all_gradients_is_that_of_the_touched_rows(tmp_path: Path) -> None:
    split(clipped(tmp_path / "step.onnx", "ReduceSumSquare")).write(tmp_path / "out")
    calls = [
        node.op_type for node in onnx.load(tmp_path / "out/server_0000.onnx", load_external_data=False).graph.node
        if node.domain == COMM and node.op_type == "AllReduce"
    ]  # fmt: skip
    assert calls == ["AllReduce"]
    assert Verifier(tmp_path / "out", deadline=60).run(confirm=False, steps=2).exit_code == 0


def test_a_reduction_that_needs_all_rows_is_refused(tmp_path: Path) -> None:
    model = clipped(tmp_path / "step.onnx", "ReduceMax")
    with pytest.raises(OptionError, match=r"'table0' cannot be lazy: ReduceMax .* over all rows") as caught:
        split(model)
    assert caught.value.hints == ("give --rows table0=dense",)
    split(model, rows={})
