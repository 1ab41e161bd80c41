"""Tables without rounds: a recorded order gives the bits of a serial interpreter, and a push counts once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from async_runs import Run, buckets, interpret, pieces, run_split, table_pieces
from async_steps import SourceUpdate
from helpers import ROOT
from lazy_reference import touched_of_dlrm
from seeded_order import Seeded
from table_runs import batches, folder, run

from gopt import api
from gopt.artifact.server_entries import Mode
from gopt.errors import RunError
from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.messages.order import Order, Recorded
from gopt.runtime.parameter_server.async_server import AsyncServer

RATE = {"lr": "0.5"}


@pytest.fixture
def data(tmp_path: Path) -> str:
    return batches(tmp_path / "data.npz", apart=True)


def split(tmp_path: Path, rows: str = "lazy", layout: str = "modulo", **given: object) -> Path:
    options = {"name": "dlrm_adam", "mode": Mode.ASYNC, "rows": {"*": rows}, **given}
    return folder(tmp_path, layout, **options)  # type: ignore[arg-type]


def trained(path: Path, data: str, steps: int = 2, order: Order | None = None, **given: object) -> Run:
    return run_split(path, data, steps, order=order, settings=RATE, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "layout", "seed"), [("dense", "columns", 0), ("lazy", "modulo", 1)])
def test_a_recorded_order_gives_the_bits_of_a_serial_interpreter(
    rows: str, layout: str, seed: int, tmp_path: Path, data: str
) -> None:
    path = split(tmp_path, rows, layout)
    first = trained(path, data, order=Seeded(seed))
    training = api.load(ROOT / "fixtures/sparse/dlrm_adam.onnx").training
    hyper = {"lr": np.array(0.5, np.float32)}
    held = interpret(first, training, SourceUpdate(training), data, hyper, touched_of_dlrm)
    found = [*pieces(first, held), *table_pieces(first, held)]
    assert len(found) > 18
    for name, bits, wanted in found:
        assert bits == wanted, name
    late = [late for server in first.servers.values() for late in server.usage.staleness]
    assert max(late) > 0
    assert trained(path, data, order=Recorded(first.arrivals)).states() == first.states()


def test_with_one_trainer_it_is_sync_to_the_bit(tmp_path: Path, data: str) -> None:
    sync = run(split(tmp_path, trainers=1, mode=Mode.SYNC), data, steps=2)
    assert trained(split(tmp_path, trainers=1, mode=Mode.HALF_ASYNC), data).losses == [losses[0] for losses in sync]


def test_rows_are_applied_once_at_most(tmp_path: Path, data: str) -> None:
    class Twice(AsyncServer):
        def _push(self, message: Message) -> None:
            super()._push(message)
            super()._push(message)

    path = split(tmp_path, trainers=1)
    plain = trained(path, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("async_runs.AsyncServer", Twice)
        twice = trained(path, data)
    assert twice.states() == plain.states()
    for server in twice.servers.values():
        assert server.usage.dropped == 2 * (len(buckets(server)) + len(server.tables))


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, data: str) -> None:
    path, whole, parts = split(tmp_path, trainers=1), tmp_path / "whole", tmp_path / "parts"
    every = trained(path, data, 2, checkpoint=whole, every=1)
    first = trained(path, data, 1, checkpoint=parts)
    rest = trained(path, data, 2, checkpoint=parts, resume=True)
    assert first.losses + rest.losses == every.losses and rest.states() == every.states()
    for number, server in rest.servers.items():
        for place, table in server.tables.items():
            assert table.version == every.servers[number].tables[place].version == 2


def test_a_bound_holds_pulls_of_rows_back(tmp_path: Path, data: str) -> None:
    found = trained(split(tmp_path), data, 4, order=Seeded(0), bound=0)
    assert len(found.losses) == 4
    for server in found.servers.values():
        assert max(server.usage.staleness) <= 1


def test_rows_that_are_not_there_are_refused(tmp_path: Path, data: str) -> None:
    found = trained(split(tmp_path, trainers=1), data, 1)
    table = found.servers[0].tables[0]
    for ids, what in (([0, 99], "row 99"), ([1, 0], "unsorted rows")):
        rows = np.zeros((2, table.rows.columns), "f4")
        with pytest.raises(RunError, match=what):
            table.push(Message(Kind.PUSH_ROWS, 0, 0, 1, (np.array(ids), rows)), 1)
