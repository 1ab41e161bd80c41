"""Tables of which no file has the values: every split and every checkpoint has the same rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import ROOT
from table_runs import batches, run, values

from gopt import api
from gopt.artifact.checkpoint_index import step_dir
from gopt.errors import InputError
from gopt.offline.folder_contents import read_folder
from gopt.offline.merge import merge
from gopt.offline.resplit import resplit
from gopt.parameter_server.options import SplitOptions
from gopt.records.row_init import RowInit
from gopt.runtime.parameter_server.job import ServerJob
from gopt.runtime.parameter_server.server_tables import ServerTables
from gopt.runtime.training.job import Job

pytestmark = pytest.mark.usefixtures("unchecked")

INIT = {"table*": "normal(0,0.5)@seed=7", "*.sum": "constant(0.01)"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A step whose tables have no values."""
    made = onnx.load(ROOT / "fixtures/sparse/dlrm_adagrad.onnx")
    kept = [each for each in made.graph.initializer if not each.name.startswith("table")]
    del made.graph.initializer[:]
    made.graph.initializer.extend(kept)
    onnx.save(made, tmp_path / "step.onnx")
    return tmp_path / "step.onnx"


@pytest.fixture
def data(tmp_path: Path) -> str:
    return batches(tmp_path / "data.npz", apart=True)


def split(model: Path, layout: str, **given: object) -> Path:
    fields = {"trainers": 2, "servers": 2, "minimum": 16, "tables": {"*": layout}, "init": INIT, **given}
    target = model.parent / f"split{len(list(model.parent.iterdir()))}"
    api.split(api.load(model), SplitOptions(**fields)).write(target)  # type: ignore[arg-type]
    return target


def merged(path: Path) -> dict[str, np.ndarray]:
    merge(path, path.parent / "merged.onnx", force=True)
    graph = onnx.load(path.parent / "merged.onnx").graph
    return {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}


def test_every_layout_trains_from_the_same_rows(model: Path, data: str) -> None:
    rows = RowInit.parse(INIT["table*"]).rows("table1", np.arange(40), 8).astype("f4")
    found = []
    for layout, servers, kind in (("modulo", 2, "dense"), ("columns", 3, "lazy")):
        path = split(model, layout, servers=servers, rows={"*": kind})
        start = merged(path)
        assert start["table1"].tobytes() == rows.tobytes() and (start["table0.sum"] == np.float32(0.01)).all()
        size = (path / "states.bin").stat().st_size
        assert size < sum(start[name].nbytes for name in start if not name.startswith("table")) + 2048
        kept = model.parent / f"kept_{path.name}"
        run(path, data, steps=1, checkpoint=kept)
        found.append(values(kept, 1))
        untouched = np.setdiff1d(np.arange(40), np.load(data)["ids"][:, 1])
        assert untouched.size and found[-1]["table1"][untouched].tobytes() == rows[untouched].tobytes()
    assert all(found[1][name].tobytes() == value.tobytes() for name, value in found[0].items())


def test_rows_are_made_at_the_first_touch_of_a_lazy_table(model: Path) -> None:
    job = ServerJob.read(Job(folder=split(model, "modulo", rows={"*": "lazy"}), data="", steps=1))
    tables = ServerTables(job, 2)
    held = tables.initial(job.graphs(2))
    assert not any(name.startswith("gopt.ps.t") for name in held)
    for number in tables.lazy:
        tables.take_out(number, job.graphs(2)["step"], held, merges=False)
    store = tables.touched[0].stores["gopt.ps.t0.part0.parameter"]
    store.take(np.array([3]))
    assert np.flatnonzero(store.array.any(axis=1)).tolist() == [3], "the others are still zeros"
    assert ServerTables(ServerJob.read(Job(folder=split(model, "whole"), data="", steps=1)), 2).lazy == []


def test_a_resumed_run_and_a_reshard_go_on_from_the_checkpoint(model: Path, data: str) -> None:
    path, kept = split(model, "modulo", rows={"*": "lazy"}), model.parent / "kept"
    every = run(path, data, steps=2)
    assert run(path, data, steps=1, checkpoint=kept) == every[:1]
    notes: list[str] = []
    resplit(kept / step_dir(1), {"servers": 3}, note=notes.append).write(model.parent / "more")
    assert any("init" in note and "checkpoint has all rows" in note for note in notes)
    assert read_folder(model.parent / "more").manifest.parameter_server.tables[0].init == ()  # type: ignore[union-attr]
    again = merged(model.parent / "more")
    assert all(again[name].tobytes() == value.tobytes() for name, value in values(kept, 1).items())
    assert run(path, data, steps=2, checkpoint=kept, resume=True) == every[1:]
    resplit(path, {"servers": 1}).write(model.parent / "one")
    assert run(model.parent / "one", data, steps=1) == every[:1]


def test_a_rule_that_cannot_be_read_is_refused_with_the_folder(model: Path) -> None:
    path = split(model, "modulo")
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace("normal(0.0,0.5)", "gauss(0.0,0.5)"))
    with pytest.raises(
        InputError, match=r"tables\[0\].init\[0\].rows: cannot read as the first values of rows: 'gauss"
    ):
        read_folder(path)


def test_a_table_without_values_or_a_rule_says_so(model: Path, data: str) -> None:
    with pytest.raises(InputError, match=r"'table0.sum' has no value"):
        run(split(model, "modulo", init={"table*": "zeros"}), data)
