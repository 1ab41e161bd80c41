"""Updates on touched rows: bit for bit those of all rows where these do nothing else, and NumPy's where they do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT
from lazy_reference import train_dlrm
from table_runs import batches, folder, run, values

from gopt import api
from gopt.errors import InputError
from gopt.ir.load import load
from gopt.records.row_init import RowInit
from gopt.runtime.parameter_server.touched_rows import RowSource, RowStore, take_out


@pytest.fixture
def data(tmp_path: Path) -> str:
    return batches(tmp_path / "data.npz")


def trained(
    tmp_path: Path, data: str, name: str, rows: str, layout: str = "modulo", **given: object
) -> dict[str, np.ndarray]:
    kept = tmp_path / f"kept{len(list(tmp_path.iterdir()))}"
    run(folder(tmp_path, layout, name, rows={"*": rows}, **given), data, steps=2, checkpoint=kept)
    return values(kept, 2)


@pytest.mark.parametrize(("name", "layout"), [("dlrm_sgd", "columns"), ("dlrm_adagrad", "modulo")])
def test_where_zero_gradients_do_nothing_both_have_the_same_bits(
    name: str, layout: str, tmp_path: Path, data: str
) -> None:
    dense, lazy = (trained(tmp_path, data, name, rows, layout) for rows in ("dense", "lazy"))
    for tensor in dense:
        assert lazy[tensor].tobytes() == dense[tensor].tobytes(), tensor


def test_adam_on_touched_rows_is_that_of_numpy(tmp_path: Path, data: str) -> None:
    training = api.load(ROOT / "fixtures/sparse/dlrm_adam.onnx").training
    wanted = train_dlrm(training, data, 2, 2, 0.5)
    found = trained(tmp_path, data, "dlrm_adam", "lazy")
    start = training.graph.initializers
    for name, value in wanted.items():
        moved = np.abs(value - start[name].numpy()).max()
        np.testing.assert_allclose(found[name], value, atol=2e-5 * max(moved, 1e-3), rtol=2e-5, err_msg=name)
    still = (found["table0.exp_avg"] == start["table0.exp_avg"].numpy()).all(axis=1)
    assert 0 < still.sum() < len(still)  # moments of rows that nobody looked up do not fade


def test_the_servers_graph_has_rows_alone(tmp_path: Path) -> None:
    path = folder(tmp_path, "whole", "dlrm_adam", rows={"*": "lazy"}, servers=1)
    graph = load(path / "server_0000.onnx", own=True)
    root = "gopt.ps.t0.part0"
    states = {f"{root}.{role}": f"{root}.{role}_out" for role in ("parameter", "state1", "state2")}
    taken, found = take_out(graph, states)
    assert [each.input for each in found] == list(states)
    assert not states.keys() & taken.inputs.keys() and not {*states.values()} & taken.outputs.keys()
    read = {name for node in taken.nodes for name in node.reads}
    assert not states.keys() & read and {each.rows for each in found} <= read
    node = next(node for node in graph.nodes if node.outputs == [f"{root}.parameter.updated"])
    node.inputs[0] = f"{root}.state1.table"
    with pytest.raises(InputError, match=r"does not update rows of 'gopt.ps.t0.part0.parameter' alone"):
        take_out(graph, states)


SOURCE = RowSource(RowInit.parse("normal(0,1)@seed=3"), "t", 10, 1, 3, 6, slice(2, 5), np.dtype("f4"))


def test_rows_are_made_when_they_are_touched() -> None:
    store, whole = RowStore.drawn(SOURCE), RowStore.drawn(SOURCE).whole().reshape(10, 3)
    every = SOURCE.init.rows("t", np.arange(1, 31, 3), 6)[:, 2:5].astype("f4")
    assert whole.tobytes() == every.tobytes()
    first = store.take(np.array([7, 2]))
    assert first.tobytes() == every[[7, 2]].tobytes()
    store.put(np.array([2]), np.ones((1, 3), "f4"))
    assert (store.take(np.array([2, 3]))[0] == 1).all()  # made once
    after = store.whole().reshape(10, 3)
    assert (after[2] == 1).all() and np.delete(after, 2, 0).tobytes() == np.delete(every, 2, 0).tobytes()


def test_what_is_taken_is_a_copy() -> None:
    store = RowStore(np.zeros((3, 2), "f4"))
    taken = store.take(np.array([0, 1]))
    store.put(np.array([1]), np.ones((1, 2), "f4"))
    assert not taken.any()
