"""Rows made from a seed: the same in every order and on every server, of the distribution that was asked for."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from gopt.errors import OptionError
from gopt.records.row_init import GAP, RowInit, normal_quantile
from gopt.records.tables import Layout, TableLayout, even_cuts

NORMAL = RowInit.parse("normal(0.5,2)@seed=7")


def layout(kind: Layout, servers: int, rows: int = 90, width: int = 6) -> TableLayout:
    end = {Layout.RANGE: rows, Layout.COLUMNS: width}.get(kind)
    count = 1 if kind is Layout.WHOLE else servers
    return TableLayout("t", rows, width, kind, tuple(range(count)), () if end is None else even_cuts(end, count))


def test_a_row_is_the_same_whatever_is_drawn_with_it():
    every = NORMAL.rows("t", np.arange(300), 5)
    for ids in ([0], [299], [3, 4, 5], [0, GAP, 2 * GAP + 1, 3 * GAP + 3], [7, 100, 101, 250]):
        assert NORMAL.rows("t", np.array(ids), 5).tobytes() == every[ids].tobytes()
    assert NORMAL.rows("t", np.zeros(0, np.int64), 5).shape == (0, 5)


@pytest.mark.parametrize("kind", [Layout.WHOLE, Layout.MODULO, Layout.RANGE, Layout.COLUMNS])
@pytest.mark.parametrize("servers", [2, 5])
def test_every_layout_has_the_same_rows(kind: Layout, servers: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gopt.records.row_init.CHUNK", 40)
    every = NORMAL.rows("t", np.arange(90), 6).astype("f4")
    placed = layout(kind, servers)
    found = np.full_like(every, np.nan)
    for server in placed.servers:
        rows, columns = placed.row_ids(server), placed.columns(server)
        part = NORMAL.part("t", placed, server, np.dtype("f4"))
        found[rows.start : rows.stop : rows.step, columns.start : columns.stop] = part.reshape(len(rows), len(columns))
    assert found.tobytes() == every.tobytes()


def test_seed_name_and_row_make_a_difference():
    ids = np.arange(4)
    first = NORMAL.rows("t", ids, 6)
    assert np.unique(first).size == first.size
    for other in (NORMAL.rows("u", ids, 6), RowInit.parse("normal(0.5,2)@seed=8").rows("t", ids, 6)):
        assert not np.isin(first, other).any()


def test_the_distribution_is_the_one_that_was_asked_for():
    drawn = NORMAL.rows("t", np.arange(20_000), 4)
    assert abs(drawn.mean() - 0.5) < 0.03 and abs(drawn.std() - 2) < 0.03
    flat = RowInit.parse("uniform(-3,5)").rows("t", np.arange(20_000), 4)
    assert flat.min() > -3 and flat.max() < 5 and abs(flat.mean() - 1) < 0.05 and abs(flat.var() - 64 / 12) < 0.1
    assert (RowInit.parse("constant(0.25)").rows("t", np.arange(3), 2) == 0.25).all()


def test_the_quantile_is_that_of_the_standard_library():
    unit = np.array([1e-300, 1e-15, 1e-12, 1e-6, 0.01, 0.074, 0.076, 0.3, 0.5, 0.7, 0.93, 0.999, 1 - 1e-12])
    wanted = [statistics.NormalDist().inv_cdf(each) for each in unit]
    np.testing.assert_allclose(normal_quantile(unit), wanted, rtol=2e-15, atol=1e-300)


def test_rows_are_those_of_today():
    """Checkpoints of other versions go on from these numbers."""
    found = RowInit.parse("uniform(0,1)@seed=7").rows("table", np.array([0, 1_000_000_007]), 2)
    assert found.tolist() == [[0.45095922644389674, 0.2831384839842298], [0.5963989494577023, 0.6764253278703224]]


@pytest.mark.parametrize("text", ["normal(0,0.02)@seed=7", "uniform(-1,1)@seed=0", "zeros", " constant( 0.1 ) "])
def test_texts_are_read_back(text: str):
    found = RowInit.parse(text)
    assert RowInit.parse(str(found)) == found


@pytest.mark.parametrize(
    "text", ["", "normal", "normal(1)", "gauss(0,1)", "normal(0,-1)", "uniform(2,1)", "normal(0,nan)", "zeros(1)",
             "normal(0,1)@seed=x", "constant(1,2)"],
)  # fmt: skip
def test_other_texts_are_refused(text: str):
    with pytest.raises(OptionError, match="cannot read as the first values of rows:"):
        RowInit.parse(text)
