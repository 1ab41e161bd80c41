"""Random numbers of runs: by a counter, the same for ranks that see one batch, and kept by a resumed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_steps import BATCH, DRAWS, noisy_step, samples
from gopt.cli.main import main
from helpers import accept, edit_manifest, run_graph

import gopt
from gopt.artifact.manifest_check import read_manifest
from gopt.documents.draws import Distribution, Draw
from gopt.errors import InputError, OptionError
from gopt.ir.load import load
from gopt.ir.types import FLOATS, TensorType, numpy_dtype
from gopt.parameter_server.options import SplitOptions
from gopt.runtime.training.draws import DrawnInputs, counter, drawn

STEPS, SEED = 3, 5
RATE = {"lr": 1e-3}


def sharded(folder: Path, mesh: str) -> Path:
    gopt.shard(gopt.load(noisy_step(folder / "step.onnx")), mesh).write(folder / "ranks")
    return folder / "ranks"


def states(run: Any) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in run.states.items()}


def all_draws(ranks: Path, parts: int, steps: int = STEPS) -> dict[str, np.ndarray]:
    """The draws of all ranks and steps, in the order in which batches are dealt out."""
    source = DrawnInputs.of(read_manifest(ranks)[0], SEED)
    made = [source.batch(number, part) for number in range(steps) for part in range(parts)]
    return {name: np.stack([each[name] for each in made]) for name in DRAWS}


# --- the numbers ----------------------------------------------------------------------------------------------------


def test_a_number_depends_on_seed_input_step_and_part_alone():
    place = (3, "a", 7, 1)
    assert counter(*place).random() == counter(*place).random()
    others = [(4, "a", 7, 1), (3, "b", 7, 1), (3, "a", 8, 1), (3, "a", 7, 2)]
    assert len({counter(*each).random() for each in (place, *others)}) == 5
    types = {name: TensorType("float32", (3,)) for name in "ab"}
    both = DrawnInputs(types, {name: Draw(Distribution.NORMAL) for name in "ab"}, 3)
    one = both.without(["a"])
    assert one.batch(7, 1).keys() == {"b"} and one.batch(7, 1)["b"].tolist() == both.batch(7, 1)["b"].tolist()


@pytest.mark.parametrize("dtype", sorted(FLOATS))
def test_uniform_numbers_stay_below_their_bound(dtype):
    draw = Draw(Distribution.UNIFORM, low=-1.0, high=0.75)
    found = drawn(draw, TensorType(dtype, (20_000,)), counter(0, "u", 0, 0))
    assert found.dtype == numpy_dtype(dtype)
    values = found.astype(float)
    assert values.min() >= -1.0 and values.max() < 0.75 and abs(values.mean() + 0.125) < 0.02


def test_numbers_follow_their_distributions():
    def made(draw: Draw, dtype: str = "float32", dims: tuple[int, ...] = (50, 400)) -> np.ndarray:
        return drawn(draw, TensorType(dtype, dims), counter(1, "x", 2, 3))

    normal = made(Draw(Distribution.NORMAL, mean=3.0, std=0.5))
    assert abs(normal.mean() - 3.0) < 0.02 and abs(normal.std() - 0.5) < 0.02 and normal.dtype == np.float32
    assert {*np.unique(made(Draw(Distribution.INTEGERS, low=-2, high=3), "int32"))} == {-2, -1, 0, 1, 2}
    told = made(Draw(Distribution.BERNOULLI, p=0.9), "bool")
    assert told.dtype == bool and abs(told.mean() - 0.9) < 0.01
    mixed = made(Draw(Distribution.PERMUTATION), "int64", (3, 8))
    assert (np.sort(mixed, axis=-1) == np.arange(8)).all() and (mixed[0] != mixed[1]).any()


# --- runs -----------------------------------------------------------------------------------------------------------


def test_ranks_train_on_their_draws_as_the_source_does(tmp_path):
    """The numbers that a run makes, fed to the source on each rank's batch: the mean gradient gives the same values."""
    ranks, data = sharded(tmp_path, "shard=2"), samples(tmp_path / "d.npz")
    ran = gopt.run(ranks, data, STEPS, settings=RATE, draws=SEED, checkpoint=tmp_path / "ckpt")
    graph, x = load(tmp_path / "step.onnx", own=True), np.load(data)["x"]
    held = {name: graph.initializers[name].numpy() for name in ("table", "w", "v")}
    given = all_draws(ranks, 2)
    for step in range(STEPS):
        turns = [2 * step + part for part in range(2)]
        rows = [np.arange(turn * BATCH, (turn + 1) * BATCH) % len(x) for turn in turns]
        fed = [{"x": x[own], **{name: given[name][turn] for name in DRAWS}} for own, turn in zip(rows, turns)]
        results = [run_graph(graph, {**held, **each, "lr": np.float32(1e-3)}) for each in fed]
        assert ran.losses[step] == pytest.approx(np.mean([each["loss"] for each in results]), rel=1e-5)
        held = {name: (results[0][f"{name}_out"] + results[1][f"{name}_out"]) / 2 for name in held}
    for name, value in ran.states.items():
        np.testing.assert_allclose(value, held[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mesh", ["shard=2", "dp=2,tp=2"])
def test_members_of_a_group_have_the_draws_of_its_batch(mesh, tmp_path):
    """A run that draws has the bits of one that is fed the draws of each part of the data."""
    ranks, data = sharded(tmp_path, mesh), samples(tmp_path / "d.npz")
    ran = gopt.run(ranks, data, STEPS, settings=RATE, draws=SEED)
    x = np.resize(np.load(data)["x"], (2 * STEPS, BATCH, 6))
    fed = gopt.run(ranks, {"x": x, **all_draws(ranks, 2)}, STEPS, settings=RATE)
    assert ran.losses == fed.losses and states(ran) == states(fed)


def test_a_resumed_run_goes_on_with_its_draws(tmp_path):
    ranks, data = sharded(tmp_path, "shard=2"), samples(tmp_path / "d.npz")

    def run(steps: int, folder: str, **more: Any) -> Any:
        return gopt.run(ranks, data, steps, settings=RATE, checkpoint=tmp_path / folder, **more)

    whole = run(6, "whole", draws=SEED)
    run(2, "parts", draws=SEED)
    resumed = run(6, "parts", resume=True)
    assert resumed.draws == SEED and resumed.losses == whole.losses[2:] and states(resumed) == states(whole)
    assert json.loads((tmp_path / "parts/step_00000006/index.json").read_text())["draws"] == SEED
    assert states(run(6, "again", draws=SEED)) == states(whole)
    usual = run(6, "usual")
    assert usual.draws == 0 and states(usual) != states(whole)
    with pytest.raises(OptionError, match=f"draws=6: the run that is continued draws from the seed {SEED}"):
        run(7, "parts", resume=True, draws=6)


def test_what_the_data_gives_is_not_drawn(tmp_path, monkeypatch, capsys):
    ranks, data = sharded(tmp_path, "shard=2"), samples(tmp_path / "d.npz")
    given = all_draws(ranks, 2)
    own = {"x": np.resize(np.load(data)["x"], (2 * STEPS, BATCH, 6)), "noise": given["noise"] * 0, "t": given["t"]}
    ran = gopt.run(ranks, own, STEPS, settings=RATE, draws=SEED)
    fed = gopt.run(ranks, {**given, **own}, STEPS, settings=RATE)
    assert states(ran) == states(fed)
    (tmp_path / "feeder.py").write_text(
        "import numpy as np\n"
        f"own = dict(np.load({str(tmp_path / 'own.npz')!r}))\n"
        "def batches(part, parts):\n"
        f"    for turn in range(part, {2 * STEPS}, parts):\n"
        "        yield {name: value[turn] for name, value in own.items()}\n"
    )
    np.savez(tmp_path / "own.npz", **own)
    monkeypatch.chdir(tmp_path)
    code = main(["run", str(ranks), "--data", "feeder:batches", "--steps", str(STEPS), "--set", "lr=1e-3",
                 "--draws", str(SEED), "--checkpoint", "ckpt", "--json"])  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0 and f"drawn from the seed {SEED}: noise normal(0.5, 2), u uniform [0, 1)" in err
    assert json.loads(out)["draws"]["inputs"]["t"] == {"distribution": "integers", "low": 100, "high": 1000}
    assert main(["merge", f"ckpt/step_0000000{STEPS}", "-o", "trained.onnx"]) == 0
    trained = load(tmp_path / "trained.onnx", own=True).initializers
    assert {name: trained[name].numpy().tobytes() for name in states(ran)} == states(ran)


def test_passes_are_counted_without_arrays_of_draws(tmp_path, capsys):
    """--epochs asked for an array of each draw, though a run makes them."""
    ranks, data = sharded(tmp_path, "shard=2"), samples(tmp_path / "d.npz")
    assert main(["run", str(ranks), "--data", str(data), "--epochs", "1", "--set", "lr=1e-3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == -(-len(np.load(data)["x"]) // (2 * BATCH))


def test_a_seed_for_a_step_without_draws_is_refused(tmp_path):
    gopt.shard(gopt.load(noisy_step(tmp_path / "step.onnx", {})), 2).write(tmp_path / "ranks")
    data = samples(tmp_path / "d.npz")
    with pytest.raises(OptionError, match="draws=3: no input of the step is of random numbers"):
        gopt.run(tmp_path / "ranks", data, 1, settings=RATE, draws=3)
    with pytest.raises(InputError, match="has no array 'noise'"):
        gopt.run(tmp_path / "ranks", data, 1, settings=RATE)


def test_a_draw_that_fits_no_input_is_refused(tmp_path):
    ranks, data = sharded(tmp_path, "shard=2"), samples(tmp_path / "d.npz")
    edit_manifest(ranks, lambda manifest: manifest["common"]["inputs"][1]["draw"].update(distribution="permutation"))
    accept(ranks)
    with pytest.raises(InputError, match=r"common.inputs\[1\].draw: permutation: it holds float32, not integers"):
        gopt.run(ranks, data, 1, settings=RATE)
    draws = {"noise": Draw(Distribution.INTEGERS, high=5)}
    with pytest.raises(InputError, match="'noise' cannot be drawn from integers"):
        gopt.load(noisy_step(tmp_path / "other.onnx", draws))


def test_trainers_draw_and_a_replay_has_their_numbers(tmp_path):
    source = gopt.load(noisy_step(tmp_path / "step.onnx"))
    gopt.split(source, SplitOptions(trainers=2, servers=1)).write(tmp_path / "rounds")
    data = samples(tmp_path / "d.npz")
    split = gopt.run(tmp_path / "rounds", data, STEPS, settings=RATE, draws=SEED)
    whole = gopt.run(sharded(tmp_path, "shard=2"), data, STEPS, settings=RATE, draws=SEED)
    np.testing.assert_allclose(split.losses, whole.losses, rtol=1e-5)
    gopt.split(source, SplitOptions(trainers=2, servers=1, mode="async")).write(tmp_path / "free")
    record = tmp_path / "record.json"
    gopt.run(tmp_path / "free", data, STEPS, settings=RATE, draws=SEED, record=record)
    assert json.loads(record.read_text())["job"]["draws"] == SEED
    result = gopt.verify(tmp_path / "free", replay=record)
    assert result.equal, result.to_json()


def test_verify_feeds_what_a_step_says_of_its_draws(tmp_path):
    """Before it did, an index of a normal distribution's float, or the first rows of a table alone, were fed."""
    ranks = sharded(tmp_path, "shard=2")
    result = gopt.verify(ranks, steps=2)
    assert result.equal and len(result.gradients) == 3 and all(each.holds for each in result.gradients)
    assert gopt.verify(ranks, steps=2, data=str(samples(tmp_path / "d.npz"))).equal
