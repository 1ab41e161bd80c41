"""Tables in a split: rows in place of parameters, on trainers and on servers; and what stays dense."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import ROOT
from products import spread

from gopt import api
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.server_entries import Mode
from gopt.errors import OptionError
from gopt.ir.load import load
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.table_choice import without_empty_parts
from gopt.records.tables import Layout, TableLayout

SPARSE = ("dlrm_adagrad", "nce_sgd", "sampled_softmax_adagrad", "towers_adam", "tree_softmax_momentum")


def split(name: str, servers: int = 2, **given: object) -> api.Split:
    options = SplitOptions(**{"trainers": 2, "servers": servers, "minimum": 16, **given})  # type: ignore[arg-type]
    return api.split(api.load(ROOT / f"fixtures/sparse/{name}.onnx"), options)


@pytest.mark.parametrize(("name", "layout"), spread(SPARSE, ["whole", "modulo", "range", "columns"], keep=2))
def test_trainers_have_rows_and_servers_have_parts_that_tile(name: str, layout: str, tmp_path: Path) -> None:
    made = split(name, 3, tables={"*": layout})
    made.write(tmp_path / "out")
    manifest, _ = read_manifest(tmp_path / "out")
    assert manifest.parameter_server is not None and manifest.parameter_server.tables
    trainer = onnx.load(tmp_path / "out/trainer.onnx", load_external_data=False).graph
    values = {name for node in trainer.node for name in (*node.input, *node.output)}
    source = api.load(ROOT / f"fixtures/sparse/{name}.onnx").training
    for table in manifest.parameter_server.tables:
        assert table.parameter not in values and source.gradients[table.parameter] not in values
        held = np.full((table.rows, table.width), np.nan, "f4")
        whole = source.graph.initializers[table.parameter].numpy().reshape(table.rows, table.width)
        for place, server in enumerate(table.servers):
            graph = load(tmp_path / f"out/server_{server:04d}.onnx", own=True)
            value = graph.initializers[table.inputs[place]].numpy()
            shared = TableLayout(
                table.parameter, table.rows, table.width, Layout(table.layout), table.servers, table.cuts
            )  # fmt: skip
            rows, columns = shared.row_ids(server), shared.columns(server)
            part = value.reshape(len(rows), len(columns))
            held[rows.start : rows.stop : rows.step, columns.start : columns.stop] = part
        np.testing.assert_array_equal(held, whole)


def test_each_lookup_and_each_gradient_is_one_message() -> None:
    made = split("dlrm_adagrad", tables={"*": "modulo"})
    count = len(made.step.plan.tables.served)
    graph = made.step.trainer_graphs.ranks[0]
    ops = [node.op_type for node in graph.calls]
    assert count and ops.count("PullRows") == ops.count("PushRows") == count


def test_the_report_names_tables_and_what_stays_dense() -> None:
    notes = split("dlrm_adagrad", tables={"table0": "modulo", "table1": "dense"}).report().notes
    assert any("table0" in note and "by modulo" in note for note in notes)
    assert any("table1" in note and "travels whole" in note for note in notes)


@pytest.mark.parametrize("given", [{"mode": Mode.ASYNC}, {"accumulate": 2}, {"tables_off": True}])
def test_tables_stay_dense_where_rows_cannot_be_merged(given: dict[str, object]) -> None:
    assert not split("towers_adam", **given).step.plan.tables.served


def test_a_wish_that_cannot_be_met_says_why() -> None:
    with pytest.raises(OptionError, match="accumulate"):
        split("dlrm_sgd", accumulate=2, tables={"*": "modulo"})
    with pytest.raises(OptionError, match="no_tables"):
        split("dlrm_sgd", tables_off=True, tables={"*": "modulo"})
    with pytest.raises(OptionError, match="rows cannot be combined with accumulate"):
        split("dlrm_sgd", accumulate=2, rows={"*": "lazy"})
    with pytest.raises(OptionError, match='table cannot be combined with mode="geo"'):
        split("dlrm_sgd", mode=Mode.GEO, tables={"*": "modulo"})
    with pytest.raises(OptionError, match="init cannot be combined with delay_compensation"):
        split("dlrm_sgd", mode=Mode.ASYNC, compensation=0.1, init={"*": "zeros"})
    with pytest.raises(OptionError, match="rows cannot be combined with no_tables"):
        split("dlrm_sgd", tables_off=True, rows={"*": "lazy"})
    with pytest.raises(OptionError, match="cannot be 'lasy'"):
        split("dlrm_sgd", rows={"*": "lasy"})
    with pytest.raises(OptionError, match="no parameter of this step is a table"):
        split("dlrm_sgd", rows={"*": "lazy"}, tables={"*": "dense"})
    with pytest.raises(OptionError) as refused:
        split("dlrm_sgd", tables={"top0.weight": "modulo"})
    assert refused.value.hints


@pytest.mark.parametrize(
    ("given", "reason"),
    [({"mode": Mode.GEO}, "in mode geo"), ({"mode": Mode.ASYNC, "compensation": 0.1}, "delays of rows"), ({}, "")],
)
def test_what_has_no_tables_says_why(given: dict[str, object], reason: str) -> None:
    notes = split("dlrm_sgd", **given).report().notes
    assert any("'table0' is looked up by rows and travels whole: " + reason in note for note in notes) == bool(reason)


def test_a_pattern_for_tables_does_not_reach_their_moments() -> None:
    made = split("dlrm_adam", init={"table*": "normal(0,0.02)@seed=7", "*.exp_avg": "zeros"})
    inits = {each.tensor: each.rows for table in made.manifest().parameter_server.tables for each in table.init}  # type: ignore[union-attr]
    assert set(inits) == {"table0", "table1", "table0.exp_avg", "table1.exp_avg"}
    assert inits["table0"] == "normal(0.0,0.02)@seed=7" and inits["table1.exp_avg"] == "constant(0.0)"
    for name in ("table2", "top0.weight"):  # it travels whole
        with pytest.raises(OptionError, match="matches no table, and no state"):
            split("dlrm_adam", init={name: "zeros"})


def test_traffic_of_rows_is_estimated() -> None:
    """Six ids a batch for each of two tables; a row of 8 floats there and its gradient back, its number twice."""
    report = split("dlrm_adam").report()
    assert report.pipeline[0].facts["rows_by_server"] == [12 * (2 * 32 + 16) // 2] * 2
    assert any("12 look-ups of a trainer in a step move about 960 B" in note for note in report.notes)
    narrow = split("dlrm_adam", wire="float16", tables={"table0": "columns", "*": "dense"}).report()
    assert narrow.pipeline[0].facts["rows_by_server"] == [6 * (16 + 16)] * 2


def test_parts_without_elements_are_left_out() -> None:
    columns = TableLayout("t", 9, 2, Layout.COLUMNS, (3, 0, 1), (0, 0, 1, 2))
    assert without_empty_parts(columns) == TableLayout("t", 9, 2, Layout.COLUMNS, (0, 1), (0, 1, 2))
    few = without_empty_parts(TableLayout("t", 2, 4, Layout.MODULO, (2, 1, 0)))
    assert few.servers == (2, 1) and [few.local_rows(server) for server in few.servers] == [1, 1]
