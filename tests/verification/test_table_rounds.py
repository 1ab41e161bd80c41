"""``gopt verify`` of tables: equal where they are, and each planted error is seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import ROOT, accept

from gopt import api
from gopt.parameter_server.options import SplitOptions
from gopt.verification.verify import Verifier


def split(tmp_path: Path, name: str, layout: str) -> Path:
    options = SplitOptions(trainers=2, servers=3, minimum=16, tables={"*": layout})
    api.split(api.load(ROOT / f"fixtures/sparse/{name}.onnx"), options).write(tmp_path / "out")
    return tmp_path / "out"


def verified(folder: Path) -> int:
    return Verifier(folder, deadline=60).run(confirm=False, steps=2).exit_code


@pytest.mark.parametrize(
    ("name", "layout"), [("dlrm_adagrad", "modulo"), ("towers_adam", "columns"), ("nce_sgd", "range")]
)
def test_tables_equal_their_source(name: str, layout: str, tmp_path: Path) -> None:
    assert verified(split(tmp_path, name, layout)) == 0


def summed(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if node.op_type == "AggregateRows":
            next(each for each in node.attribute if each.name == "reduce").s = b"sum"


def neighbours(graph: onnx.GraphProto) -> None:
    """Trainers push what belongs to the row before."""
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(1, np.int64), "one.more"))
    for place, node in enumerate(graph.node):
        if node.op_type == "PushRows":
            graph.node.insert(place, onnx.helper.make_node("Sub", [node.input[2], "one.more"], ["shifted"]))
            graph.node[place + 1].input[2] = "shifted"
            return


@pytest.mark.parametrize(("plant", "files"), [(summed, "server_*.onnx"), (neighbours, "trainer.onnx")])
def test_planted_errors_are_seen(plant: object, files: str, tmp_path: Path) -> None:
    folder = split(tmp_path, "dlrm_sgd", "modulo")
    for path in sorted(folder.glob(files)):
        model = onnx.load(path, load_external_data=False)
        plant(model.graph)  # type: ignore[operator]
        onnx.save(model, path)
    accept(folder)
    assert verified(folder) == 1
