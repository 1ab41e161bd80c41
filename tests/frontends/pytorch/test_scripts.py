"""Scripts without a factory: found, or refused with the lines to add, and never run to the end of their training. By
hand, ``pytest -m torch``."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from gopt.cli.main import main  # noqa: E402

from gopt.errors import OptionError  # noqa: E402
from gopt.frontends.pytorch.factory import call_factory, load_factory, own_arguments  # noqa: E402
from gopt.frontends.pytorch.scripts import Script  # noqa: E402

HEAD = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from pathlib import Path

net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.StepLR(opt, 5)
criterion = nn.CrossEntropyLoss()
train_loader = DataLoader(TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,))), batch_size=8)
"""
LOOP = """\
for x, y in train_loader:
    opt.zero_grad()
    loss = criterion(net(x), y)
    loss.backward()
    opt.step()
"""
GUARDED = HEAD + "if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in LOOP.splitlines())
FUNCTION = HEAD + "def train():\n" + "".join(f"    {line}\n" for line in LOOP.splitlines())
TRAINS = {
    "a loop": HEAD + LOOP,
    "a call": FUNCTION + "train()\n",
    "a call in a call": FUNCTION + "def main():\n    train()\nfor _ in range(2):\n    main()\n",
    "an else": HEAD
    + "if __name__ == '__main__':\n    pass\nelse:\n    criterion(net(torch.ones(1, 4)), 1).backward()\n",
    "a try": HEAD + "try:\n" + "".join(f"    {line}\n" for line in LOOP.splitlines()) + "finally:\n    pass\n",
}


def written(folder, text):
    path = folder / "script.py"
    path.write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n{text}")
    return path


@pytest.mark.parametrize("text", TRAINS.values(), ids=TRAINS)
@pytest.mark.parametrize("factory", ["", ":make"])
def test_a_script_that_trains_when_it_is_imported_is_not_run(text, factory, tmp_path):
    path = written(tmp_path, text)
    with pytest.raises(OptionError, match=r"trains while it is imported, from line .*, and was not run") as raised:
        load_factory(f"{path}{factory}")
    assert not (tmp_path / "ran").exists()
    assert [hint.strip() for hint in raised.value.hints[1:4]] == [
        "add these two lines to script.py, and export script.py:make",
        "def make():",
        "return net, criterion, opt, tuple(next(iter(train_loader)))",
    ]


@pytest.mark.parametrize("moves", ["", "    sched.step()\n", "sched.step()\n"], ids=["not", "a step", "an epoch"])
def test_the_hints_that_are_followed_make_a_factory(moves, tmp_path):
    """A schedule that moves at every step was left out of the lines, and lost without a word."""
    loop = LOOP + moves
    path = written(tmp_path, HEAD + loop)
    with pytest.raises(OptionError) as raised:
        load_factory(str(path))
    lines = [line.rstrip() for line in raised.value.hints[2:-1] if "moves once an epoch" not in line]
    assert (len(lines) < len(raised.value.hints[2:-1])) == moves.startswith("sched")
    text = path.read_text().replace(loop, "if True:\n" + "".join(f"    {line}\n" for line in loop.splitlines()))
    path.write_text(text.replace("if True:", 'if __name__ == "__main__":') + "\n".join(lines) + "\n")
    recipe = call_factory(load_factory(str(path)), "script")
    assert type(recipe.optimizers[0]).__name__ == "AdamW" and recipe.batch.keys() == {"input", "target"}
    assert (recipe.scheduler is not None) == moves.startswith(" ")


@pytest.mark.parametrize("text", [GUARDED, FUNCTION, FUNCTION + "if '__main__' == __name__:\n    train()\n"])
def test_a_guarded_script_needs_no_factory(text, tmp_path):
    recipe = call_factory(load_factory(str(written(tmp_path, text))), "script")
    assert (tmp_path / "ran").exists()
    assert isinstance(recipe.loss, torch.nn.CrossEntropyLoss) and len(recipe.module) == 3
    assert recipe.batch["input"].shape == (8, 4) and recipe.scheduler is not None


