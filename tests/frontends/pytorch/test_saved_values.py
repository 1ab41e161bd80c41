"""Files of ``torch.save`` into a step, and out again to the last bit. By hand, ``pytest -m torch``."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from gopt.cli.main import main  # noqa: E402
from test_state_file import TRAINED, data_of, halves, recipe, trained  # noqa: E402

import gopt  # noqa: E402
from gopt.errors import InputError  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.factory import make_recipe  # noqa: E402
from gopt.frontends.pytorch.options import ExportOptions  # noqa: E402
from gopt.ir.load import load  # noqa: E402
from gopt.verbs.folders import load_values  # noqa: E402

RANKS = 2


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def assert_same_values(one: Path, other: Path) -> None:
    left, right = load(one).initializers, load(other).initializers
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.type == right[name].type and tensor.numpy().tobytes() == right[name].numpy().tobytes(), name


FORMS = {name: (make, ExportOptions()) for name, make in TRAINED.items()} | {
    "scaled": (recipe(halves), ExportOptions(loss_scale="dynamic", ema=0.9)),
}


@pytest.mark.parametrize("steps", (0, 3))
@pytest.mark.parametrize("name", FORMS)
def test_all_states_come_back_to_the_last_bit(name, steps, tmp_path):
    make, options = FORMS[name]
    made = export(make, tmp_path / "step.onnx", options=options)
    gopt.shard(made.model, RANKS, stage=2).write(tmp_path / "ranks")
    kept = trained(tmp_path / "ranks", data_of(3), 3, tmp_path / "kept") if steps else tmp_path / "ranks"
    gopt.merge(kept, tmp_path / "wanted.onnx")
    gopt.save_state_dict(kept, tmp_path / "all.pt", all_states=True)
    loaded = load_values(made.model, tmp_path / "all.pt", tmp_path / "found.onnx")
    assert loaded.unknown == ()
    if steps:
        assert loaded.kept == ()
    assert_same_values(tmp_path / "found.onnx", tmp_path / "wanted.onnx")


@pytest.mark.parametrize("name", ("groups", "momentum", "nadam", "two", "rmsprop"))
def test_a_training_of_eager_pytorch_comes_in_by_numbers(name, tmp_path):
    """The states of two steps of PyTorch, under the usual keys, are those that gopt merges for PyTorch again."""
    made = export(TRAINED[name], tmp_path / "step.onnx")
    eager = make_recipe(TRAINED[name]())
    for step in range(2):
        batch = {key: torch.from_numpy(value[4 * step : 4 * step + 4]) for key, value in data_of(2).items()}
        for optimizer in eager.optimizers:
            optimizer.zero_grad()
        eager.loss_of(batch).backward()
        for optimizer in eager.optimizers:
            optimizer.step()
    states = [optimizer.state_dict() for optimizer in eager.optimizers]
    content = {"epoch": 3, "state_dict": eager.module.state_dict(), "optimizers": states}
    torch.save(content, tmp_path / "theirs.pth", _use_new_zipfile_serialization=name != "groups")
    assert main(["load-state", made.model, str(tmp_path / "theirs.pth"), "-o", str(tmp_path / "warm.onnx")]) == 0
    again = gopt.save_state_dict(tmp_path / "warm.onnx", tmp_path / "again.pt", all_states=True)
    found = torch.load(again.file, weights_only=True)
    back = found["optimizer"] if isinstance(found["optimizer"], list) else [found["optimizer"]]
    for one, other in zip(back, states, strict=True):
        for number, entry in other["state"].items():
            for key, value in entry.items():
                if value is not None:
                    assert torch.equal(torch.as_tensor(one["state"][number][key]), torch.as_tensor(value)), key
    for key, value in eager.module.state_dict().items():
        assert torch.equal(found["model"][key], value), key


def test_no_code_of_a_file_is_run(tmp_path):
    made = export(recipe(halves), tmp_path / "step.onnx")
    mark = tmp_path / "mark"
    (tmp_path / "raw.bin").write_bytes(pickle.dumps({"model": Runs(mark)}))
    torch.save({"model": {"head.weight": Runs(mark)}}, tmp_path / "evil.pt")
    torch.save({"a": Runs(mark)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name, said in (("evil.pt", "posix.system"), ("old.pth", "posix.system"), ("raw.bin", "is no file|system")):
        with pytest.raises(InputError, match=said):
            load_values(made.model, tmp_path / name, tmp_path / "out.onnx")
    assert not mark.exists() and not (tmp_path / "out.onnx").exists()


def test_a_damaged_file_and_one_that_does_not_fit_are_refused(tmp_path):
    made = export(recipe(halves), tmp_path / "step.onnx")
    net = recipe(halves)()[0]
    fits, file = net.state_dict(), tmp_path / "file.pt"
    optimizer = torch.optim.AdamW(net.parameters())
    cases = {
        r"'head.weight' is float16\[12,8\], the model says float32": fits | {"head.weight": fits["head.weight"].half()},
        r"the model says float32\[8\]": {"state_dict": fits | {"norm.bias": torch.zeros(9)}},
        "'heads' is not a state": {"heads": torch.zeros(2)},
        "no plain tensor": {"norm.bias": torch.zeros(8).to_sparse()},
        "has no tensors": {"epoch": 3, "nets": {"a": torch.zeros(1)}},
        "has no state dict, but list": [torch.zeros(1)],
        "groups of": {"model": fits, "optimizer": optimizer.state_dict()},
        "2 optimizers, the step 1": {"model": fits, "optimizer": [optimizer.state_dict()] * 2},
        "no optimizer.state_dict": {"model": fits, "optimizer": {"state": 3, "param_groups": 4}},
        "have two values": fits | {"head.weight": fits["head.weight"] + 1},
    }
    for said, content in cases.items():
        torch.save(content, file)
        with pytest.raises(InputError, match=said):
            load_values(made.model, file, tmp_path / "out.onnx")
    torch.save(fits | {"heads": torch.zeros(2)}, file)
    assert load_values(made.model, file, tmp_path / "out.onnx", ignore_unknown=True).unknown == ("heads",)
    whole = file.read_bytes()
    for cut in (0, 1, 50, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(InputError, match=r"is damaged|is empty"):
            load_values(made.model, file, tmp_path / "cut.onnx")
    assert not (tmp_path / "cut.onnx").exists()


def test_a_step_of_another_origin_takes_the_parameters(tmp_path):
    from helpers import FIXTURES

    model = FIXTURES / "mlp_adamw.onnx"
    name = gopt.load(model).training.parameters[0].tensor
    value = torch.from_numpy(np.array(load(model).initializers[name].numpy())) * 2
    state = {"state": {0: {"exp_avg": value}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": {name: value}, "optimizer": state}, tmp_path / "all.pt")
    with pytest.raises(InputError, match=r"'optimizer.state.0.exp_avg' is not a state"):
        load_values(model, tmp_path / "all.pt", tmp_path / "out.onnx")
    load_values(model, tmp_path / "all.pt", tmp_path / "out.onnx", ignore_unknown=True)
    np.testing.assert_array_equal(load(tmp_path / "out.onnx").initializers[name].numpy(), value.numpy())


@pytest.mark.parametrize("prefix", ("module.", "_orig_mod.", "module._orig_mod."))
def test_names_of_wrappers_are_those_of_the_module(prefix, tmp_path):
    made = export(recipe(halves), tmp_path / "step.onnx")
    values = {prefix + key: value + 1 for key, value in recipe(halves)()[0].state_dict().items()}
    torch.save({"model": values}, tmp_path / "file.pt")
    np.savez(tmp_path / "file.npz", **{key: value.numpy() for key, value in values.items()})
    for file in ("file.pt", "file.npz"):
        load_values(made.model, tmp_path / file, tmp_path / "out.onnx", force=True)
        found = gopt.save_state_dict(tmp_path / "out.onnx", tmp_path / f"{file}.back.pt").file
        for key, value in torch.load(found).items():
            assert torch.equal(value, values[prefix + key]), key
    torch.save(values | {"norm.bias": torch.zeros(8)}, tmp_path / "file.pt")
    with pytest.raises(InputError, match="is not a state"):
        load_values(made.model, tmp_path / "file.pt", tmp_path / "out.onnx", force=True)


def two_groups():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    groups = [{"params": net[0].parameters(), "lr": 1e-3}, {"params": net[1].parameters(), "betas": (0.8, 0.99)}]
    inputs = (torch.ones(2, 3), torch.ones(2))
    return net, lambda out, target: out.square().mean(), torch.optim.AdamW(groups, 3e-4), inputs


def test_options_of_the_optimizer_that_differ_from_the_steps_are_noted(tmp_path, capsys):
    made = export(two_groups, tmp_path / "step.onnx")
    net, _, optimizer, _ = two_groups()
    content = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "same.pt")
    assert load_values(made.model, tmp_path / "same.pt", tmp_path / "out.onnx").notes == ()
    optimizer.param_groups[1] |= {"lr": 1e-3, "betas": (0.9, 0.99), "fused": True}
    torch.save(content | {"optimizer": optimizer.state_dict()}, tmp_path / "other.pt")
    assert main(["load-state", made.model, str(tmp_path / "other.pt"), "-o", str(tmp_path / "new.onnx")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "lr is 0.001 in the file, 0.0003 in the step, which counts ('1.weight' and its group)" in said
    assert "betas is (0.9, 0.99) in the file, (0.8, 0.99)" in said and said.count("note:") == 2


SHORTENED = """
import os, sys
from gopt.documents.torch_record import NO_RECORD
from gopt.frontends.pytorch.saved_values import read_torch

values = read_torch(sys.argv[1], NO_RECORD, {}, [])
os.truncate(sys.argv[1], 4096)
print(sum(float(value.numpy().sum()) for value in values.values()))
"""


def test_a_file_that_is_shortened_while_it_is_read_does_not_end_the_process(tmp_path):
    torch.save({"a": torch.ones(1 << 20)}, tmp_path / "file.pt")
    done = subprocess.run([sys.executable, "-c", SHORTENED, tmp_path / "file.pt"], capture_output=True, text=True)
    assert done.returncode == 0 and float(done.stdout) == 1 << 20, done.stderr
