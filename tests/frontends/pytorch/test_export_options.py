"""Options of an export, and what is said without PyTorch; nothing here needs it."""

from __future__ import annotations

import sys

import pytest
from gopt.cli.main import main

from gopt.errors import OptionError
from gopt.frontends.pytorch.options import DYNAMIC, ExportOptions

WRONG = [
    {"clip_norm": 0.0}, {"clip_norm": float("nan")}, {"clip_value": -1.0}, {"clip_norm": 1.0, "clip_value": 1.0},
    {"loss_scale": "static"}, {"loss_scale": 0.0}, {"loss_scale": float("inf")}, {"ema": 1.0}, {"ema": 0.0},
    {"check": 0},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_values_that_make_no_step_are_refused(wrong):
    with pytest.raises(OptionError, match=f"--{next(iter(wrong)).replace('_', '-')}"):
        ExportOptions(**wrong)


def test_values_that_make_one_are_taken():
    assert ExportOptions().check == 3
    assert ExportOptions(loss_scale=DYNAMIC, clip_norm=1.0, ema=0.9).scales_loss
    assert not ExportOptions().scales_loss


def test_without_torch_the_command_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [each for each in sys.modules if each.startswith("gopt.frontends.pytorch.")]:
        if not name.endswith(".options"):
            monkeypatch.delitem(sys.modules, name)
    assert main(["export", "module:make", "-o", str(tmp_path / "step.onnx")]) == 2
    assert capsys.readouterr().err == (
        "gopt: error: gopt export needs torch\n  hint: pip install 'gopt[torch]'\n"
    )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_options_of_the_command_reach_the_export(capsys, tmp_path):
    out = str(tmp_path / "step.onnx")
    assert main(["export", "module:make", "-o", out, "--loss-scale", "much"]) == 2
    assert main(["export", "module:make", "-o", out, "--clip-norm", "1", "--clip-value", "1"]) == 2
    assert "cannot be combined" in capsys.readouterr().err
