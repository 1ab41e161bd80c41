"""Folders of artifacts where gopt takes a model: loaded, sharded, verified."""

from __future__ import annotations

import pytest
from helpers import ROOT
from products import spread
from recordings import FOLDERS, NAMES

import gopt
from gopt.errors import InputError
from gopt.importers.artifacts.folder import read_artifacts
from gopt.importers.load import holds_step, load_step, read_step


def test_a_folder_and_a_model():
    parts = read_artifacts(FOLDERS / "mlp_adamw")
    folder = read_step(FOLDERS / "mlp_adamw")
    assert (folder.digest(), folder.nbytes) == (parts.digest(), parts.nbytes)
    model = read_step(ROOT / "fixtures" / "mlp_adamw.onnx")
    assert model.nbytes == (ROOT / "fixtures" / "mlp_adamw.onnx").stat().st_size
    assert load_step(ROOT / "fixtures" / "mlp_adamw.onnx").inputs == model.graph.inputs


def test_other_folders(tmp_path):
    assert read_step(tmp_path) is None and not holds_step(tmp_path)
    assert holds_step(FOLDERS / "gpt") and not holds_step(ROOT / "fixtures" / "mlp_adamw.onnx")
    with pytest.raises(InputError, match="is a folder, not a file"):
        load_step(tmp_path)
    with pytest.raises(InputError, match="is a folder, not a file"):
        gopt.load(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_roles_are_those_of_the_artifacts(name):
    """What data flow settles agrees with the accumulators: each parameter has its moments and its gradient."""
    training = gopt.load(FOLDERS / name).training
    moments = {state.tensor: state.of for state in training.states if ".momentum" in state.tensor}
    assert moments == {each: each.rpartition(".momentum")[0] for each in moments}
    assert {state.tensor for state in training.parameters} == training.gradients.keys()
    assert {state.tensor for state in training.states if state.kind == "statistic"} == (
        {"norm.running_mean", "norm.running_var"} if name == "cnn" else set()
    )


@pytest.mark.parametrize(("name", "stage"), spread(NAMES, [2, 3]))
def test_ranks_of_a_folder_equal_their_source(name, stage, tmp_path):
    gopt.shard(gopt.load(FOLDERS / name), 2, stage=stage).write(tmp_path / "ranks")
    result = gopt.verify(tmp_path / "ranks", steps=2)
    assert result.equal and result.exit_code == 0, result.reason()
