"""Tables without rounds against a simulator of its own code, and errors that it sees."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import row_steps
from async_runs import Run, run_split
from onnx import numpy_helper
from products import fewer, part, spread
from row_simulator import Event, Fault, Rule, Simulation
from seeded_order import Seeded

from gopt import api
from gopt.artifact.server_entries import Mode
from gopt.parameter_server.options import SplitOptions
from gopt.records.tables import Ids, TableLayout, TableRequest
from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.parameter_server import table_rows
from gopt.runtime.parameter_server.async_server import AsyncServer
from gopt.runtime.parameter_server.table_state import TableState
from gopt.runtime.session import Array

RATE = 0.0625
LAYOUTS = ("whole", "modulo", "range", "columns")


def split(home: Path, rule: str, **given: object) -> Path:
    options = SplitOptions(**{"mode": Mode.ASYNC, "minimum": 4, **given})  # type: ignore[arg-type]
    folder = home / f"split{len(list(home.iterdir()))}"
    api.split(api.load(row_steps.lookups(home / "step.onnx", rule)), options).write(folder)
    return folder


def differences(folder: Path, seed: int, rule: str) -> list[str]:
    """Run a split in an order that follows from a seed, and simulate it: what is not alike."""
    row_steps.SEED = seed
    run = run_split(folder, "row_steps:dealt", row_steps.ROUNDS, order=Seeded(seed), settings={"lr": str(RATE)})
    about = json.loads((folder / "manifest.json").read_text())
    tables, trainers = about["parameter_server"]["tables"], run.job.trainers
    model = onnx.load(folder.parent / "step.onnx")
    start = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    simulation = Simulation(
        tables, {name: value for name, value in start.items() if name.split(".")[0] in row_steps.ROWS}, trainers,
        Rule(rule, RATE, tables[0].get("update") == "lazy"),
        lambda trainer, number: row_steps.batch(seed, trainer, number), row_steps.PADDING,
    )  # fmt: skip
    try:
        simulation.run({server: list(events(run, server)) for server in run.servers})
    except Fault as fault:
        return [str(fault)]
    found = [
        f"loss of step {number}"
        for number, loss in enumerate(run.losses) if not near(loss, simulation.losses[0, number])
    ]  # fmt: skip
    for server, held in run.servers.items():
        names = {each["input"]: each["pieces"][0]["tensor"] for each in about["ranks"][trainers + server]["state"]}
        for number, table in held.tables.items():
            part = simulation.parts[number, server]
            for name, value in table.states.items():
                state = names[name].removeprefix(tables[number]["parameter"]).removeprefix(".")
                wanted = part.held[state]
                if not near(value.reshape(wanted.shape), wanted):
                    found.append(f"{names[name]} of server {server}")
            found += [f"step of server {server}" for value in table.counters.values() if float(value) != part.step]
    return found


def near(found: Any, wanted: Any) -> bool:
    """One rounding of float32 in each of a few dozen operations; a plant changes far more."""
    return bool(np.allclose(found, wanted, rtol=2e-5, atol=2e-6))


def events(run: Run, server: int) -> Iterator[Event]:
    for each in run.arrivals[run.job.trainers + server]:
        if each.kind in (Kind.PULL_ROWS, Kind.PUSH_ROWS):
            yield Event(each.source, each.key, each.round, each.kind is Kind.PUSH_ROWS)


RULES = [
    (rule, rows, mode)
    for rule in ("sgd", "adagrad", "adam") for rows in ("lazy", "dense") for mode in (Mode.ASYNC, Mode.HALF_ASYNC)
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "servers", "trainers", "how"), fewer(spread(LAYOUTS, (1, 2, 3, 5), (1, 2, 3), RULES), 9)
)
def test_tables_are_those_of_the_simulator(
    layout: str, servers: int, trainers: int, how: tuple[str, str, Mode], tmp_path: Path
) -> None:
    rule, rows, mode = how
    given = {"trainers": trainers, "servers": servers, "tables": {"*": layout}, "rows": {"*": rows}}
    seed = 100 * servers + 10 * trainers + LAYOUTS.index(layout)
    assert not differences(split(tmp_path, rule, mode=mode, **given), seed, rule)


# --- errors that are planted, of which each is seen -------------------------------------------------------------------


Plant = Callable[[pytest.MonkeyPatch], None]


def changed(patch: pytest.MonkeyPatch, change: Callable[[TableState, Ids, Array], tuple[Ids, Array]]) -> None:
    """Servers take other ids and rows than were pushed."""
    usual = TableState.push

    def push(self: TableState, message: Message, trainers: int) -> int:
        arrays = change(self, *message.arrays)
        return usual(self, Message(message.kind, message.source, message.key, message.round, arrays), trainers)

    patch.setattr(TableState, "push", push)


def twice(patch: pytest.MonkeyPatch) -> None:
    """A push is applied again: what counts it once at most has forgotten it."""
    usual = AsyncServer._push

    def push(self: AsyncServer, message: Message) -> None:
        usual(self, message)
        if (message.source, message.round, message.kind) == (1, 1, Kind.PUSH_ROWS):
            self._last.clear()
            usual(self, message)

    patch.setattr(AsyncServer, "_push", push)


def wrong_server(patch: pytest.MonkeyPatch) -> None:
    """Rows of two servers are exchanged, of pushes alone: their numbers are there on both."""
    usual = TableLayout.partition

    def partition(self: TableLayout, ids: Ids) -> tuple[TableRequest, ...]:
        first, second = usual(self, ids)
        return TableRequest(first.server, second.positions, second.local), TableRequest(
            second.server, first.positions, first.local
        )

    def push(self: table_rows.TableRows, *given: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(TableLayout, "partition", partition)
            sent(self, *given)

    sent = table_rows.TableRows.push
    patch.setattr(table_rows.TableRows, "push", push)


def stale(patch: pytest.MonkeyPatch) -> None:
    """A pull is answered with the rows of the start."""
    usual, first = TableState.pull, dict[int, Array]()

    def pull(self: TableState, message: Message) -> Array:
        now = usual(self, message)
        if id(self) not in first:
            everything = Message(
                message.kind, message.source, message.key, 0, (np.arange(self.rows.rows),), message.note
            )
            first[id(self)] = np.array(usual(self, everything))
        return now if message.round < 2 else first[id(self)][message.arrays[0]]

    patch.setattr(TableState, "pull", pull)


def padded(patch: pytest.MonkeyPatch) -> None:
    """The row of the padding id moves."""

    def change(table: TableState, ids: Ids, rows: Array) -> tuple[Ids, Array]:
        if table.rows.name in row_steps.PADDING:
            rows = rows.copy()
            rows[ids == row_steps.PADDING[table.rows.name]] += 1e-3
        return ids, rows

    changed(patch, change)


def one_row_counts(patch: pytest.MonkeyPatch) -> None:
    """Of a row that is looked up several times, one gradient counts."""

    def coalesce(ids: Ids, rows: Array) -> tuple[Ids, Array]:
        unique, places = np.unique(ids, return_index=True)
        return unique, rows[places]

    patch.setattr(table_rows, "coalesce", coalesce)


def mean_over_trainers(patch: pytest.MonkeyPatch) -> None:
    """A push is divided by the trainers, as in rounds."""
    changed(patch, lambda table, ids, rows: (ids, rows / np.float32(2)))


def counted_at_each_push(patch: pytest.MonkeyPatch) -> None:
    """Counters go on at each push, not at one of each trainer."""
    usual = TableState.push
    patch.setattr(TableState, "push", lambda self, message, trainers: usual(self, message, 1))


def neighbour(patch: pytest.MonkeyPatch) -> None:
    """The last row of a push is applied to the row behind it."""

    def change(table: TableState, ids: Ids, rows: Array) -> tuple[Ids, Array]:
        if ids.size and ids[-1] + 1 < table.rows.rows:
            ids = np.append(ids[:-1], ids[-1] + 1)
        return ids, rows

    changed(patch, change)


PLANTS: list[tuple[Plant, str]] = [
    (twice, "sgd"), (wrong_server, "sgd"), (stale, "sgd"), (padded, "sgd"), (padded, "adam"),
    (one_row_counts, "adagrad"), (mean_over_trainers, "sgd"), (counted_at_each_push, "adam"), (neighbour, "adagrad"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("plant", "rule", "rows"),
    [row for rows in ("lazy", "dense") for row in part([(*each, rows) for each in PLANTS], 3)],
)
def test_a_planted_error_is_seen(
    plant: Plant, rule: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = split(tmp_path, rule, trainers=2, servers=2, tables={"*": "modulo"}, rows={"*": rows})
    assert not differences(folder, 4, rule)
    plant(monkeypatch)
    assert differences(folder, 4, rule)
