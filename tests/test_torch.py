"""``gopt.torch``: ranks in a loop of the user's own, under torchrun, beside the same steps of ``gopt run``."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import FIXTURES
from onnx import TensorProto, helper

import gopt
from gopt.errors import InputError, OptionError, RunError

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

LONG = 3600
"""Seconds after which something hangs, however slow the machine is."""
LOOP = """
import sys
import numpy as np
import onnx
import torch
from torch.utils.data import DataLoader, TensorDataset
import gopt.torch

folder, data, out = sys.argv[1:]
arrays = np.load(data)
dataset = TensorDataset(*(torch.from_numpy(arrays[name]) for name in ("x", "y")))
rank = gopt.torch.load(folder, compiled=False, deadline=3600)
for batch in DataLoader(dataset, batch_size=8, sampler=rank.sampler(dataset, shuffle=False)):
    losses = rank.step(batch, lr=0.01)
before = rank.full_states()
rank.save(out + "/gopt")
rank.save_dcp(out + "/dcp")
for load in (lambda: rank.load(out + "/gopt"), lambda: rank.load_dcp(out + "/dcp")):
    rank.step(batch, lr=0.01)
    assert any(not torch.equal(value, before[name]) for name, value in rank.full_states().items())
    load()
    assert rank.steps == 8
    assert all(torch.equal(value, before[name]) for name, value in rank.full_states().items())
module = rank.full_state_dict()
if rank.number == 0:
    torch.save({"states": before, "module": module, "loss": losses["loss"]}, out + "/found.pt")
"""


def samples(folder: Path) -> Path:
    random = np.random.default_rng(0)
    x, y = random.standard_normal((128, 32), np.float32), random.integers(0, 10, 128)
    np.savez(folder / "samples.npz", x=x, y=y)
    return folder / "samples.npz"


def torchrun(script: Path, ranks: int, *arguments: object, restarts: int = 0) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3}])
def test_a_loop_of_the_users_own_trains_as_gopt_run_does(options, tmp_path):
    folder, data = tmp_path / "step.ranks", samples(tmp_path)
    gopt.shard(str(FIXTURES / "mlp_adamw.onnx"), 2, **options).write(folder)
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    torchrun(script, 2, folder, data, tmp_path)
    found = torch.load(tmp_path / "found.pt")
    # The sampler deals single samples to ranks in turn, gopt run whole batches.
    arrays = np.load(data)
    dealt = {name: arrays[name].reshape(8, 8, 2, *arrays[name].shape[1:]).swapaxes(1, 2) for name in arrays}
    batches = [{name: array[step, part] for name, array in dealt.items()} for step in range(8) for part in range(2)]
    run = gopt.run(folder, batches, 8, settings={"lr": 0.01})
    for name, value in run.states.items():
        np.testing.assert_allclose(found["states"][name].numpy(), value, rtol=1e-4, atol=1e-6, err_msg=name)
    assert found["module"].keys() <= found["states"].keys()


ALIKE = """
import sys
import torch
import gopt.torch
from gopt.errors import GoptError

folder, way, out = sys.argv[1:]
rank = gopt.torch.load(folder, compiled=False, deadline=3600)
torch.manual_seed(rank.number if way in ("lr", "batch") else 0)
try:
    for step in range(6):
        batch = torch.randn(8, 32), torch.randint(0, 10, (8,))
        rank.step(batch, lr=torch.tensor(0.01) / (1 + rank.number * (way == "lr" and step == 2)))
    rank.save(out + "/ckpt")
    message = "none"
except GoptError as error:
    message = str(error)
with open(f"{out}/{rank.number}.txt", "w") as file:
    print(rank.steps, message, file=file)
"""


@pytest.mark.parametrize(
    ("mesh", "way", "message"),
    [
        ("shard=2", "lr", "3 ranks 0 and 1 had unequal hyper-parameters in a step before this"),
        ("tp=2", "batch", "0 ranks 0 and 1 compute a batch together, and were given unequal batches"),
        ("tp=2", "alike", "6 none"), ("shard=2", "alike", "6 none"),
    ],
)  # fmt: skip
def test_ranks_that_are_fed_unlike_are_refused_before_a_checkpoint(mesh, way, message, tmp_path):
    (tmp_path / "alike.py").write_text(ALIKE)
    gopt.shard(str(FIXTURES / "mlp_adamw.onnx"), mesh).write(tmp_path / "step.ranks")
    told = torchrun(tmp_path / "alike.py", 2, tmp_path / "step.ranks", way, tmp_path)
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text().startswith(message)
    assert (tmp_path / "ckpt").exists() is (way == "alike")
    assert told.count("all ranks were given the same batch") == (way == "alike" and mesh == "shard=2")


KILLED = """
import os
import signal
import sys
import torch
import gopt.torch
from gopt.errors import OptionError

