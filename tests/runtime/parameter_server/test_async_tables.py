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
from products import spread
from row_simulator import Event, Fault, Rule, Simulation

from gopt import api
from gopt.artifact.server_entries import Mode
from gopt.errors import GoptError
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.tables import Ids, Request, TableLayout
from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.messages.order import Seeded
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
    run = run_split(
        folder, "row_steps:dealt", row_steps.ROUNDS, order=Seeded(seed), settings={"lr": str(RATE)}
    )
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


@pytest.mark.parametrize(
    ("layout", "servers", "trainers", "rule", "rows", "mode"),
    spread(LAYOUTS, (1, 2, 3, 5), (1, 2, 3), ("sgd", "adagrad", "adam"), ("lazy", "dense"), (Mode.ASYNC, Mode.HALF_ASYNC)),
)  # fmt: skip
def test_tables_are_those_of_the_simulator(
    layout: str, servers: int, trainers: int, rule: str, rows: str, mode: Mode, tmp_path: Path
) -> None:
    folder = split(
        tmp_path, rule, mode=mode, trainers=trainers, servers=servers, tables={"*": layout}, rows={"*": rows}
    )
    seed = 100 * servers + 10 * trainers + LAYOUTS.index(layout)
    assert not differences(folder, seed, rule)
