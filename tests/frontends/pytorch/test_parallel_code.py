"""Scripts for several processes: the hints of an export leave their wrappers out, and give a factory of the module
alone. By hand, ``pytest -m torch``."""

from __future__ import annotations

import re
import textwrap

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import gopt  # noqa: E402
from gopt.errors import OptionError  # noqa: E402
from gopt.frontends.pytorch.factory import call_factory, load_factory  # noqa: E402
from gopt.frontends.pytorch.options import ExportOptions  # noqa: E402

HEAD = """\
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, K = 4, 2

def main():
    dist.init_process_group("gloo")
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH))
"""
REST = """\
    opt = torch.optim.SGD(net.parameters(), 0.1)
    data = TensorDataset(torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler)
    for i, (x, y) in enumerate(loader):
"""
WRAPPERS = {
    "fully_shard": "for part in net:\n    fully_shard(part)\nfully_shard(net)\n",
    "a loop in a line": "for part in net: fully_shard(part)\n",
    "a result": "net = fully_shard(net)\n",
    "ddp": "net = DistributedDataParallel(net, bucket_cap_mb=1)\n",
    "fsdp": "if dist.is_initialized():\n    net = FSDP(net)\n",
    "a context": "with torch.no_grad():\n    fully_shard(net)\n",
    "an attempt": "try:\n    fully_shard(net)\nexcept ValueError:\n    print(1)\n",
    "several lines": "fully_shard(\n    net,\n    reshard_after_forward=False,\n)\n",
    "a path": "net = torch.nn.parallel.DistributedDataParallel(net)\n",
}
LOOPS = {
    "a skip": "last = (i + 1) % K == 0\nnet.set_requires_gradient_sync(last)\n"
    "loss = (net(x) - y).square().mean() / K\nloss.backward()\nif not last:\n    continue\nopt.step()\n",
    "a name": "last = (i + 1) % K == 0\nnet.set_is_last_backward(last)\n"
    "loss = (net(x) - y).square().mean() / K\nloss.backward()\nif last:\n    opt.step()\n",
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_hints_give_a_factory_of_the_module_alone(wrapper, loop, tmp_path):
    """They asked for a factory that shards the module, and their loss read the loop's count and divided by it."""
    path, text = tmp_path / "script.py", HEAD + textwrap.indent(wrapper, "    ") + REST + textwrap.indent(loop, " " * 8)
    path.write_text(text)
    with pytest.raises(OptionError) as raised:
        call_factory(load_factory(str(path)), "script")
    hints = list(raised.value.hints)
    lines = text.splitlines()
    begin, count = HEAD.count("\n") + 1, wrapper.count("\n")
    left_out = {*range(begin, begin + count)}
    left_out |= {number for number, line in enumerate(lines, 1) if line.endswith(('gloo")', "(last)"))}
    hint = next(hint for hint in hints if hint.startswith("leave out line"))
    assert set(map(int, re.findall(r"\d+", hint.partition(":")[0]))) == left_out
    assert any(
        f"sampler of processes, line {lines.index('    sampler = DistributedSampler(data)') + 1}" in hint
        for hint in hints
    )
    assert any("--accumulate 2" in hint for hint in hints)
    start, end = hints.index("def loss(net, batch):"), hints.index("    return loss")
    loss = "\n".join(hints[start : end + 1])
    assert "/ K" not in loss and "last" not in loss
    returned = next(hint for hint in hints if hint.startswith("    return net, loss, opt"))
    make = REST[: REST.index("    sampler")] + "    loader = DataLoader(data, 4)\n" + returned
    net = HEAD[HEAD.index("    net = ") :]
    path.write_text(HEAD[: HEAD.index("def main")] + f"{loss}\n\ndef make():\n{net}{make}\n")
    step = gopt.export(f"{path}:make", tmp_path / "step.onnx", options=ExportOptions(check=1))
    assert not [note for note in step.notes if note.startswith("line ")]


def test_a_factory_beside_a_sharded_training_is_told_nothing_of_it(tmp_path):
    """The note asked for a factory with ``fully_shard``."""
    path = tmp_path / "script.py"
    batch = "{'x': torch.ones(4, WIDTH), 'y': torch.ones(4, WIDTH)}"
    net = "    net = torch.nn.Linear(WIDTH, WIDTH)\n"
    made = f"def make():\n{net}    return net, loss, torch.optim.SGD(net.parameters(), 0.1), {batch}\n"
    loss = "def loss(net, batch):\n    return (net(batch['x']) - batch['y']).square().mean()\n"
    path.write_text(
        HEAD
        + textwrap.indent(WRAPPERS["fully_shard"], "    ")
        + REST
        + textwrap.indent(LOOPS["a skip"], " " * 8)
        + loss
        + made
    )
    notes = gopt.export(f"{path}:make", tmp_path / "step.onnx", options=ExportOptions(check=1)).notes
    assert not [note for note in notes if "fully_shard" in note or "gradient_sync" in note]
