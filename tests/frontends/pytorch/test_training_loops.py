"""What scripts tell of their training loops, and what comes of following it. By hand, ``pytest -m torch``."""

from __future__ import annotations

import re
import runpy
import textwrap

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from gopt.cli.main import main  # noqa: E402
from helpers import ROOT  # noqa: E402

import gopt  # noqa: E402
from gopt.errors import OptionError  # noqa: E402
from gopt.frontends.pytorch.factory import call_factory, load_factory  # noqa: E402
from gopt.frontends.pytorch.options import ExportOptions  # noqa: E402

HEAD = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(4, 4)
criterion = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 4)), batch_size=8)
def mixed(x, y):
    return x + x.flip(0), y + y.flip(0)
if __name__ == "__main__":
    for epoch in range(2):
"""
TWO = "for x, y in loader:\n"
LOOPS = {
    "a part": TWO + "    optimizer.zero_grad()\n    loss = criterion(model(x), y) + model.weight.square().sum()\n",
    "several lines": "for i, (x, _) in enumerate(loader):\n    x = x.to('cpu')\n    out = model(x)\n"
    "    loss = criterion(out.view(-1), x.view(-1))\n",
    "a mixup": TWO + "    x, y = mixed(x, y)\n    loss = criterion(model(x), y)\n",
    "one name": "for batch in loader:\n    loss = criterion(model(batch[0]).relu(), batch[1])\n",
}  # fmt: skip
PLAIN = {
    "at once": TWO + "    loss = criterion(model(x), y)\n",
    "moved": TWO + "    x, y = x.to('cpu'), y.to('cpu')\n    out = model(x)\n    loss = criterion(out, y)\n",
    "unpacked": "for i, data in enumerate(loader, 0):\n    x, y = data\n    out = model(x)\n"
    "    loss = criterion(out, y)\n",
}  # fmt: skip


def script(folder, loop, end="    loss.backward()\n    optimizer.step()\n"):
    path = folder / "script.py"
    path.write_text(HEAD + textwrap.indent(loop + end, " " * 8))
    return path


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_loss_of_more_than_output_and_target_is_told_by_its_lines(loop, tmp_path):
    """The script was exported without what its lines do beside the criterion, or its TypeError was shown."""
    path = script(tmp_path, loop)
    with pytest.raises(OptionError, match=r"computes its loss in lines \d+ to \d+") as raised:
        call_factory(load_factory(str(path)), "script")
    hints = list(raised.value.hints)
    begin = hints.index("def loss(model, batch):")
    loss = hints[begin : next(i for i in range(begin, len(hints)) if hints[i].startswith("    return")) + 1]
    assert not any("optimizer" in line for line in loss)
    start = hints.index("def make():")
    made = hints[start : next(i for i in range(start, len(hints)) if "return" in hints[i]) + 1]
    path.write_text("\n".join([path.read_text(), *loss, *made, ""]))
    exported = gopt.export(f"{path}:make", tmp_path / "step.onnx", options=ExportOptions(check=1))
    assert exported.states == 2


@pytest.mark.parametrize("loop", PLAIN.values(), ids=PLAIN)
def test_a_loss_of_output_and_target_needs_no_function(loop, tmp_path):
    recipe = call_factory(load_factory(str(script(tmp_path, loop))), "script")
    assert isinstance(recipe.loss, torch.nn.MSELoss)


CLIP = "nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)"


@pytest.mark.parametrize(("options", "told"), [(ExportOptions(check=1), 1), (ExportOptions(check=1, clip_norm=0.5), 0)])
def test_a_clip_that_the_step_lacks_is_told(options, told, tmp_path):
    """The step trained without the clip of the script's loop, and nothing said so."""
    path = script(tmp_path, PLAIN["at once"], f"    loss.backward()\n    {CLIP}\n    optimizer.step()\n")
    notes = gopt.export(str(path), tmp_path / "step.onnx", options=options).notes
    assert sum("gopt export --clip-norm 0.5" in note for note in notes) == told


def test_a_step_of_several_backwards_is_told(tmp_path):
    end = "    loss.backward()\n    if (i + 1) % 4 == 0:\n        optimizer.step()\n"
    path = script(tmp_path, PLAIN["unpacked"], end)
    notes = gopt.export(str(path), tmp_path / "step.onnx", options=ExportOptions(check=1)).notes
    assert any("gopt shard --accumulate 4" in note for note in notes)


GAN = """\
import torch
from torch import nn
first, second = nn.Linear(2, 2), nn.Linear(2, 1)
one = torch.optim.SGD(first.parameters(), 0.1)
two = torch.optim.Adam(second.parameters(), 0.2)
for data in [torch.ones(3, 2)]:
    loss = first(data).sum()
    loss.backward()
    one.step()
    other = second(data).sum()
    other.backward()
    two.step()
"""


def test_several_optimizers_are_told_together(tmp_path):
    """The lines had the first of them alone, and a loss that was not the script's."""
    path = tmp_path / "script.py"
    path.write_text(GAN)
    with pytest.raises(OptionError, match="trains while it is imported") as raised:
        load_factory(str(path))
    line = next(hint for hint in raised.value.hints if "return" in hint)
    assert "torch.nn.ModuleDict(dict(first=first, second=second)), loss, [one, two], " in line


def test_the_networks_of_the_page_train_at_once(tmp_path):
    """What the page says of two networks: each loss trains its own, from the old values of both."""
    page = (ROOT / "docs/export.md").read_text(encoding="utf-8")
    path = tmp_path / "gan.py"
    path.write_text(re.search(r"```python\n# gan.py\n(.*?)```", page, re.S).group(1))
    step = str(tmp_path / "step.onnx")
    assert main(["export", f"{path}:make", "-o", step]) == 0
    assert main(["shard", step, "--ranks", "4", "-o", str(tmp_path / "ranks")]) == 0
    assert main(["verify", str(tmp_path / "ranks")]) == 0
    code = runpy.run_path(str(path))
    module, loss, _, batch = code["make"]()
    parts = loss(module, batch)
    for (name, net), part in zip(module.items(), ("loss_g", "loss_d"), strict=True):
        own = list(net.parameters())
        together = torch.autograd.grad(parts["loss"], own, retain_graph=True)
        alone = torch.autograd.grad(parts[part], own, retain_graph=True)
        assert all(map(torch.equal, together, alone)), name


CRITIC = GAN.replace("    other.backward()\n", "    other.backward()\n    if i % 5 == 0:\n    ")


def test_an_optimizer_that_moves_at_other_times_is_told(tmp_path):
    """A critic's five steps for one of the generator's were told as --accumulate 5."""
    path = tmp_path / "script.py"
    path.write_text(CRITIC)
    with pytest.raises(OptionError) as raised:
        load_factory(str(path))
    assert sum("line 12 moves two at other times" in hint for hint in raised.value.hints) == 1
    assert not any("--accumulate" in hint for hint in raised.value.hints)
