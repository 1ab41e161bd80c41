"""``gopt verify --replay``: a recorded run is replayed to the bit, and what differs is found."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from async_steps import scheduled
from helpers import ROOT, edit_file

import gopt
from gopt.artifact.server_entries import Mode, PullAt
from gopt.errors import OptionError
from gopt.parameter_server.options import SplitOptions
from gopt.verification.replay.replay import RUN
from gopt.verification.replay.source_replay import GRADIENTS, UPDATES

pytestmark = pytest.mark.usefixtures("unchecked")

STEPS = 4


def split(tmp_path: Path, model: Path | None = None, **given: Any) -> Path:
    options = {"trainers": 3, "servers": 2, "minimum": 4, "mode": Mode.ASYNC, **given}
    target = tmp_path / "step.split"
    gopt.split(gopt.load(model or scheduled(tmp_path / "step.onnx")), SplitOptions(**options)).write(target)
    return target


def recorded(folder: Path, samples: dict[str, np.ndarray] | None = None, **given: Any) -> Path:
    """The record of a run beside the folder."""
    random, path, data = np.random.default_rng(3), folder.parent / "run.json", folder.parent / "data.npz"
    drawn = {"x": random.normal(size=(64, 3)).astype("f4"), "y": random.normal(size=(64, 2)).astype("f4")}
    np.savez(data, **(samples or drawn))
    gopt.run(folder, str(data), STEPS, record=path, **given)
    return path


def test_a_replay_has_the_states_of_the_run_and_does_what_the_source_does(tmp_path: Path) -> None:
    folder = split(tmp_path)
    record = recorded(folder)
    result = gopt.verify(folder, replay=record)
    assert result.equal and result.worst.keys() == {RUN, GRADIENTS, UPDATES}
    keys = len(json.loads((folder / "manifest.json").read_text())["parameter_server"]["keys"])
    states = json.loads(record.read_text())["states"]
    assert len(states) == 2 * keys + 2, "of each key a parameter and a momentum, of each server a counter"
    # The messages of five roles; the states; of each push of each key a gradient, and two states and a counter.
    assert result.compared == 5 + len(states) + STEPS * 3 * keys * (1 + 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [{"mode": Mode.HALF_ASYNC}, {"compensation": 2.0}, {"pull": PullAt.END, "count": "push"}, {"accumulate": 2},
     {"wire": "float16", "count": "chief"}, {"mode": Mode.GEO, "every": 2}],
    ids=lambda given: "-".join(given),
)  # fmt: skip
def test_every_mode_without_rounds_is_replayed(given: dict[str, Any], tmp_path: Path) -> None:
    folder = split(tmp_path, **given)
    result = gopt.verify(folder, replay=recorded(folder, staleness=2))
    assert result.equal and result.compared > 20, result


@pytest.mark.parametrize(
    ("name", "rows"), [pytest.param("dlrm_adagrad", "dense", marks=pytest.mark.slow), ("dlrm_adam", "lazy")]
)
def test_tables_are_replayed(name: str, rows: str, tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    samples = {
        "numbers": random.normal(size=(48, 4)).astype("f4"), "ids": random.integers(0, 40, (48, 2)),
        "bag": random.integers(0, 24, (48, 5)), "clicked": random.integers(0, 2, 48).astype("f4"),
    }  # fmt: skip
    model = ROOT / f"fixtures/sparse/{name}.onnx"
    folder = split(tmp_path, model, tables={"*": "modulo"}, rows={"*": rows}, minimum=16)
    record = recorded(folder, samples, settings={"lr": 0.5})
    result = gopt.verify(folder, replay=record)
    assert result.equal, result.reason()
    kinds = {each["kind"] for given in json.loads(record.read_text())["received"].values() for each in given}
    assert {"PUSH_ROWS", "PULL_ROWS"} <= kinds


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs pip install 'gopt[mpi]'")
def test_a_run_of_processes_is_replayed_in_one(tmp_path: Path) -> None:
    folder = split(tmp_path)
    recorded(folder)
    record = tmp_path / "processes.json"
    run = ["run", str(folder), "--launch", "5", "--data", str(tmp_path / "data.npz"), "--steps", "20", "--json"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "gopt.cli", *run, "--record", str(record)], check=True, capture_output=True
    )
    assert json.loads(done.stdout)["record"] == str(record)
    verify = ["verify", str(folder), "--replay", str(record), "--json"]
    done = subprocess.run([sys.executable, "-P", "-m", "gopt.cli", *verify], capture_output=True)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["outcome"] == "equal" and found["steps"] == 20


def edited(path: Path, old: float, new: float) -> None:
    """Give constants of a file another value."""

    def edit(model: onnx.ModelProto) -> None:
        found = [each for each in model.graph.initializer if each.raw_data == np.float32(old).tobytes()]
        assert found
        for each in found:
            each.raw_data = np.float32(new).tobytes()

    edit_file(path, edit)


def test_another_beta_in_a_server_is_found(tmp_path: Path) -> None:
    folder = split(tmp_path)
    record, manifest = recorded(folder), (folder / "manifest.json").read_bytes()
    edited(folder / "server_0000.onnx", 0.9, 0.8)
    (folder / "manifest.json").write_bytes(manifest)  # by which the record knows its folder
    result = gopt.verify(folder, replay=record)
    assert result.exit_code == 1 and result.worst[RUN].fails and result.worst[UPDATES].fails
    assert not result.worst[GRADIENTS].fails, "the trainers are as they were"


def test_a_run_of_another_beta_is_held_against_the_source(tmp_path: Path) -> None:
    """The replay has the bits of the run, and both are wrong."""
    folder = split(tmp_path)
    edited(folder / "server_0000.onnx", 0.9, 0.8)
    result = gopt.verify(folder, replay=recorded(folder))
    assert result.exit_code == 1 and not result.worst[RUN].fails and result.worst[UPDATES].fails


def test_another_gradient_in_the_trainers_is_found(tmp_path: Path) -> None:
    folder = split(tmp_path)
    edited(folder / "trainer.onnx", 0.25, 0.5)
    result = gopt.verify(folder, replay=recorded(folder))
    assert result.exit_code == 1 and result.worst[GRADIENTS].fails and not result.worst[UPDATES].fails


def swapped(document: dict[str, Any]) -> None:
    """Two pushes that follow one another came the other way round."""
    for number in (0, 1):
        given = document["received"][f"server {number}"]
        pushes = [place for place, each in enumerate(given) if each["kind"] == "PUSH"]
        for one, other in itertools.pairwise(pushes):
            if given[one]["from"] != given[other]["from"] and given[one]["key"] == given[other]["key"]:
                given[one], given[other] = given[other], given[one]
                return
    raise AssertionError("no two pushes of different trainers follow one another")


def shorter(document: dict[str, Any]) -> None:
    del document["received"]["server 1"][-3:]


def impossible(document: dict[str, Any]) -> None:
    """A server receives all pushes before the first pull."""
    given = document["received"]["server 0"]
    given.sort(key=lambda each: each["kind"] != "PUSH")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A split, and the text of a record of it."""
    folder = split(tmp_path_factory.mktemp("run"))
    return folder, recorded(folder).read_text()


@pytest.mark.parametrize("change", [swapped, shorter, impossible])
def test_another_order_is_found(
    change: Callable[[dict[str, Any]], None], run: tuple[Path, str], tmp_path: Path
) -> None:
    document = json.loads(run[1])
    change(document)
    record = tmp_path / "run.json"
    record.write_text(json.dumps(document))
    result = gopt.verify(run[0], replay=record)
    assert result.exit_code == 1 and result.worst[RUN].fails
    assert all(not each.fails for name, each in result.worst.items() if name != RUN), "each update is right"
    if change is not swapped:
        assert any("the recorded order cannot be followed" in note for note in result.notes)


def test_what_is_no_run_without_rounds_is_refused(tmp_path: Path) -> None:
    folder = split(tmp_path, mode=Mode.SYNC)
    with pytest.raises(OptionError, match="record is for runs without rounds"):
        recorded(folder)
    with pytest.raises(OptionError, match="replay is for splits without rounds"):
        gopt.verify(folder, replay=tmp_path / "run.json")
    with pytest.raises(OptionError, match="steps cannot be combined with a replay"):
        gopt.verify(folder, replay=tmp_path / "run.json", steps=2)
