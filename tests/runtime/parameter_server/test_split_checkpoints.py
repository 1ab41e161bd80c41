"""Checkpoints of a split resume with other trainers: the numbers are those of the source's step on the batches that
these trainers see, in the order in which servers received."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from async_runs import SourceGradients, folder, interpret, pieces, run_split
from async_steps import SourceUpdate
from gopt.cli.main import main
from helpers import source
from seeded_order import Seeded

import gopt
from gopt import api
from gopt.artifact.checkpoint_index import INDEX_FILE, open_index, rank_states_file, step_dir
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.server_entries import Mode, PullAt
from gopt.errors import RunError
from gopt.ir.external_data import load_state
from gopt.offline.resplit import resplit
from gopt.parameter_server.options import SplitOptions
from gopt.records.roles import Roles
from gopt.runtime.session import Array
from gopt.runtime.training.array_source import MicroStep
from gopt.runtime.training.checkpoint import Checkpoints

COUNTS = ((3, 2), (2, 4, 1))
"""Trainers of the parts of a run, which are two steps each."""
Batch = dict[str, Array]


@pytest.fixture
def samples() -> Batch:
    random = np.random.default_rng(3)
    return {"x": random.normal(size=(60, 3)).astype("f4"), "y": random.normal(size=(60, 2)).astype("f4")}


@pytest.fixture
def data(tmp_path: Path, samples: Batch) -> str:
    path = tmp_path / "data.npz"
    np.savez(path, **samples)  # type: ignore[arg-type]
    return str(path)


@pytest.mark.parametrize("given", [{}, {"accumulate": 2}, {"pull": PullAt.END, "servers": 1}])
@pytest.mark.parametrize("counts", COUNTS)
def test_rounds_go_on_with_other_trainers(
    counts: tuple[int, ...], given: dict[str, object], tmp_path: Path, samples: Batch
) -> None:
    home = folder(tmp_path, trainers=counts[0], mode=Mode.SYNC, **given)
    times = int(given.get("accumulate", 1))  # type: ignore[call-overload]
    training = api.load(tmp_path / "step.onnx").training
    update, gradients = SourceUpdate(training), SourceGradients(training)
    states, dealt = update.start(), 0
    for turn, trainers in enumerate(counts):
        run = gopt.run(
            home, samples, 2 * turn + 2, trainers=trainers, checkpoint=tmp_path / "kept", resume=turn > 0, keep=9
        )
        for _ in range(2):
            batches = [{name: np.roll(rows, -4 * (dealt + n), 0)[:4] for name, rows in samples.items()}
                       for n in range(trainers * times)]  # fmt: skip
            dealt += len(batches)
            own = {name: states[name] for name in training.gradients}
            found = [gradients(own, batch) for batch in batches]
            states = update(states, {name: np.mean([each[name] for each in found], 0) for name in own})
        index = open_index(run.path)
        assert index.trainers(int(given.get("servers", 2))) == trainers  # type: ignore[call-overload]
        assert dealt == (2 * turn + 2) * times * trainers if index.batches is None else index.batches
        for name, value in run.states.items():
            np.testing.assert_allclose(value, states[name], rtol=1e-5, atol=1e-7, err_msg=name)
    gopt.merge(run.path, tmp_path / "whole.onnx")
    resplit(tmp_path / "kept" / step_dir(2), {"trainers": 5})


@pytest.mark.parametrize("counts", COUNTS)
def test_pushes_go_on_with_other_trainers(counts: tuple[int, ...], tmp_path: Path, data: str) -> None:
    """What servers hold is what the source's update gives after each push, in the order in which they came."""
    home, training = folder(tmp_path, trainers=counts[0]), api.load(tmp_path / "step.onnx").training
    before, dealt = None, 0
    for turn, trainers in enumerate(counts):
        run = run_split(
            home, data, 2 * turn + 2, trainers=trainers, checkpoint=tmp_path / "kept", resume=turn > 0,
            order=Seeded(turn),
        )  # fmt: skip
        before = interpret(
            run, training, SourceUpdate(training), data, before=before, ahead=dealt - 2 * turn * trainers
        )
        dealt += 2 * trainers
        for name, got, wanted in pieces(run, before):
            assert got == wanted, name
    assert {float(each) for server in run.servers.values() for key in server.keys.values()
            for each in key.counters.values()} == {2.0 * len(counts)}  # fmt: skip