folder, out, kill = sys.argv[1:]
rank = gopt.torch.load(folder, compiled=False, deadline=3600)
try:
    rank.load(out + "/ckpt")
except OptionError:
    pass
begun = rank.steps
random = torch.Generator().manual_seed(5)
data = [(torch.randn(2, 8, 32, generator=random), torch.randint(0, 10, (2, 8), generator=random)) for _ in range(6)]
while rank.steps < 6:
    x, y = data[rank.steps]
    if begun == 0 and rank.steps == 3 and rank.number == int(kill):
        os.kill(os.getpid(), signal.SIGKILL)
    rank.step((x[rank.number], y[rank.number]), lr=0.01 / (1 + rank.steps))
    if rank.steps % 2 == 0:
        rank.save(out + "/ckpt")
states = rank.full_states()
if rank.number == 0:
    torch.save({"states": states, "begun": begun}, out + "/end.pt")
"""


def test_a_killed_rank_is_started_again_and_ends_with_the_same_bits(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    gopt.shard(str(FIXTURES / "mlp_adamw.onnx"), 2, stage=3).write(tmp_path / "step.ranks")
    ends = {}
    for kill in (9, 1):
        (out := tmp_path / str(kill)).mkdir()
        torchrun(tmp_path / "killed.py", 2, tmp_path / "step.ranks", out, kill, restarts=1)
        ends[kill] = torch.load(out / "end.pt")
    assert (ends[9]["begun"], ends[1]["begun"]) == (0, 2)
    assert all(torch.equal(value, ends[1]["states"][name]) for name, value in ends[9]["states"].items())


def dropout():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4))
    batch = torch.randn(4, 8), torch.randint(0, 4, (4,))
    return module, torch.nn.functional.cross_entropy, torch.optim.SGD(module.parameters(), 0.1), batch


def test_random_numbers_are_drawn_by_the_rank_and_no_input_of_a_batch(tmp_path):
    gopt.export(dropout, tmp_path / "step.onnx")
    gopt.shard(tmp_path / "step.onnx", 1).write(tmp_path / "ranks")
    from gopt.torch import load

    rank = load(tmp_path / "ranks", compiled=False)
    assert [*rank.inputs] == ["input", "target"]
    assert torch.isfinite(rank.step((torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)))["loss"])
    torch.distributed.destroy_process_group()


DCP = """
import sys
import torch
import gopt.torch

folder, out, way = sys.argv[1:]
rank = gopt.torch.load(folder, compiled=False, deadline=3600)
if way == "save":
    rank.step((torch.randn(8, 32), torch.randint(0, 10, (8,))), lr=0.01)
    rank.save_dcp(out + "/dcp")
else:
    rank.load_dcp(out + "/dcp")
    assert rank.steps == 1
states = rank.full_states()
if rank.number == 0:
    torch.save(states, f"{out}/{way}.pt")
"""


def test_pieces_of_two_ranks_are_read_by_three(tmp_path):
    script = tmp_path / "dcp.py"
    script.write_text(DCP)
    for ranks, way in ((2, "save"), (3, "load")):
        gopt.shard(str(FIXTURES / "mlp_adamw.onnx"), ranks, stage=3).write(tmp_path / way)
        torchrun(script, ranks, tmp_path / way, tmp_path, way)
    before, behind = (torch.load(tmp_path / f"{way}.pt") for way in ("save", "load"))
    assert before.keys() == behind.keys() and all(torch.equal(before[name], behind[name]) for name in before)
    whole = sum(value.nbytes for value in before.values())
    reader = pytest.importorskip("torch.distributed.checkpoint").FileSystemReader(tmp_path / "dcp")
    stored = reader.read_metadata().storage_data
    for rank in range(2):  # a rank writes its pieces alone
        mine = sum(entry.length for entry in stored.values() if entry.relative_path.startswith(f"__{rank}_"))
        frames = 2000 * len(stored)
        assert 0.4 * whole < mine < 0.6 * whole + frames


LEFT = """
import atexit, os, sys
import torch
import torch.distributed as dist

