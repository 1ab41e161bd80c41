"""Rows of tables between trainers and servers: whole runs beside dense ones, and what single messages hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT
from table_runs import batches, folder, run, values

from gopt import api
from gopt.errors import GoptError
from gopt.ir.load import load
from gopt.ir.types import numpy_dtype
from gopt.records.mesh import Mesh
from gopt.runtime.engines.base import run_threads
from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.parameter_server.contributions import Contributions
from gopt.runtime.parameter_server.table_rows import coalesce, pulls_first
from gopt.runtime.training.job import Job, Progress
from gopt.runtime.training.train import Trainer


@pytest.fixture
def data(tmp_path: Path) -> str:
    return batches(tmp_path / "data.npz")


def all_reduced(tmp_path: Path, data: str, steps: int = 3) -> list[tuple[float, ...]]:
    """The same step on two ranks that average whole gradients."""
    target, mesh = tmp_path / "ranks", Mesh((("dp", 2),))
    api.shard(api.load(ROOT / "fixtures/sparse/dlrm_adagrad.onnx"), mesh, stage=0).write(target)
    told: list[Progress] = []
    job = Job(folder=target, data=data, steps=steps, settings={"lr": "0.5"})
    run_threads(mesh, 60, lambda engine: Trainer(job, engine, lambda *_: None).run(told.append))
    return [each.losses for each in told]


def test_tables_train_as_whole_gradients_do(tmp_path: Path, data: str) -> None:
    wanted = all_reduced(tmp_path, data)
    for layout in ("whole", "modulo", "range", "columns"):
        np.testing.assert_allclose(run(folder(tmp_path, layout), data), wanted, rtol=1e-5)


def test_checkpoints_of_all_layouts_merge_to_the_same_bits(tmp_path: Path, data: str) -> None:
    found = []
    for layout, servers in (("modulo", 2), ("modulo", 3), ("range", 2), ("columns", 3)):
        path = folder(tmp_path, layout, servers=servers)
        kept = tmp_path / f"kept_{path.name}"
        run(path, data, checkpoint=kept)
        found.append(values(kept, 3))
    assert found[0]["table0"].shape == (64, 8) and {"table0", "table0.sum"} <= found[0].keys()
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name in ("table0", "table0.sum", "table2"):
            np.testing.assert_array_equal(other[name], found[0][name])


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, data: str) -> None:
    split, kept = folder(tmp_path, "modulo"), tmp_path / "kept"
    every = run(split, data, steps=4)
    first = run(split, data, steps=2, checkpoint=kept)
    assert first + run(split, data, steps=4, checkpoint=kept, resume=True) == every


def test_a_row_that_is_none_is_refused_by_table_and_number(tmp_path: Path) -> None:
    wrong = batches(tmp_path / "wrong.npz", wrong=True)
    with pytest.raises(GoptError, match=r"id 24 .*table2.* 24 rows"):
        run(folder(tmp_path, "modulo"), wrong)


def test_all_requests_leave_before_an_answer_is_read(tmp_path: Path) -> None:
    graph = load(folder(tmp_path, "modulo") / "trainer.onnx", own=True)
    kept = {node.label: tuple(node.inputs) for node in graph.nodes}
    pulls_first(graph)
    assert {node.label: tuple(node.inputs) for node in graph.nodes} == kept
    pulls = [place for place, node in enumerate(graph.nodes) if node.op_type == "PullRows"]
    rows = {name for place in pulls for name in graph.nodes[place].outputs}
    readers = [place for place, node in enumerate(graph.nodes) if rows.intersection(node.inputs)]
    assert len(pulls) == 3 and max(pulls) < min(readers)
    made = {*graph.inputs, *graph.initializers}
    for node in graph.nodes:  # still in an order in which it can run
        assert made.issuperset(filter(None, node.inputs))
        made.update(node.outputs)


def test_rows_travel_as_halves(tmp_path: Path, data: str) -> None:
    narrow, wide = (run(folder(tmp_path, "columns", wire=wire), data) for wire in ("bfloat16", ""))
    np.testing.assert_allclose(narrow, wide, rtol=2e-2)
    assert narrow != wide


def test_rows_that_are_listed_several_times_are_added_up() -> None:
    ids, rows = coalesce(np.array([7, 2, 7, 4, 7]), np.array([[1.0], [2], [3], [4], [5]], "f4"))
    np.testing.assert_array_equal(ids, [2, 4, 7])
    np.testing.assert_array_equal(rows, [[2], [4], [9]])
    none, nothing = coalesce(np.zeros(0, np.int64), np.zeros((0, 3), "f4"))
    assert none.size == 0 and nothing.shape == (0, 3)


def test_halves_are_added_up_in_float32() -> None:
    rows = np.array([[256.0], *[[1]] * 8], numpy_dtype("bfloat16"))  # one after the other in bfloat16: 256
    assert coalesce(np.zeros(9, np.int64), rows)[1][0, 0] == 264


def test_rows_of_a_trainer_count_once_in_a_round() -> None:
    held = Contributions(2)
    message = Message(Kind.PUSH_ROWS, 1, 0, 2, (np.array([3]), np.ones((1, 4), "f4")))
    assert held.add(message) and not held.add(message)
    assert not held.add(Message(Kind.PUSH_ROWS, 0, 0, 1, message.arrays))
    assert held.dropped == 2 and list(held.of(0, Kind.PUSH_ROWS)) == [1] and not held.of(0)
