"""Samples on disk for a step that leaves their number open: a run says how many of them are a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gopt.cli.main import main
from helpers import edit_manifest
from written_steps import NET, Written, saved, sgd

import gopt
from gopt.artifact.checkpoint_index import open_index
from gopt.errors import GoptError, InputError, OptionError
from gopt.ir.types import TensorType
from gopt.runtime.training.array_source import MicroStep
from gopt.runtime.training.batch_types import of_size
from gopt.runtime.training.data import open_data
from gopt.runtime.training.epochs import steps_of_epochs
from gopt.runtime.training.job import Job

LR = {"lr": 0.05}


def ranks(folder: Path, *symbols: str) -> Path:
    """A step of 4 samples; ``symbols``: what the first dimension of its two inputs is called instead."""
    model = Written(NET + sgd()).model()
    for name, symbol in zip("xy", symbols):
        info = next(each for each in model.graph.input if each.name == name)
        info.type.tensor_type.shape.dim[0].dim_param = symbol
    folder.mkdir()
    gopt.shard(gopt.load(saved(model, folder)), 2).write(folder / "ranks")
    return folder / "ranks"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of two files of 13 samples in all."""
    random = np.random.default_rng(0)
    x, y = random.standard_normal((13, 3), np.float32), random.standard_normal((13, 2), np.float32)
    (tmp_path / "data").mkdir()
    for number, rows in enumerate((slice(5), slice(5, 13))):
        np.savez(tmp_path / "data" / f"part{number}.npz", x=x[rows], y=y[rows])
    return tmp_path / "data"


@pytest.mark.parametrize("symbols", [("n", "n"), ("n", "m")])
def test_an_open_batch_of_a_size_is_a_fixed_one_of_it(symbols: tuple[str, str], data: Path, tmp_path: Path) -> None:
    fixed = gopt.run(ranks(tmp_path / "fixed"), data, 4, settings=LR, shuffle=1).losses
    step = ranks(tmp_path / "open", *symbols)
    assert gopt.run(step, data, 4, settings=LR, shuffle=1, batch_size=4).losses == fixed
    assert steps_of_epochs(Job(folder=step, data=str(data), steps=1, batch_size=4), 4) == 7


def inputs_of(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in manifest["common"]["inputs"]}


def test_drawn_inputs_have_as_many_samples(data: Path, tmp_path: Path) -> None:
    step = ranks(tmp_path / "open", "n", "n")
    edit_manifest(step, lambda manifest: inputs_of(manifest)["x"].update(draw={"distribution": "normal"}))
    np.savez(tmp_path / "y.npz", y=np.ones((12, 2), "f4"))
    found = gopt.run(step, tmp_path / "y.npz", 2, settings=LR, batch_size=3)
    assert [each.samples for each in found.steps] == [6, 6]


def test_a_function_yields_batches_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
def batches(part, parts):
    import numpy as np
    while True:
        yield {"x": np.ones((5, 3), "f4"), "y": np.ones((5, 2), "f4")}
"""
    (tmp_path / "five.py").write_text(text)
    found = gopt.run(ranks(tmp_path / "open", "n", "n"), f"{tmp_path / 'five.py'}:batches", 2, settings=LR)
    assert [step.samples for step in found.steps] == [10, 10]


def test_the_command_takes_the_size(data: Path, tmp_path: Path) -> None:
    step = ranks(tmp_path / "open", "n", "n")
    asked = ["run", str(step), "--data", str(data), "--epochs", "1", "--set", "lr=0.05"]
    assert main([*asked, "--checkpoint", str(tmp_path / "c")]) == 3
    assert main([*asked, "--batch-size", "3", "--checkpoint", str(tmp_path / "c")]) == 0
    assert [each.name for each in (tmp_path / "c").glob("step_*")] == ["step_00000003"]


def test_a_run_that_is_resumed_keeps_its_size(data: Path, tmp_path: Path) -> None:
    step = ranks(tmp_path / "open", "n", "n")
    whole = gopt.run(step, data, 4, settings=LR, batch_size=4).losses
    first = gopt.run(step, data, 2, settings=LR, batch_size=4, checkpoint=tmp_path / "c")
    assert open_index(first.path).batch_size == 4
    with pytest.raises(OptionError, match="batch_size=3: the run that is continued has batch_size=4"):
        gopt.run(step, data, 4, settings=LR, batch_size=3, checkpoint=tmp_path / "c", resume=True)
    rest = gopt.run(step, data, 4, settings=LR, checkpoint=tmp_path / "c", resume=True)
    assert first.losses + rest.losses == whole


def test_sizes_that_step_or_data_contradict_are_refused(data: Path, tmp_path: Path) -> None:
    fixed, opened = ranks(tmp_path / "fixed"), ranks(tmp_path / "open", "n", "n")
    with pytest.raises(OptionError, match=r"batch_size=3: the step takes batches of 4 samples \('x'\)"):
        gopt.run(fixed, data, 1, settings=LR, batch_size=3)
    gopt.run(fixed, data, 1, settings=LR, batch_size=4)
    with pytest.raises(InputError, match="samples on disk do not say how many are a batch") as caught:
        gopt.run(opened, data, 1, settings=LR)
    assert caught.value.hints[0] == "give --batch-size N"
    with pytest.raises(OptionError, match="needs samples on disk"):
        gopt.run(opened, [{"x": np.zeros((3, 3), "f4"), "y": np.zeros((3, 2), "f4")}], 1, settings=LR, batch_size=4)
    with pytest.raises(GoptError, match="at least 1"):
        gopt.RunOptions(batch_size=0)


def test_rows_of_tokens_are_batches_of_the_size(tmp_path: Path) -> None:
    np.arange(40, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    types = of_size({"x": TensorType("int64", ("n", 5))}, 2)
    source = open_data(f"{tmp_path / 'tokens.bin'}:uint16", types)
    np.testing.assert_array_equal(source.batch(MicroStep(1, 0, 1))["x"], np.arange(10, 20).reshape(2, 5))