def threads():
    tasks = os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ()
    return sum("gloo" in open(f"/proc/self/task/{task}/comm").read() for task in tasks)

atexit.register(lambda: open(f"{sys.argv[2]}.{rank.number}", "w").write(f"{dist.is_initialized()} {threads()}"))
import gopt.torch
rank = gopt.torch.load(sys.argv[1], compiled=False, deadline=3600)
torch.manual_seed(0)
mesh = rank.device_mesh
rank.step((torch.randn(8, 32), torch.randint(0, 10, (8,))), lr=0.01)
rank.full_states()
assert dist.is_initialized()
assert threads() or not os.path.isdir("/proc/self/task")
"""


@pytest.mark.parametrize("mesh", ["shard=2", "dp=1,shard=2", "pp=2"])
def test_a_script_that_ends_leaves_the_groups_it_did_not_start_itself(mesh, tmp_path):
    """No thread of a group outlives the interpreter, though the script still has its rank: a thread that is late would
    give a tensor back to Python then, and abort the process."""
    gopt.shard(str(FIXTURES / "mlp_adamw.onnx"), mesh).write(tmp_path / "step.ranks")
    script = tmp_path / "left.py"
    script.write_text(LEFT)
    torchrun(script, 2, tmp_path / "step.ranks", tmp_path / "left")
    assert [(tmp_path / f"left.{rank}").read_text() for rank in range(2)] == ["False 0", "False 0"]


@pytest.fixture
def rank(tmp_path):
    gopt.shard(str(FIXTURES / "mlp_adamw.onnx"), 1).write(tmp_path / "step.ranks")
    from gopt.torch import load

    yield load(tmp_path / "step.ranks")
    torch.distributed.destroy_process_group()


X, Y = torch.randn(8, 32), torch.randint(0, 10, (8,))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((X[:3], Y[:3]), "has shape"), ({"x": X, "z": Y}, "no batch input 'z'"), ({"x": X}, "the batch has no 'y'"),
        ((Y.reshape(8, 1).expand(8, 32), Y), "is int64, the step takes float32"), ((X, Y.float()), "is float32"),
        (X, "the batch has 1 value"), (None, "the batch has 1 value"), ({"x": X, "y": None}, "'y' is no tensor"),
        ({"x": [[1.0, 2.0], [3.0]], "y": Y}, "'x' is no tensor"), ((X, ["a"] * 8), "'y' is no tensor"),
    ],
)  # fmt: skip
def test_batches_that_do_not_fit_are_refused(rank, batch, message):
    with pytest.raises(InputError, match=message):
        rank.step(batch, lr=0.01)
    assert rank.steps == 0


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({}, "needs a value for 'lr'"), ({"lr": None}, "'lr' is None"), ({"lr": "0.01"}, "'lr' is '0.01'"),
        ({"lr": torch.ones(2)}, "tensor of shape"), ({"lr": 0.01, "l_r": 0.01}, "'l_r' is not a hyper-parameter"),
        ({"lr": -0.1}, "'lr' is -0.1"), ({"lr": float("nan")}, "'lr' is nan"),
    ],
)  # fmt: skip
def test_hyper_parameters_that_are_no_numbers_are_refused(rank, hyper, message):
    with pytest.raises(OptionError, match=message) as refused:
        rank.step((X, Y), **hyper)
    assert refused.value.hints and [note[:6] for note in refused.value.__notes__] == ["hint: "] * len(
        refused.value.hints
    )


def test_a_short_last_batch_is_told_how_to_be_left_out(rank):
    samples = torch.utils.data.TensorDataset(torch.randn(11, 32), torch.randint(0, 10, (11,)))
    with pytest.raises(InputError, match="has shape") as refused:
        for batch in torch.utils.data.DataLoader(samples, batch_size=8, sampler=rank.sampler(samples)):
            rank.step(batch, lr=0.01)
    assert rank.steps == 1
    assert "drop_last=True" in str(refused.value.hints)
    with pytest.raises(OptionError, match="no length"):
        rank.sampler(iter(samples))


def test_a_step_is_the_same_in_every_mode_of_pytorch(rank, tmp_path):
    rank.save(tmp_path / "ckpt")

    def state(mode, x=X, y=Y, lr=0.01) -> dict[str, object]:
        rank.load(tmp_path / "ckpt")
        with mode:
            for _ in range(2):
                rank.step({"x": x, "y": y}, lr=lr)
        rank.step((X, Y), lr=0.01)
        return rank.full_states()

    due = state(contextlib.nullcontext())
    for found in (
        state(torch.no_grad()), state(torch.inference_mode()), state(torch.autocast("cpu", torch.bfloat16)),
        state(contextlib.nullcontext(), X.double(), Y.int(), torch.tensor(0.01, requires_grad=True)),
        state(contextlib.nullcontext(), X.clone().requires_grad_(), Y.numpy()),
    ):  # fmt: skip
        assert all(torch.equal(value, due[name]) for name, value in found.items())


def test_checkpoints_that_are_none_are_refused(rank, tmp_path):
    """The error of ``torch.distributed.checkpoint`` is no Exception: no handler of a user would see it."""
    with pytest.raises(OptionError, match="has no checkpoint"):
        rank.load(tmp_path / "ckpt")
    with pytest.raises(OptionError, match="has no checkpoint of torch"):
        rank.load_dcp(tmp_path / "ckpt")
    with pytest.raises(OptionError, match="keep is 0"):
        rank.save(tmp_path / "ckpt", keep=0)
    rank.save_dcp(tmp_path / "dcp")
    with pytest.raises(OptionError, match="has no checkpoint") as refused:
        rank.load(tmp_path / "dcp")
    assert "rank.load_dcp reads it" in str(refused.value.hints)
    torch.distributed.checkpoint.save({"states": {}, "steps": 1}, checkpoint_id=str(tmp_path / "other"))
    with pytest.raises(InputError, match="cannot read"):
        rank.load_dcp(tmp_path / "other")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write checkpoint"):
        rank.save_dcp(tmp_path / "file")


@pytest.mark.parametrize("name", ["banana", "meta", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(rank, name):
    from gopt.torch import load

    with pytest.raises(OptionError, match=f"there is no device {name}"):
        load(rank._rank.folder, device=name)


def test_without_an_evaluation_model_there_is_nothing_to_evaluate(rank):
    with pytest.raises(OptionError, match="no model to evaluate"):
        rank.evaluate((X, Y))


def test_an_evaluation_is_of_the_present_states(rank, tmp_path):
    weight = next(state for state in rank.manifest.states if state.kind.value == "parameter")
    nodes = [
        helper.make_node("ReduceSum", [weight.tensor], ["sum"], keepdims=0),
        helper.make_node("ReduceMean", ["x"], ["mean"], keepdims=0), helper.make_node("Add", ["sum", "mean"], ["loss"]),
    ]  # fmt: skip
    shapes = {"x": [8, 32], "loss": [], weight.tensor: weight.shape}
    infos = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    body = helper.make_graph(nodes, "eval", [infos["x"], infos[weight.tensor]], [infos["loss"]])
    onnx.save(
        helper.make_model(body, opset_imports=[helper.make_opsetid("", 13)], ir_version=9), tmp_path / "eval.onnx"
    )
    from gopt.torch import load

    rank = load(tmp_path / "step.ranks", evaluation=tmp_path / "eval.onnx")
    x, y = torch.randn(8, 32), torch.randint(0, 10, (8,))

    def agrees() -> float:
        found, states = float(rank.evaluate({"x": x})["loss"]), rank.full_states()
        assert found == pytest.approx(float(states[weight.tensor].sum() + x.mean()), rel=1e-4, abs=1e-4)
        return found

    rank.save_dcp(tmp_path / "begun")
    rank.step((x, y), lr=0.5)
    rank.save(tmp_path / "ckpt")
    rank.load_dcp(tmp_path / "begun")
    rank.step((x, y), lr=0.01)
    before = agrees()
    rank.load(tmp_path / "ckpt")  # as many steps behind other states
    assert agrees() != before
