"""What a script does to its model before it trains is done by the factory of its hints, or told. By hand, ``pytest -m
torch``."""

from __future__ import annotations

import runpy
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
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def init(part):
    if isinstance(part, nn.Linear):
        nn.init.constant_(part.bias, 0.5)
"""
MAKE = "torch.manual_seed(7)\nbase = nn.Linear(4, 4)\nhead = nn.Linear(4, 2)\nmodel = nn.Sequential(base, head)\n"
OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
REST = """\
criterion = nn.CrossEntropyLoss()
loader = DataLoader(TensorDataset(torch.ones(8, 4), torch.ones(8).long()), batch_size=8)
"""
LOOP = """\
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
"""
CHANGES = {
    "apply": "model.apply(init)\n",
    "a loop": "for p in model.parameters():\n    if p.dim() > 1:\n        nn.init.xavier_uniform_(p)\n",
    "a part": "nn.init.normal_(model[1].weight)\n",
    "values": "missing = model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})\n",
    "another layer": "model[1] = nn.Linear(4, 2)\n",
    "a frozen part": "for p in base.parameters():\n    p.requires_grad = False\n",
    "a name of a part": "part = model[0]\nwith torch.no_grad():\n    part.weight.mul_(2)\n",
    "another type": "model = model.to(torch.float64)\n",
    "a branch": "if True:\n    model.double()\n",
}


def indented(text, by=1):
    return textwrap.indent(text, "    " * by)


def trainer(before, after):
    return (
        "class Trainer:\n    def __init__(self):\n        self.build()\n    def build(self, rate=0.1):\n"
        + indented(before.replace("lr=0.1", "lr=rate").replace("model", "self.model").replace("base", "self.base")
                   .replace("optimizer", "self.optimizer").replace("criterion", "self.criterion")
                   .replace("loader =", "self.loader ="), 2)
        + "    def run(self):\n"
        + indented("loader = self.loader\n" + after.replace("model", "self.model")
                   .replace("optimizer", "self.optimizer").replace("criterion", "self.criterion"), 2)
    )  # fmt: skip


PLACES = {
    "an import": lambda before, after: before + after,
    "a function": lambda before, after: "def main():\n" + indented(before + after),
    "a start": lambda before, after: "if __name__ == '__main__':\n" + indented(before + after),
    "a trainer": trainer,
}


def scripts(place, before, after=LOOP):
    return HEAD + PLACES[place](before, after)


def state(model):
    return {name: (p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}


def followed(path):
    """The recipe of the hints, which a reader copies."""
    with pytest.raises(OptionError) as raised:
        call_factory(load_factory(str(path)), "script")
    hints, lines = list(raised.value.hints), path.read_text().splitlines()
    end = next(i for i, hint in enumerate(hints) if hint.startswith("    return "))
    copied = next((i for i, hint in enumerate(hints) if hint.startswith("copy the lines of ")), None)
    if copied is None:
        made = hints[hints.index("def make():") : end + 1]
        start = next((i for i, line in enumerate(lines) if line.startswith("for x, y")), None)
        if start is not None:
            lines = [*lines[:start], 'if __name__ == "__main__":', *(f"    {line}" for line in lines[start:])]
    else:
        last = int(hints[copied].partition("up to line ")[2].partition(",")[0])
        start = next(i for i, line in enumerate(lines) if line.startswith(("def main", "if __name__"))) + 1
        made = ["def make():", *lines[start:last], *hints[copied + 1 : end + 1]]
    path.write_text("\n".join([*lines, *made, ""]))
    return call_factory(load_factory(f"{path}:make"), "script"), hints


@pytest.mark.parametrize("late", [False, True], ids=["before the optimizer", "behind it"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", PLACES)
def test_the_factory_of_the_hints_changes_the_model_as_the_script_does(place, change, late, tmp_path):
    """The factory made the model anew, and left out what the script did to it afterwards."""
    before = MAKE + (OPTIMIZER + REST + CHANGES[change] if late else CHANGES[change] + OPTIMIZER + REST)
    shown = tmp_path / "shown.py"
    shown.write_text(scripts("an import", before, ""))
    wanted = state(runpy.run_path(str(shown))["model"])
    path = tmp_path / "script.py"
    path.write_text(scripts(place, before))
    recipe, _ = followed(path)
    made = state(recipe.module)
    assert made.keys() == wanted.keys()
    for name, (value, trained) in wanted.items():
        assert torch.equal(made[name][0], value) and made[name][1] == trained, name


STARTED = "if __name__ == '__main__':\n"
INSIDE = {
    "a start": lambda body: STARTED + indented(body),
    "a function": lambda body: "def train():\n" + indented("model.train()\n" + body),
    "an argument": lambda body: (
        "def train(net):\n" + indented(body.replace("model", "net")) + STARTED + "    train(model)\n"
    ),
}


@pytest.mark.parametrize("place", INSIDE)
@pytest.mark.parametrize("change", ["", "model.apply(init)\n", "torch.manual_seed(3)\n"])
def test_a_change_that_an_import_does_not_make_is_told(place, change, tmp_path):
    """The script was exported with values that it does not begin with, and nothing said so."""
    path = tmp_path / "script.py"
    path.write_text(HEAD + MAKE + OPTIMIZER + REST + INSIDE[place](change + LOOP))
    told = gopt.export(str(path), tmp_path / "step.onnx", options=ExportOptions(check=1)).notes
    lines = [number for number, line in enumerate(path.read_text().splitlines(), 1) if "init)" in line or "(3)" in line]
    assert [note.partition(" may change ")[0] for note in told if " may change " in note] == [
        f"line {number}" for number in lines
    ]


def test_a_factory_without_what_the_script_does_is_told(tmp_path):
    path = tmp_path / "script.py"
    ending = indented("return model, criterion, optimizer, loader\n")
    path.write_text(scripts("a function", MAKE + CHANGES["apply"] + OPTIMIZER + REST) + "def make():\n"
                    + indented(MAKE + OPTIMIZER + REST) + ending)  # fmt: skip
    notes = gopt.export(f"{path}:make", tmp_path / "step.onnx", options=ExportOptions(check=1)).notes
    assert sum("model.apply(init)" in note for note in notes) == 1
    path.write_text(path.read_text().replace(ending, indented("model.apply(init)\n") + ending))
    notes = gopt.export(f"{path}:make", tmp_path / "other.onnx", options=ExportOptions(check=1)).notes
    assert not any("may change" in note for note in notes)
