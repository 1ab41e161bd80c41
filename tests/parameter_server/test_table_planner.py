"""Which layout a table gets, and that loads stay even and inside memory."""

from __future__ import annotations

import pytest
from helpers import FIXTURES
from hypothesis import given
from hypothesis import strategies as st

import gopt
from gopt.analysis.embeddings import find_embeddings
from gopt.errors import OptionError
from gopt.parameter_server.table_planner import TableSize, plan_tables, table_size
from gopt.records.tables import Layout, TableLayout

KB = 1 << 10


def table(name: str = "t", rows: int = 10_000, width: int = 16, lookups: float = 64, **more: object) -> TableSize:
    return TableSize(name, rows, width, lookups=lookups, **more)  # type: ignore[arg-type]


def layouts(tables: list[TableSize], servers: int, **options: object) -> dict[str, Layout]:
    return {each.name: each.layout for each in plan_tables(tables, servers, **options)}  # type: ignore[arg-type]


SIZES = st.builds(
    table, rows=st.integers(1, 5000), width=st.integers(1, 32), lookups=st.floats(0, 500),
    state_bytes=st.sampled_from([0, 64, 256]), by_row=st.booleans(), by_column=st.booleans(),
)  # fmt: skip
MANY = st.lists(SIZES, min_size=1, max_size=8).map(
    lambda sizes: [TableSize(f"t{k}", *_fields(size)) for k, size in enumerate(sizes)]
)


def _fields(size: TableSize) -> tuple[object, ...]:
    return (size.rows, size.width, size.dtype, size.state_bytes, size.lookups, size.by_row, size.by_column)


def loads(tables: list[TableSize], plan: list[TableLayout], servers: int) -> list[int]:
    """The bytes of each server under a plan."""
    held = [0] * servers
    for size, found in zip(tables, plan, strict=True):
        for server in found.servers:
            share = found.local_rows(server) * len(found.columns(server))
            held[server] += share * (size.row_bytes + size.state_bytes) // max(size.width, 1)
    return held


@given(MANY, st.integers(1, 5))
def test_every_table_has_a_layout_that_it_can_have(tables, servers):
    plan = plan_tables(tables, servers)
    assert [each.name for each in plan] == [each.name for each in tables]
    for size, found in zip(tables, plan, strict=True):
        assert set(found.servers) <= set(range(servers))
        assert size.by_row or found.layout not in (Layout.MODULO, Layout.RANGE)
        assert size.by_column or found.layout is not Layout.COLUMNS
    held = sum(size.nbytes for size, found in zip(tables, plan, strict=True) if found.layout is not Layout.DENSE)
    in_all = sum(loads(tables, plan, servers))
    assert held - len(tables) * servers <= in_all <= held


@given(MANY, st.integers(1, 5))
def test_the_same_tables_in_another_order_get_the_same_layouts(tables, servers):
    found = {each.name: each for each in plan_tables(tables, servers)}
    assert {each.name: each for each in plan_tables(tables[::-1], servers)} == found


@given(MANY, st.integers(1, 5), st.integers(1, 400))
def test_no_server_holds_more_than_its_memory(tables, servers, kilobytes):
    memory = kilobytes * KB
    try:
        plan = plan_tables(tables, servers, memory=memory)
    except OptionError:
        return
    assert all(load <= memory for load in loads(tables, plan, servers))


def test_a_table_that_is_looked_up_whole_stays_dense():
    assert layouts([table(rows=40, lookups=64), table("big")], 2) == {"t": Layout.DENSE, "big": Layout.MODULO}


def test_tables_that_are_alike_stay_whole_one_on_each_server():
    plan = plan_tables([table(f"t{k}") for k in range(4)], 2)
    assert {each.layout for each in plan} == {Layout.WHOLE}
    assert sorted(each.servers[0] for each in plan) == [0, 0, 1, 1]


def test_the_largest_alone_is_split_where_it_outweighs_the_rest():
    tables = [table("huge", rows=1_000_000, lookups=100), *(table(f"t{k}", rows=1000, lookups=10) for k in range(4))]
    found = layouts(tables, 4)
    assert found.pop("huge") is Layout.MODULO and set(found.values()) == {Layout.WHOLE}