@pytest.mark.parametrize(
    "given", [{"count": "push", "compensation": 1.0}, {"mode": Mode.HALF_ASYNC, "pull": PullAt.END}]
)
def test_keys_know_how_often_they_were_updated(given: dict[str, object], tmp_path: Path, data: str) -> None:
    home = folder(tmp_path, trainers=3, **given)
    for turn, trainers in enumerate((3, 2, 4)):
        run = run_split(home, data, 2 * turn + 2, trainers=trainers, checkpoint=tmp_path / "kept", resume=turn > 0)
    keys = [key for server in run.servers.values() for key in server.keys.values()]
    assert {key.version for key in keys} == {18}
    assert {key.counting.advances for key in keys} == {18 if "count" in given else 6}


def test_a_function_passes_over_what_was_dealt_out() -> None:
    """Where parts take batches in turn, none comes twice, and fewer than one a trainer is left out."""
    for parts in (1, 2, 3):
        for ahead in range(-4, 5):
            first = [MicroStep(5, part, parts, ahead) for part in range(parts)]
            had = [each.turn * parts + each.part for each in first]
            assert had == list(range(had[0], had[0] + parts)) and 0 <= had[0] - first[0].place < parts


@pytest.mark.parametrize("lost", [(), (1,), (0, 2)])
def test_a_trainer_without_a_file_takes_the_values_of_the_first_that_has_one(
    lost: tuple[int, ...], tmp_path: Path
) -> None:
    """Running statistics are each trainer's own."""
    api.split(source("cnn_sgd"), SplitOptions(trainers=3, servers=2, minimum=16)).write(tmp_path / "split")
    random = np.random.default_rng(0)
    batch = {"x": random.random((96, 1, 8, 8)).astype("f4"), "y": np.zeros(96, "i8")}
    run = gopt.run(tmp_path / "split", batch, 2, settings={"lr": 0.1}, checkpoint=tmp_path / "kept")
    _lose(run.path, lost)
    manifest, _ = read_manifest(tmp_path / "split")
    files = {number: load_state(path) for number in range(3) if (path := run.path / rank_states_file(number)).exists()}
    for trainers in (2, 3, 5):
        kept = Checkpoints(tmp_path / "kept", tmp_path / "split", manifest, trainers=trainers)
        for number in range(trainers):
            wanted = files.get(number, files[min(files)])
            found = kept.load(number, 2)
            assert found and all(np.array_equal(value, wanted[name].numpy()) for name, value in found.items())
        servers = [kept.load(trainers + number, 2) for number in range(2)]
        assert [each.keys() for each in servers] == [
            load_state(run.path / rank_states_file(3 + n)).keys() for n in (0, 1)
        ]
    gopt.run(tmp_path / "split", batch, 3, settings={"lr": 0.1}, checkpoint=tmp_path / "kept", resume=True)


def test_a_lost_trainer_of_mode_geo_is_named_and_the_hint_holds(tmp_path: Path, data: str) -> None:
    home = folder(tmp_path, trainers=3, mode=Mode.GEO)
    run = gopt.run(home, data, 2, checkpoint=tmp_path / "kept")
    _lose(run.path, (1,))
    with pytest.raises(RunError, match=r"trainer 1 was lost before checkpoint.*own value of 'w0'") as refused:
        gopt.run(home, data, 3, checkpoint=tmp_path / "kept", resume=True)
    (hint,) = refused.value.hints
    command = hint.split("gopt ")[1].replace("-o DIR", f"-o {tmp_path / 'again'}").split()
    assert main(command) == 0
    assert len(gopt.run(tmp_path / "again", data, 1).steps) == 1


def test_a_map_of_roles_is_for_its_own_number(tmp_path: Path, data: str) -> None:
    home = folder(tmp_path, trainers=3, roles=Roles.parse("server:0,1;trainer:2-4"), mode=Mode.SYNC)
    for turn, trainers in enumerate((3, 2, 3)):
        gopt.run(home, data, turn + 1, trainers=trainers, checkpoint=tmp_path / "kept", resume=turn > 0)


def _lose(step: Path, trainers: tuple[int, ...]) -> None:
    index = open_index(step)
    for rank in trainers:
        (step / rank_states_file(rank)).unlink()
    left = {name: entry for name, entry in index.files.items() if (step / name).exists()}
    (step / INDEX_FILE).write_text(replace(index, files=left).text())
