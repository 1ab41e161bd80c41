"""``gopt verify`` of tables that are updated on touched rows: it says what it compares with, and sees what differs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import ROOT, accept

from gopt import api
from gopt.parameter_server.options import SplitOptions
from gopt.verification.result import Verification
from gopt.verification.verify import Verifier


def split(tmp_path: Path, name: str, **given: object) -> Path:
    options = {"trainers": 2, "servers": 2, "minimum": 16, "tables": {"*": "modulo"}, "rows": {"*": "lazy"}, **given}
    made = api.split(api.load(ROOT / f"fixtures/sparse/{name}.onnx"), SplitOptions(**options))  # type: ignore[arg-type]
    made.write(tmp_path / "out")
    return tmp_path / "out"


def verified(folder: Path) -> Verification:
    return Verifier(folder, deadline=60).run(confirm=False, steps=1)


def test_adam_is_compared_on_touched_rows(tmp_path: Path) -> None:
    found = verified(split(tmp_path, "dlrm_adam"))
    assert found.exit_code == 0
    assert any("table0, table1, table2: updates run on rows that were pushed" in note for note in found.notes)


def test_where_it_makes_no_difference_nothing_is_said(tmp_path: Path) -> None:
    found = verified(split(tmp_path, "dlrm_adagrad"))
    assert found.exit_code == 0 and not any("pushed" in note for note in found.notes)


def test_it_is_not_the_sources_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gopt.verification.verify.lazy_tables", lambda training, plan: ())
    assert verified(split(tmp_path, "dlrm_adam")).exit_code == 1


def faded(graph: onnx.GraphProto) -> None:
    """Moments of rows that nobody touched fade."""
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.9, np.float32), "fade"))
    for place, node in enumerate(graph.node):
        if node.op_type == "ScatterND" and node.input[0].endswith("state1.table"):
            graph.node.insert(place, onnx.helper.make_node("Mul", [node.input[0], "fade"], ["faded"]))
            graph.node[place + 1].input[0] = "faded"
            return


def test_rows_that_nobody_touched_must_stay(tmp_path: Path) -> None:
    folder = split(tmp_path, "dlrm_adam")
    for path in sorted(folder.glob("server_*.onnx")):
        model = onnx.load(path, load_external_data=False)
        faded(model.graph)
        onnx.save(model, path)
    accept(folder)
    assert verified(folder).exit_code == 1