EPOCHS = {
    "for epoch in range(9):\n    train()\n    sched.step()\n": False,
    "for epoch in range(9):\n    for x, y in train_loader:\n        one(x, y)\n    sched.step()\n": False,
    "for x, y in train_loader:\n    one(x, y)\n    if x.sum() > 0:\n        sched.step()\n": True,
    "def again(sched):\n    criterion(net(x), y).backward()\n    sched.step()\n": True,
}
ONE = "def one(x, y):\n    criterion(net(x), y).backward()\n    opt.step()\n"


@pytest.mark.parametrize(("loop", "taken"), EPOCHS.items())
def test_a_schedule_that_moves_once_an_epoch_is_none_of_the_step(loop, taken, tmp_path):
    """The scheduler that an import made was taken, and its rate fell at every step instead."""
    started = "if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in loop.splitlines())
    path = written(tmp_path, FUNCTION + ONE + started)
    if taken:
        assert call_factory(load_factory(str(path)), "script").scheduler is not None
        return
    with pytest.raises(OptionError, match="moves 'sched' once an epoch") as raised:
        call_factory(load_factory(str(path)), "script")
    assert any("--set lr=step:START:EVERY:FACTOR" in hint for hint in raised.value.hints)


OTHER = "def a():\n    return 1, 2, 3, 4\ndef b():\n    return 1, 2, 3, 4\n"
MISSING = {
    "has no optimizer": GUARDED.replace("opt = torch", "opt = lambda: torch").replace("StepLR(opt", "StepLR(opt()"),
    "has no batch": GUARDED.replace("train_loader = ", "make = lambda: "),
    "several values that may be its loss": GUARDED + "loss_fn = nn.NLLLoss()\n",
    "2 functions that may be its factory": GUARDED + OTHER,
}


@pytest.mark.parametrize("words", MISSING)
def test_what_is_missing_is_said(words, tmp_path):
    with pytest.raises(OptionError, match=words) as raised:
        factory = load_factory(str(written(tmp_path, MISSING[words])))
        factory()
    assert raised.value.hints


PARSED = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--width', type=int{})\n"
MAIN = """
class Net(nn.Linear):
    pass

def train(model, loader, optimizer):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

def main():
    args = parser.parse_args()
    device = "cpu"
    loader = DataLoader(TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,))), batch_size=8)
    model = Net(4, args.width).to(device)
    optimizer = torch.optim.Adadelta(model.parameters())
    train(model, loader, optimizer)
"""


@pytest.mark.parametrize("where", ["", ":make"])
def test_a_script_sees_no_arguments_of_gopt(where, tmp_path, monkeypatch, capsys):
    """Its parser took gopt's command line for its own, and ended gopt with its usage."""
    monkeypatch.setattr("sys.argv", ["gopt", "export", "script.py", "-o", "step.onnx"])
    text = PARSED.format(", default=2") + "args = parser.parse_args()\n"
    text += HEAD.replace("8, 2", "8, args.width") + "def make():\n    parser.parse_args()\n"
    path = written(tmp_path, text + "    return net, criterion, opt, train_loader\n")
    assert main(["export", f"{path}{where}", "-o", str(tmp_path / "step.onnx"), "--check", "1"]) == 0
    path.write_text(path.read_text().replace("default=2", "required=True"))
    assert main(["export", f"{path}{where}", "-o", str(tmp_path / "other.onnx")]) == 3
    assert "ended itself, as sys.exit and argument parsers do: 2" in capsys.readouterr().err


