"""Folders of ``torch.distributed.checkpoint`` into a step and out of ranks, with FSDP2 on two processes. By hand,
``pytest -m torch``."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from gopt.cli.main import main  # noqa: E402
from test_saved_values import Runs, assert_same_values  # noqa: E402
from test_state_file import TRAINED, data_of, halves, recipe, trained  # noqa: E402
from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: E402
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict  # noqa: E402

import gopt  # noqa: E402
from gopt.errors import InputError, OptionError, RunError  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.ir.load import load  # noqa: E402
from gopt.verbs.folders import load_values, save_dcp  # noqa: E402

FSDP = """
import os
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
for layer in (net[0], net[2], net):
    fully_shard(layer)
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)

def step():
    net(torch.full((4, 5), 1.0 + dist.get_rank())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

mode, folder = sys.argv[1:]
if mode == "write":
    step()
    step()
model, optim = get_state_dict(net, optimizer)
if mode == "write":
    titan = {f"optimizer.state.{name}.{key}": value for name, entry in optim["state"].items()
             for key, value in entry.items()}
    dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)
    dcp.save({**model, **titan, "train_state": {"step": 2}}, checkpoint_id=folder + ".titan")
else:
    dcp.load({"model": model, "optim": optim}, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=optim)
    step()
    dcp.save(dict(zip(("model", "optim"), get_state_dict(net, optimizer))), checkpoint_id=folder + ".next")
dist.destroy_process_group()
os._exit(0)  # threads of PyTorch 2.13 abort one exit in about ten
"""


def fsdp(mode: str, folder: Path) -> None:
    script = folder.parent / "fsdp.py"
    script.write_text(FSDP)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, mode, str(folder)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def mlp():
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    return (
        net,
        lambda out, target: out.square().mean(),
        torch.optim.AdamW(net.parameters(), 1e-2),
        (torch.ones(4, 5), torch.ones(4)),
    )


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """What PyTorch reads in a folder with one process."""
    whole = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    wanted = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in whole.items()
        if hasattr(entry, "size")
    }
    dcp.load(wanted, checkpoint_id=folder, no_dist=True)
    return wanted


def test_fsdp_and_gopt_exchange_a_training(tmp_path):
    made, folder = export(mlp, tmp_path / "step.onnx"), tmp_path / "theirs"
    fsdp("write", folder)
    theirs = tensors_of(folder)
    for place in ("theirs", "theirs.titan"):
        warm = tmp_path / f"{place}.onnx"
        loaded = load_values(made.model, tmp_path / place, warm)
        assert loaded.kept == () and loaded.unknown == ()
        save_dcp(warm, tmp_path / f"{place}.back", all_states=True)
        back = tensors_of(tmp_path / f"{place}.back")
        assert back.keys() == theirs.keys()
        assert all(torch.equal(back[key], value) for key, value in theirs.items())
    for place in (folder, tmp_path / "theirs.back"):
        fsdp("read", place)
    one, other = tensors_of(tmp_path / "theirs.next"), tensors_of(tmp_path / "theirs.back.next")
    assert all(torch.equal(other[key], value) for key, value in one.items())
    (folder / "__1_0.distcp").unlink()
    with pytest.raises(InputError, match="cannot be opened"):
        load_values(made.model, folder, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("flat", (False, True))
def test_names_of_wrappers_and_other_options_come_in(flat, tmp_path):
    made, (net, _, optimizer, inputs) = export(mlp, tmp_path / "step.onnx"), mlp()
    wrapped = torch.nn.Sequential()
    wrapped.module = net
    net(inputs[0]).square().mean().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-3
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optim = get_state_dict(wrapped, optimizer, options=options)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    loaded = load_values(made.model, tmp_path / "theirs", tmp_path / "warm.onnx")
    assert loaded.kept == () and loaded.unknown == ()
    assert loaded.notes == ("lr is 0.001 in the file, 0.01 in the step, which counts ('0.weight' and its group)",)
    found = load(tmp_path / "warm.onnx").initializers
    for name, value in net.state_dict().items():
        assert torch.equal(torch.tensor(found[name].numpy()), value), name


@pytest.mark.parametrize("name", ("groups", "momentum", "two", "cosine"))
def test_all_states_come_back_to_the_last_bit(name, tmp_path):
    made = export(TRAINED[name], tmp_path / "step.onnx")
    gopt.shard(made.model, 2).write(tmp_path / "ranks")
    kept = trained(tmp_path / "ranks", data_of(2), 2, tmp_path / "kept")
    gopt.merge(kept, tmp_path / "wanted.onnx")
    assert main(["merge", str(kept), "--dcp", str(tmp_path / "dcp"), "--all-states"]) == 0
    assert load_values(made.model, tmp_path / "dcp", tmp_path / "found.onnx").kept == ()
    assert_same_values(tmp_path / "found.onnx", tmp_path / "wanted.onnx")


def test_a_folder_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    made = export(recipe(halves), tmp_path / "step.onnx")
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(OptionError, match="exists already"):
        save_dcp(made.model, folder)
    folder.rmdir()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "finish", full)
    with pytest.raises(RunError, match="the disk is full"):
        save_dcp(made.model, folder)
    assert {each.name for each in tmp_path.iterdir()} == {"step.onnx"}


def test_no_code_of_a_folder_is_run(tmp_path):
    made, mark, folder = export(recipe(halves), tmp_path / "step.onnx"), tmp_path / "mark", tmp_path / "dcp"
    save_dcp(made.model, folder)
    whole = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(mark)))
    with pytest.raises(InputError, match=r"'posix\.system', which is no part of metadata"):
        load_values(made.model, folder, tmp_path / "out.onnx")
    for cut in (0, 7, len(whole) // 2, len(whole) - 1):
        (folder / ".metadata").write_bytes(whole[:cut])
        with pytest.raises(InputError, match="or is damaged"):
            load_values(made.model, folder, tmp_path / "out.onnx")
    (folder / ".metadata").write_bytes(whole)
    data = folder / "__0_0.distcp"
    values = data.read_bytes()
    data.write_bytes(values[: len(values) // 2])
    with pytest.raises(InputError, match="does not hold"):
        load_values(made.model, folder, tmp_path / "out.onnx")
    data.write_bytes(bytes(len(values)))
    with pytest.raises(InputError, match="is damaged"):
        load_values(made.model, folder, tmp_path / "out.onnx")
    data.unlink()
    shutil.copy(made.model, tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="symbolic link"):
        load_values(made.model, folder, tmp_path / "out.onnx")
    assert not mark.exists() and not (tmp_path / "out.onnx").exists()


def test_names_and_types_that_do_not_fit_are_refused(tmp_path):
    made = export(recipe(halves), tmp_path / "step.onnx")
    for number, (said, content) in enumerate({
        "'model.heads' is not a state": {"model": {"heads": torch.zeros(2)}},
        r"is float16\[8\], the model says float32": {"model": {"norm.bias": torch.zeros(8).half()}},
        "'optim.state.norm.bias.odd' is not a state": {"optim": {"state": {"norm.bias": {"odd": torch.zeros(8)}}}},
        "has no 'step' of 'norm.bias'": {"optim": {"state": {"norm.bias": {"exp_avg": torch.zeros(8)}}}},
    }.items()):  # fmt: skip
        folder = tmp_path / f"dcp{number}"
        dcp.save(content, storage_writer=FileSystemWriter(folder), no_dist=True)
        with pytest.raises(InputError, match=said):
            load_values(made.model, folder, tmp_path / "out.onnx")
