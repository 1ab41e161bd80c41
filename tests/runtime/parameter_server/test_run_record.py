"""The record of a run without rounds: what it says, what is refused, and that it is written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from async_runs import folder, run_split
from helpers import Builder, perceptron, sgd

import gopt
from gopt.artifact.server_entries import Mode
from gopt.errors import InputError, OptionError, RunError, UnsupportedError
from gopt.parameter_server.options import SplitOptions
from gopt.runtime.messages.message import Kind
from gopt.runtime.parameter_server import run_record
from gopt.runtime.parameter_server.job import ServerJob
from gopt.runtime.parameter_server.run_record import check_recordable, read_record
from gopt.runtime.training.job import Job


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A split, and the record of a run of it."""
    home = tmp_path_factory.mktemp("run")
    random = np.random.default_rng(3)
    data = {"x": random.normal(size=(64, 3)).astype("f4"), "y": random.normal(size=(64, 2)).astype("f4")}
    np.savez(home / "data.npz", **data)
    split = folder(home)
    gopt.run(split, home / "data.npz", 2, record=home / "run.json")
    return split, home / "run.json"


def test_a_record_names_messages_and_states(run: tuple[Path, Path]) -> None:
    split, path = run
    record = read_record(path, split)
    assert record.job.trainers == 2 and record.job.steps == 2
    assert record.received.keys() == {"trainer 0", "trainer 1", "server 0", "server 1"}
    kinds = [each.kind for each in record.received["server 1"] if each.sender == "trainer 1"]
    assert kinds == ["PULL", "PUSH", "BARRIER", "PULL", "PUSH", "BARRIER", "SAVE"]
    assert {"step", "gopt.ps.k0.parameter"} <= {state for _, state in record.digests}
    lines = [line for line in path.read_text().splitlines() if '"kind": "PUSH"' in line]
    assert len(lines) == 2 * 2 * 2, "a message has a line"
    schema = json.loads((Path(gopt.__file__).parent / "schemas/record.schema.json").read_text())
    kinds_of = schema["properties"]["received"]["additionalProperties"]["items"]["properties"]["kind"]["enum"]
    assert set(kinds_of) == set(Kind.__members__)


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "too many trainers": lambda d: d["job"].update(trainers=1 << 60),
    "fewer steps": lambda d: d["job"].update(steps=1),
    "more steps": lambda d: d["job"].update(steps=3),
    "too few trainers": lambda d: d["job"].update(trainers=1),
    "no messages of a role": lambda d: d["received"].pop("server 1"),
    "messages of another role": lambda d: d["received"].update({"server 2": []}),
    "a sender that is not there": lambda d: d["received"]["server 0"][0].update({"from": "trainer 2"}),
    "a rule that is none": lambda d: d["job"].update(settings={"nix": "1"}),
    "states that are not listed": lambda d: d["states"].pop(),
    "a state that is not there": lambda d: d["states"][0].update(state="nix"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_records_are_refused(kind: str, run: tuple[Path, Path], tmp_path: Path) -> None:
    split, path = run
    document, damaged = json.loads(path.read_text()), tmp_path / "damaged.json"
    DAMAGE[kind](document)
    damaged.write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"damaged\.json: "):
        gopt.verify(split, replay=damaged)


def test_a_record_that_was_cut_is_refused(run: tuple[Path, Path], tmp_path: Path) -> None:
    text, damaged = run[1].read_bytes(), tmp_path / "damaged.json"
    for end in (0, 1, len(text) // 2, len(text) - 3):
        damaged.write_bytes(text[:end])
        with pytest.raises(InputError, match="not JSON"):
            read_record(damaged, run[0])


def test_a_record_of_another_folder_or_other_data_is_refused(run: tuple[Path, Path], tmp_path: Path) -> None:
    split, path = run
    with pytest.raises(InputError, match="the record of another folder"):
        read_record(path, folder(tmp_path, minimum=2))
    other = tmp_path / "other.npz"
    np.savez(other, x=np.zeros((4, 3), "f4"), y=np.zeros((4, 2), "f4"))
    with pytest.raises(InputError, match="not what the run of"):
        read_record(path, split, str(other))
    with pytest.raises(InputError, match=r"there is no \S*gone.npz, which the run of"):
        read_record(path, split, str(tmp_path / "gone.npz"))
    moved = tmp_path / "moved.npz"
    moved.write_bytes((path.parent / "data.npz").read_bytes())
    assert read_record(path, split, str(moved)).job.data.name == str(moved)
    assert gopt.verify(split, replay=path, data=str(moved)).equal


def again(run: tuple[Path, Path], path: Path, **given: Any) -> None:
    split, record = run
    gopt.run(split, record.parent / "data.npz", 2, record=path, **given)


def test_it_is_written_whole_or_not_at_all(
    run: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match="cannot write"):
        again(run, tmp_path / "gone/run.json")
    kept = tmp_path / "run.json"
    monkeypatch.setattr(run_record, "PIECE", 100)  # what is told travels in pieces
    again(run, kept)
    assert read_record(kept, run[0]).received.keys() == read_record(run[1], run[0]).received.keys()
    with pytest.raises(OptionError, match="exists already"):
        again(run, kept)

    def full(target: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_record, "replace_file", full)
    with pytest.raises(RunError, match="the disk is full"):
        again(run, tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()


def test_a_run_that_lost_a_trainer_has_no_record(run: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not written: trainer 1 was lost"):
        run_split(run[0], str(run[1].parent / "data.npz"), 3, failing=1, record=tmp_path / "run.json")
    assert not (tmp_path / "run.json").exists()


def test_what_no_replay_can_repeat_is_refused_before_the_run(run: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="record cannot be combined with resume"):
        again(run, tmp_path / "run.json", resume=True, checkpoint=tmp_path / "checkpoints")
    b = Builder()
    net = perceptron(b, widths=(3, 5, 2))
    noise = b.op("RandomNormal", shape=[4, 2], scale=0.1)
    b.output("shown", b.op("Add", net.loss, b.op("Mul", b.op("ReduceMean", noise, keepdims=0), b.const(0.0))), ())
    sgd(b, net)
    split = tmp_path / "drawn.split"
    gopt.split(gopt.load(b.save(tmp_path / "m.onnx")), SplitOptions(trainers=2, servers=1, mode=Mode.ASYNC)).write(
        split
    )
    job = ServerJob.read(Job(folder=split, data="nix", steps=1, record=tmp_path / "run.json"))
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        check_recordable(job.job, job.plan)
