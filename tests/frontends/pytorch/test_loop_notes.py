"""What a training loop does beside its step is told by line, with the option that does it. By hand, ``pytest -m
torch``."""

from __future__ import annotations

import textwrap

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import gopt  # noqa: E402
from gopt.errors import OptionError  # noqa: E402
from gopt.frontends.pytorch.factory import call_factory, load_factory  # noqa: E402
from gopt.frontends.pytorch.options import Autocast, ExportOptions  # noqa: E402

HEAD = """\
import copy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(4, 4)
criterion = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 4)), batch_size=8)
"""
FORWARD = "optimizer.zero_grad()\nout = model(x)\nloss = criterion(out, y)\n"
BACKWARD = "loss.backward()\n"
STEP = "optimizer.step()\n"
CAST = "with torch.autocast({}):\n    out = model(x)\n    loss = criterion(out, y)\n"
SCALED = "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()\n"
SCALER = "scaler = torch.amp.GradScaler()\n"
EMA = "ema = copy.deepcopy(model)\n"
BETWEEN = "with torch.no_grad():\n    for e, p in zip(ema.parameters(), model.parameters()):\n        {}\n"
CLASS = """\
class Average:
    def __init__(self, model):
        self.shadow = {k: v.clone() for k, v in model.state_dict().items()}
    def update(self, model):
        for k, v in model.state_dict().items():
            self.shadow[k] = 0.9 * self.shadow[k] + 0.1 * v
average = Average(model)
"""
OWN = """\
class Own(torch.optim.Optimizer):
    def step(self):
        m.mul_(0.9).add_(g, alpha=0.1)
"""
WHOLE = FORWARD + BACKWARD + STEP
NOTED = {
    "autocast": ("", CAST.format("'cuda'") + BACKWARD + STEP, "gopt export --autocast fp16"),
    "autocast in bfloat16": ("", CAST.format("'cuda', dtype=torch.bfloat16") + BACKWARD + STEP, "--autocast bf16"),
    "a context": ("ctx = torch.autocast('cpu')\n", CAST.replace("torch.autocast({})", "ctx") + BACKWARD + STEP,
                  "--autocast bf16"),
    "a scaler": (SCALER, FORWARD + SCALED, "--loss-scale dynamic"),
    "a clip": ("", FORWARD + BACKWARD + "nn.utils.clip_grad_norm_(model.parameters(), 2)\n" + STEP, "--clip-norm 2"),
    "turns of an option": ("import argparse\nparser = argparse.ArgumentParser()\n"
                           "parser.add_argument('-k', '--micro-steps', type=int, default=4)\n"
                           "args = parser.parse_args([])\n",
                           FORWARD + BACKWARD + "if (i + 1) % args.micro_steps == 0:\n    " + STEP,
                           "--accumulate 4"),
    "a clip by hand": ("", FORWARD + BACKWARD + "for p in model.parameters():\n    p.grad.data.clamp_(-3, 3)\n" + STEP,
                       "--clip-value 3"),
    "turns": ("", FORWARD + "(loss / 4).backward()\nif (i + 1) % 4 == 0:\n    optimizer.step()\n", "--accumulate 4"),
    "turns of a name": ("often = 4\n", FORWARD + "loss.backward()\nif i % often == 0:\n    optimizer.step()\n",
                        "--accumulate 4"),
    "a clip of a name": ("bound: float\nbound = 2.0\n", FORWARD + BACKWARD
                         + "nn.utils.clip_grad_norm_(model.parameters(), bound)\n" + STEP, "--clip-norm 2.0"),
    "a clip of a changing name": ("bound = 2.0\nbound = 3.0\n", FORWARD + BACKWARD
                         + "nn.utils.clip_grad_norm_(model.parameters(), bound)\n" + STEP, "--clip-norm bound"),
    "turns of a scaler": (
        SCALER, FORWARD + "scaler.scale(loss).backward()\nif i % 8 == 0:\n    scaler.step(optimizer)\n",
        "--accumulate 8",
    ),
    "an inner loop": ("", "for part in range(3):\n    loss = criterion(model(x), y)\n    loss.backward()\n" + STEP,
                      "--accumulate 3"),
    "mul and add": (EMA, WHOLE + BETWEEN.format("e.mul_(0.9).add_(p, alpha=0.1)"), "--ema DECAY, here 0.9"),
    "mul, then add": (EMA, WHOLE + BETWEEN.format("e.mul_(d)\n        e.add_(p, alpha=1 - d)"), "--ema DECAY, here d"),
    "lerp": (EMA, WHOLE + BETWEEN.format("e.lerp_(p, 1 - d)"), "--ema DECAY, here d"),
    "copy": (EMA, WHOLE + BETWEEN.format("e.copy_(d * e + (1 - d) * p)"), "--ema DECAY, here d"),
    "data": (EMA, WHOLE + BETWEEN.format("e.data = d * e.data + (1 - d) * p.data"), "--ema DECAY, here d"),
    "a class": (CLASS, WHOLE + "average.update(model)\n", "--ema DECAY, here 0.9"),
    "torch's": ("from torch.optim.swa_utils import AveragedModel\nswa = AveragedModel(model)\n",
                WHOLE + "swa.update_parameters(model)\n", "--ema DECAY"),
    "bounded weights": ("", WHOLE + "for p in model.parameters():\n    p.data.clamp_(-1, 1)\n", "which lacks it"),
    "a function": ("def project(net): pass\n", WHOLE + "if i > 3:\n    project(model)\n", "which lacks it"),
    "scaled gradients": ("", FORWARD + BACKWARD + "for p in model.parameters():\n    p.grad *= 2\n" + STEP,
                         "which lacks it"),
}  # fmt: skip
SILENT = {
    "a step": ("", WHOLE),
    "empty gradients": ("", "for p in model.parameters():\n    p.grad = None\n" + WHOLE),
    "zeroed gradients": ("", "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.zero_()\n"
                         + WHOLE),
    "a smooth loss": ("shown = 0.0\n", WHOLE + "shown = 0.9 * shown + 0.1 * loss.item()\n"),
    "what is shown": ("", "model.train()\n" + WHOLE
                      + "hits = (out.argmax(1) == y.argmax(1)).sum()\nprint(i, loss.item())\n"),
    "a checkpoint": ("", WHOLE + "if i % 1000 == 999:\n    torch.save(model.state_dict(), 'model.pt')\n"),
    "autocast that is off": ("", CAST.format("'cuda', enabled=False") + BACKWARD + STEP),
    "an optimizer's average": (OWN, WHOLE),
    "a skip behind the step": ("", WHOLE + "if i % 10:\n    continue\nprint(i)\n"),
}  # fmt: skip


