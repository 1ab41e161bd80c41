"""Values from a state dict into a step, and out of ranks as one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, Builder, perceptron, sgd

import gopt
from gopt.artifact.safetensors_file import safetensors_chunks
from gopt.errors import InputError, OptionError, RunError, UnsupportedError
from gopt.ir.external_data import load_state
from gopt.ir.types import TensorType
from gopt.offline.state_values import load_values, save_state_dict

MODEL = FIXTURES / "mlp_adamw.onnx"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("state") / "ranks"
    gopt.shard(gopt.load(MODEL), 3).write(folder)
    return folder


def values(model: Path) -> dict[str, np.ndarray]:
    training = gopt.load(model).training
    return {name: training.graph.initializers[name].numpy() for name in training.state_of()}


def written(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    types = {name: TensorType(str(array.dtype), array.shape) for name, array in arrays.items()}
    path.write_bytes(b"".join(map(bytes, safetensors_chunks(types, arrays.values()))))
    return path


def test_ranks_give_the_parameters_of_the_source(ranks, tmp_path):
    saved = save_state_dict(ranks, tmp_path / "out.safetensors")
    source, found = values(MODEL), load_state(tmp_path / "out.safetensors")
    parameters = [state.tensor for state in gopt.load(MODEL).training.parameters]
    assert sorted(found) == sorted(parameters) and saved.tensors == len(parameters) and not saved.missing
    for name in parameters:
        np.testing.assert_array_equal(found[name].numpy(), source[name])


def test_all_states_come_out_and_go_into_a_step_again(ranks, tmp_path):
    save_state_dict(ranks, tmp_path / "all.safetensors", all_states=True)
    changed = {name: tensor.numpy() + 1 for name, tensor in load_state(tmp_path / "all.safetensors").items()}
    loaded = load_values(MODEL, written(tmp_path / "new.safetensors", changed), tmp_path / "step.onnx")
    assert loaded.loaded == len(changed) and loaded.kept == () and loaded.unknown == ()
    source = values(MODEL)
    for name, value in values(tmp_path / "step.onnx").items():
        np.testing.assert_array_equal(value, source[name] + 1)


def test_states_that_the_file_does_not_name_keep_their_values(tmp_path):
    name = gopt.load(MODEL).training.parameters[0].tensor
    source = values(MODEL)
    loaded = load_values(MODEL, written(tmp_path / "one.safetensors", {name: source[name] * 2}), tmp_path / "s.onnx")
    assert loaded.loaded == 1 and len(loaded.kept) == len(source) - 1
    for each, value in values(tmp_path / "s.onnx").items():
        np.testing.assert_array_equal(value, source[each] * (2 if each == name else 1))


def test_an_unknown_name_is_refused_with_the_nearest_one_or_left_out(tmp_path):
    name = gopt.load(MODEL).training.parameters[0].tensor
    file = written(tmp_path / "odd.safetensors", {name + "x": values(MODEL)[name]})
    with pytest.raises(InputError, match="is not a state of the model") as raised:
        load_values(MODEL, file, tmp_path / "s.onnx")
    assert f"did you mean {name!r}?" in raised.value.hints and not (tmp_path / "s.onnx").exists()
    loaded = load_values(MODEL, file, tmp_path / "s.onnx", ignore_unknown=True)
    assert loaded.unknown == (name + "x",) and loaded.loaded == 0


def test_another_shape_is_refused(tmp_path):
    name = gopt.load(MODEL).training.parameters[0].tensor
    with pytest.raises(InputError, match="the model says"):
        load_values(MODEL, written(tmp_path / "f.safetensors", {name: np.zeros(3, "f4")}), tmp_path / "s.onnx")


def test_the_target_is_written_whole_or_not_at_all(ranks, tmp_path, monkeypatch):
    target = tmp_path / "out.safetensors"
    target.write_text("mine")
    with pytest.raises(OptionError, match="exists already"):
        save_state_dict(ranks, target)

    def full(*_):
        yield b"half"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gopt.offline.state_values.safetensors_chunks", full)
    with pytest.raises(RunError, match="the disk is full"):
        save_state_dict(ranks, target, force=True)
    assert target.read_text() == "mine" and [each.name for each in tmp_path.iterdir()] == [target.name]


def test_the_commands(ranks, tmp_path, capsys):
    dict_file, step = str(tmp_path / "d.safetensors"), str(tmp_path / "step.onnx")
    assert main(["merge", str(ranks), "--state-dict", dict_file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state_dict"] == dict_file
    assert main(["load-state", str(MODEL), dict_file, "-o", step, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["format"] == "gopt-load-state/1" and record["loaded"] > 0
    assert main(["merge", str(ranks)]) == 2
    assert main(["merge", str(ranks), "-o", step, "--state-dict", dict_file]) == 2
    assert main(["merge", str(ranks), "-o", step, "--all-states", "--force"]) == 2
    assert main(["merge", str(ranks), "--state-dict", str(tmp_path / "d.bin")]) == 2
    assert "let its name end in .safetensors" in capsys.readouterr().err


def sharded(folder: Path, arrays: dict[str, np.ndarray], **changes) -> Path:
    """A folder of two safetensors files with an index."""
    folder.mkdir()
    names = sorted(arrays)
    files = {name: f"model-{1 + 2 * place // len(names):05d}-of-00002.safetensors" for place, name in enumerate(names)}
    for file in set(files.values()):
        written(folder / file, {name: arrays[name] for name in names if files[name] == file})
    index = {"metadata": {"total_size": 1}, "weight_map": files | changes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_an_index_of_files_goes_into_a_step(tmp_path):
    wanted = {name: value + 1 for name, value in values(MODEL).items()}
    folder = sharded(tmp_path / "hub", wanted)
    for place, state in enumerate((folder, folder / "model.safetensors.index.json")):
        loaded = load_values(MODEL, state, tmp_path / f"{place}.onnx")
        assert loaded.loaded == len(wanted) and loaded.kept == ()
        for name, value in values(tmp_path / f"{place}.onnx").items():
            np.testing.assert_array_equal(value, wanted[name])


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("../other.safetensors", "leaves the model's folder"), ("/etc/passwd", "is an absolute path"),
        ("gone.safetensors", "cannot be opened"), ("link.safetensors", "goes through a symbolic link"),
        (3, "has no weight_map"), ("model-00001-of-00002.safetensors", "has no tensor 'extra'"),
    ],
)  # fmt: skip
def test_a_file_outside_of_the_folder_of_an_index_is_refused(file, said, tmp_path):
    folder = sharded(tmp_path / "hub", values(MODEL), extra=file)
    written(tmp_path / "other.safetensors", {"extra": np.zeros(1, "f4")})
    (folder / "link.safetensors").symlink_to(tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=said):
        load_values(MODEL, folder, tmp_path / "s.onnx")


def test_a_folder_without_an_index_is_refused(tmp_path):
    with pytest.raises(InputError, match="is a folder with 0 files"):
        load_values(MODEL, tmp_path, tmp_path / "s.onnx")


def test_a_file_of_pytorch_needs_pytorch(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    for module in ("saved_values", "dcp_folder"):
        monkeypatch.delitem(sys.modules, f"gopt.frontends.pytorch.{module}", raising=False)
    (tmp_path / "a.pt").write_bytes(b"x")
    assert main(["load-state", str(MODEL), str(tmp_path / "a.pt"), "-o", str(tmp_path / "s.onnx")]) == 2
    assert "pip install 'gopt[torch]'" in capsys.readouterr().err


def test_a_step_that_may_count_samples_needs_no_answer_where_no_ranks_share_it(tmp_path):
    b = Builder()
    sgd(b, perceptron(b, (3, 5, 2)))
    b.output("seen_out", b.op("Add", b.state("seen", np.float32(3)), b.const(4.0)), ())
    step = b.save(tmp_path / "step.onnx")
    with pytest.raises(UnsupportedError, match="the size of a batch"):
        gopt.load(step)
    saved = save_state_dict(step, tmp_path / "out.safetensors", all_states=True)
    assert load_values(step, tmp_path / "out.safetensors", tmp_path / "new.onnx").loaded == saved.tensors
