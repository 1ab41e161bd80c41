"""Layouts of tables: every row is somewhere once, and what is asked for by parts is what was asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gopt.errors import InputError, InvariantError
from gopt.records.tables import Layout, TableLayout, even_cuts

SPLIT = [Layout.WHOLE, Layout.MODULO, Layout.RANGE, Layout.COLUMNS]


@st.composite
def layouts(draw: st.DrawFn) -> TableLayout:
    """A table of some rows and columns in any layout, on some of five servers in any order; parts may be empty."""
    rows, width, kind = draw(st.integers(1, 30)), draw(st.integers(1, 6)), draw(st.sampled_from(SPLIT))
    count = 1 if kind is Layout.WHOLE else draw(st.integers(1, 5))
    servers = tuple(draw(st.permutations(range(5)))[:count])
    cuts: tuple[int, ...] = ()
    if kind in (Layout.RANGE, Layout.COLUMNS):
        end = rows if kind is Layout.RANGE else width
        inner = sorted(draw(st.lists(st.integers(0, end), min_size=count - 1, max_size=count - 1)))
        cuts = (0, *inner, end)
    return TableLayout("t", rows, width, kind, servers, cuts)


def shards(table: TableLayout, whole: np.ndarray) -> dict[int, np.ndarray]:
    """What each server has of a table's values."""
    return {server: whole[table.row_ids(server)][:, table.columns(server)] for server in table.servers}


@given(layouts())
def test_parts_tile_the_table(table):
    seen = np.zeros((table.rows, table.width), int)
    for server in range(6):
        assert table.local_rows(server) == len(table.row_ids(server))
        for row in table.row_ids(server):
            seen[row, table.columns(server)] += 1
    assert (seen == 1).all()


@given(layouts(), st.data())
def test_rows_pulled_by_parts_are_the_rows(table, data):
    whole = np.arange(table.rows * table.width).reshape(table.rows, table.width)
    ids = data.draw(st.lists(st.integers(-table.rows, table.rows - 1), max_size=20))
    held, found = shards(table, whole), np.full((len(ids), table.width), -1)
    requests = table.partition(ids)
    assert [request.server for request in requests] == list(table.servers)
    for request in requests:
        found[np.ix_(request.positions, table.columns(request.server))] = held[request.server][request.local]
    assert np.array_equal(found, whole[np.asarray(ids, int)])


@given(layouts(), st.data())
def test_rows_pushed_by_parts_are_added_where_they_belong(table, data):
    """The same id any number of times; requests without ids change nothing."""
    ids = np.asarray(data.draw(st.lists(st.integers(0, table.rows - 1), max_size=20)), int)
    given_rows = np.arange(ids.size * table.width).reshape(ids.size, table.width)
    whole = np.zeros((table.rows, table.width), int)
    held = shards(table, whole.copy())
    np.add.at(whole, ids, given_rows)
    for request in table.partition(ids):
        rows = given_rows[request.positions][:, table.columns(request.server)]
        np.add.at(held[request.server], request.local, rows)
    for server, part in shards(table, whole).items():
        assert np.array_equal(held[server], part)


@given(layouts(), st.data())
def test_a_request_keeps_the_order_of_ids(table, data):
    ids = data.draw(st.lists(st.integers(0, table.rows - 1), max_size=20))
    for request in table.partition(np.reshape(ids, (-1, 1))):
        assert (np.diff(request.positions) > 0).all()


def test_long_requests_keep_their_order():
    """Sorts that keep no order keep that of a few ids all the same."""
    ids = np.random.default_rng(0).integers(0, 10, 1000)
    for request in TableLayout("t", 10, 4, Layout.MODULO, (0, 1, 2)).partition(ids):
        assert (np.diff(request.positions) > 0).all()


def test_modulo_is_the_remainder():
    """Specification B10.4, B10.5: ids 7, 2, 7, 4 on three servers, and how many rows each has."""
    table = TableLayout("t", 10, 4, Layout.MODULO, (0, 1, 2))
    found = {request.server: request.local.tolist() for request in table.partition([7, 2, 7, 4])}
    assert found == {0: [], 1: [2, 2, 1], 2: [0]}
    assert [table.local_rows(server) for server in range(4)] == [4, 3, 3, 0]
    assert [TableLayout("t", 1000, 1, Layout.MODULO, (0, 1)).local_rows(server) for server in (0, 1)] == [500, 500]


def test_a_dense_table_is_on_no_server():
    table = TableLayout("t", 10, 4, Layout.DENSE)
    assert table.partition([1, 2]) == () and table.local_rows(0) == 0 and table.part(0) is None


@pytest.mark.parametrize("id", [10, -11])
def test_an_id_outside_the_table_is_refused_by_name(id):
    table = TableLayout("items", 10, 4, Layout.MODULO, (0, 1))
    with pytest.raises(InputError, match=f"id {id} is looked up in table 'items', which has 10 rows"):
        table.partition([3, id])


@pytest.mark.parametrize(
    ("layout", "servers", "cuts"),
    [
        (Layout.RANGE, (0, 1), (0, 3, 9)), (Layout.RANGE, (0, 1), (0, 10)), (Layout.RANGE, (0, 1), (0, 11, 10)),
        (Layout.COLUMNS, (0, 1), (0, 3, 10)), (Layout.WHOLE, (0, 1), ()), (Layout.MODULO, (), ()),
        (Layout.MODULO, (1, 1), ()), (Layout.MODULO, (0, 1), (0, 5, 10)), (Layout.DENSE, (0,), ()),
    ],
)  # fmt: skip
def test_parts_that_do_not_tile_are_refused(layout, servers, cuts):
    with pytest.raises(InvariantError, match="do not tile"):
        TableLayout("t", 10, 4, layout, servers, cuts)


def test_even_cuts():
    assert even_cuts(10, 3) == (0, 3, 6, 10) and even_cuts(2, 4) == (0, 0, 1, 1, 2)