INSIDE = HEAD[: HEAD.index("net =")] + "if __name__ == '__main__':\n    net = nn.Linear(4, 2)\n    net.double()\n"
INSIDE += """
    train_dl = DataLoader(TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,))), batch_size=8)
    opt = torch.optim.NAdam(net.parameters())
    crit = nn.CrossEntropyLoss()
    for i, (x, y) in enumerate(train_dl):
        loss = crit(net(x), y)
        loss.backward()
        opt.step()
"""
TRAINER = (
    HEAD[: HEAD.index("net =")]
    + """
class Trainer:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.NAdam(self.model.parameters(), lr=0.1)
        self.criterion = nn.CrossEntropyLoss()
    def run(self):
        for x, y in self.loader:
            loss = self.criterion(self.model(x), y)
            loss.backward()
            self.optimizer.step()

def main():
    model = nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,))), batch_size=8)
    Trainer(model, loader).run()
"""
)
PLACES = {
    "under the guard": (
        INSIDE, "copy the lines of if __name__ == \"__main__\": up to line 13, which make net and opt",
        "    return net, crit, opt, tuple(next(iter(train_dl)))",
    ),
    "of a function": (
        INSIDE.replace("if __name", "def decayed(m):\n    return torch.optim.NAdam(m.parameters())\nif __name", 1)
        .replace("opt = torch.optim.NAdam(net.parameters())", "opt = decayed(net)"),
        "copy the lines of if __name__ == \"__main__\": up to line 15, which make net and opt",
        "    return net, crit, opt, tuple(next(iter(train_dl)))",
    ),
    "of a trainer": (
        TRAINER, "    optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)",
        "    return model, criterion, optimizer, tuple(next(iter(DataLoader(TensorDataset(torch.randn(16, 4), ",
    ),
    "without an optimizer": (
        HEAD[: HEAD.index("opt =")] + HEAD[HEAD.index("criterion") :] + "for p in net.parameters():\n    pass\n",
        "    optimizer = torch.optim.AdamW(net.parameters())",
        "    return net, criterion, optimizer, tuple(next(iter(train_loader)))",
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_names_are_found_where_a_script_has_them(place, tmp_path):
    """Lines of the guard stood alone, a loader of another name was (x, y), and a trainer's loss was self.criterion."""
    text, *told = PLACES[place]
    with pytest.raises(OptionError, match="has no optimizer") as raised:
        call_factory(load_factory(str(written(tmp_path, text))), "script")
    for line in told:
        assert any(hint.startswith(line) for hint in raised.value.hints), raised.value.hints


@pytest.mark.parametrize("where", ["", ":main"])
def test_a_main_that_trains_says_which_lines_make_a_factory(where, tmp_path, capsys):
    """Lines of a factory stood alone, without what main makes before them, and their indents were lost."""
    text = HEAD[: HEAD.index("net =")] + PARSED.format(", default=2") + MAIN
    path = written(tmp_path, text)
    assert main(["export", f"{path}{where}", "-o", str(tmp_path / "step.onnx")]) == 2
    said = capsys.readouterr().err
    hint = next(line for line in said.splitlines() if "copy the lines of main()" in line)
    last = int(hint.partition("up to line ")[2].partition(",")[0])
    code = next(line for line in said.splitlines() if "hint:     return" in line).partition("hint: ")[2]
    assert code == "    return model, nn.functional.cross_entropy, optimizer, tuple(next(iter(loader)))"
    lines = path.read_text().splitlines()
    start = lines.index("def main():")
    path.write_text("\n".join([*lines, "def make():", *lines[start + 1 : last], code, ""]))
    with own_arguments(f"{path}:make"):
        recipe = call_factory(load_factory(f"{path}:make"), "script")
    assert recipe.batch.keys() == {"input", "target"} and type(recipe.module).__name__ == "Net"


def test_the_written_template_is_a_factory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "made.py"]) == 0
    assert Script.read(tmp_path / "made.py").factories() == ["make"]
    recipe = call_factory(load_factory("made.py"), "made")
    assert recipe.loss_of(recipe.batch).numel() == 1
