"""Gradient descent by hand is SGD with its rate in the factory of the hints. By hand, ``pytest -m torch``."""

from __future__ import annotations

import textwrap

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import gopt  # noqa: E402
from gopt.errors import OptionError  # noqa: E402
from gopt.frontends.pytorch.factory import call_factory, load_factory  # noqa: E402
from gopt.frontends.pytorch.options import ExportOptions  # noqa: E402

FORMS = [
    "{p} -= rate * {p}.grad", "{p}.data -= {p}.grad * rate", "{p}.data -= rate * {p}.grad.data",
    "{p}.add_({p}.grad, alpha=-rate)", "{p}.data.add_(-rate * {p}.grad)", "{p}.sub_(rate * {p}.grad)",
    "{p}.sub_({p}.grad, alpha=rate)", "{p}.copy_({p} - rate * {p}.grad)", "{p}.data = {p}.data - rate * {p}.grad",
]  # fmt: skip
OTHERS = [
    "{p} -= rate * ({p}.grad + 0.1 * {p})", "{p} += rate * {p}.grad", "{p}.mul_(rate)", "{p} -= rate * m[{p}]",
    "{p} -= rate * q.grad", "{p}.add_({p}.grad, alpha=rate)",
]  # fmt: skip
HEAD = """\
import torch
from torch import nn

torch.manual_seed(3)
data, wanted = torch.randn(16, 4), torch.randn(16, 2)
rate = 0.05
"""
MODULE = """\
model = nn.Linear(4, 2)
for i in range(0, 16, 8):
    x, y = data[i : i + 8], wanted[i : i + 8]
    loss = (model(x) - y).square().mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            {p}
"""
TENSORS = """\
w, b = torch.randn(4, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
for epoch in range(3):
    loss = (data @ w + b - wanted).square().mean()
    loss.backward()
    with torch.no_grad():
        {w}
        {b}
"""
LISTED = TENSORS.replace("for epoch", "trained = [w, b]\nfor epoch").replace(
    "        {w}\n        {b}\n", "        for p in trained:\n            {p}\n"
)
SCRIPTS = {"a module": MODULE, "tensors": TENSORS, "a list of tensors": LISTED}


def hints(path, script, form):
    for name in "pwb":
        script = script.replace(f"{{{name}}}", form.replace("{p}", name))
    path.write_text(HEAD + script)
    with pytest.raises(OptionError) as raised:
        load_factory(str(path))
    return list(raised.value.hints)


def function(lines, begin):
    start = lines.index(begin)
    return lines[start : next(i for i in range(start, len(lines)) if lines[i].startswith("    return")) + 1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_hints_step_by_the_rate_of_the_script(script, form, tmp_path):
    """The factory had AdamW, and no module where a script has tensors alone."""
    path = tmp_path / "script.py"
    told = hints(path, SCRIPTS[script], form)
    assert not any("stands for" in hint or "may change" in hint for hint in told)
    made = [*function(told, "def loss(model, batch):"), *function(told, "def make():")]
    lines = path.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("for "))
    guarded = [*lines[:start], 'if __name__ == "__main__":', textwrap.indent("\n".join(lines[start:]), "    ")]
    path.write_text("\n".join([*guarded, *made, ""]))
    recipe = call_factory(load_factory(f"{path}:make"), "script")
    (optimizer,) = recipe.optimizers
    assert type(optimizer) is torch.optim.SGD and [group["lr"] for group in optimizer.param_groups] == [0.05]
    assert {id(p) for p in recipe.module.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
    assert torch.allclose(recipe.loss_of(recipe.batch), runs(lines))
    if form == FORMS[0]:
        exported = gopt.export(f"{path}:make", tmp_path / "step.onnx", options=ExportOptions(check=1))
        assert exported.parameters == 2
        assert not any("may change" in note for note in exported.notes)


def runs(lines):
    """The script's own first loss."""
    text = "\n".join(lines).replace("    loss.backward()", "    break\n    loss.backward()")
    values = {}
    exec(text, values)
    return values["loss"]


@pytest.mark.parametrize("form", OTHERS)
def test_another_update_keeps_the_hint(form, tmp_path):
    told = hints(tmp_path / "script.py", TENSORS, form)
    assert any("stands for what updates the parameters" in hint for hint in told)
    assert any("torch.optim.AdamW(" in hint for hint in told)