def test_look_ups_count_as_bytes_do():
    """Two tables of the same bytes: the one with all the look-ups leaves the other's server to the rest."""
    tables = [table("hot", lookups=900), table("cold", lookups=1), table("warm", rows=20, lookups=30)]
    tables[2] = TableSize("warm", 5000, 16, lookups=450)
    given = {"hot": "whole:0", "cold": "whole:1"}
    assert plan_tables(tables, 2, given=given)[2].servers == (1,)


def test_memory_splits_what_would_fit_no_server():
    tables = [table("a"), table("b")]
    assert set(layouts(tables, 2).values()) == {Layout.WHOLE}
    size = tables[0].nbytes
    tables = [*tables, table("c")]
    assert Layout.MODULO in set(layouts(tables, 2, memory=size * 3 // 2 + 64).values())
    with pytest.raises(OptionError, match="the tables need"):
        plan_tables(tables, 2, memory=size)
    with pytest.raises(OptionError, match="does not fit: server 0 would hold"):
        plan_tables([table("a", by_row=False, by_column=False), table("b", rows=100)], 2, memory=size - 64)


def test_a_server_that_is_full_is_passed_over():
    """It has the least to move, and no room."""
    tables = [TableSize("held", 1000, 16, lookups=1), TableSize("busy", 100, 16, lookups=90), TableSize("next", 90, 16)]
    given = {"held": "whole:0", "busy": "whole:1"}
    assert plan_tables(tables, 2, given=given)[2].servers == (0,)
    assert plan_tables(tables, 2, given=given, memory=tables[0].nbytes)[2].servers == (1,)


def test_tables_that_are_alike_go_by_their_names():
    tables = [table(name) for name in "abc"]
    assert plan_tables(tables, 2) == plan_tables(tables[::-1], 2)[::-1]


def test_few_wide_rows_are_cut_into_columns():
    found = plan_tables([table(rows=2, width=4096, lookups=1)], 4)[0]
    assert found.layout is Layout.COLUMNS and found.cuts == (0, 1024, 2048, 3072, 4096)


def test_the_user_decides_and_the_first_entry_wins():
    tables = [table("emb.user"), table("emb.item"), table("bias", rows=64, width=1, lookups=1)]
    given = {"emb.user": "columns", "emb.*": "range", "bias": "whole:2"}
    plan = plan_tables(tables, 3, given=given)
    assert [each.layout for each in plan] == [Layout.COLUMNS, Layout.RANGE, Layout.WHOLE]
    assert plan[2].servers == (2,) and plan[1].cuts == (0, 3333, 6666, 10_000)
    assert layouts(tables, 3, given={"*": "dense"}) == dict.fromkeys([each.name for each in tables], Layout.DENSE)


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"t": "modul"}, "table 't' cannot be 'modul'", "did you mean modulo?"),
        ({"t": "range:1"}, "cannot be 'range:1'", "whole:SERVER"),
        ({"t": "whole:2"}, "on server '2'", "servers 0 to 1"),
        ({"tt": "whole"}, "'tt' matches no table", "'t'"),
        ({"*": "whole", "t": "modulo"}, "has no effect", "put it before them"),
    ],
)
def test_wishes_that_say_nothing_are_refused(given, message, hint):
    with pytest.raises(OptionError, match=message) as refused:
        plan_tables([table()], 2, given=given)
    assert hint in refused.value.hints[0]


def test_an_update_that_needs_the_whole_is_not_split():
    with pytest.raises(OptionError, match="more than one row at a time"):
        plan_tables([table(by_row=False)], 2, given={"t": "modulo"})
    with pytest.raises(OptionError, match="more than one element at a time"):
        plan_tables([table(by_column=False)], 2, given={"t": "columns"})


def test_the_size_of_a_recognised_table():
    """Adam keeps two numbers for each; a bag of five ids for each of six samples is 30, of a table of 24 rows 24."""
    training = gopt.load(FIXTURES / "sparse" / "dlrm_adam.onnx").training
    sizes = [table_size(training, each, 3) for each in find_embeddings(training)]
    assert sizes[0] == TableSize("table0", 64, 8, "float32", 64, 18.0)
    assert sizes[2] == TableSize("table2", 24, 8, "float32", 64, 72.0)
    assert [each.layout for each in plan_tables(sizes, 2)] == [Layout.MODULO, Layout.MODULO, Layout.DENSE]


def test_no_servers_are_refused():
    with pytest.raises(OptionError, match="number of servers"):
        plan_tables([table()], 0)