def script(folder, before, loop):
    text = HEAD + before + "if __name__ == '__main__':\n    for i, (x, y) in enumerate(loader):\n"
    path = folder / "script.py"
    path.write_text(text + textwrap.indent(loop, " " * 8))
    return path


def notes(path, **options):
    told = gopt.export(
        str(path), path.with_suffix(".onnx"), force=True, options=ExportOptions(check=1, **options)
    ).notes
    return [note for note in told if note.startswith("line ")]


@pytest.mark.parametrize(("before", "loop", "told"), NOTED.values(), ids=NOTED)
def test_work_of_a_loop_that_the_step_lacks_is_told(before, loop, told, tmp_path):
    """The step was written without it, and nothing said so."""
    path = script(tmp_path, before, loop)
    try:
        found = notes(path)
    except OptionError as error:
        found = [hint for hint in error.hints if hint.startswith("line ")]
    assert sum(told in note for note in found) == 1, found
    lines = path.read_text().splitlines()
    line = lines[int(next(note for note in found if told in note).split()[1]) - 1]
    assert line.strip() and "import" not in line


@pytest.mark.parametrize(("before", "loop"), SILENT.values(), ids=SILENT)
def test_a_loop_of_a_step_alone_is_told_nothing(before, loop, tmp_path):
    assert notes(script(tmp_path, before, loop)) == []


@pytest.mark.parametrize(
    ("words", "options"),
    [("autocast", {"autocast": Autocast.BF16}), ("a scaler", {"loss_scale": 4.0}), ("a clip", {"clip_norm": 2.0}),
     ("lerp", {"ema": 0.5})],
)  # fmt: skip
def test_what_an_option_does_is_not_told(words, options, tmp_path):
    before, loop, told = NOTED[words]
    path = script(tmp_path, before, loop)
    assert any(told in note for note in notes(path)) and not any(told in note for note in notes(path, **options))


def test_a_loss_in_an_autocast_is_divided_by_no_count(tmp_path):
    """The loss function of the hints had the autocast of another device, and both divided by the number of turns."""
    loop = "x = x.to('cpu')\nwith torch.autocast('cuda'):\n    out = model(x)\n    loss = criterion(out, y) / 4\n"
    path = script(tmp_path, "", loop + BACKWARD + "if i % 4 == 3:\n    optimizer.step()\n")
    with pytest.raises(OptionError) as raised:
        call_factory(load_factory(str(path)), "script")
    start = raised.value.hints.index("def loss(model, batch):")
    assert raised.value.hints[start + 1 : start + 7] == (
        "    x = batch['x']", "    y = batch['y']", "    x = x.to('cpu')", "    out = model(x)",
        "    loss = criterion(out, y)", "    return loss",
    )  # fmt: skip
