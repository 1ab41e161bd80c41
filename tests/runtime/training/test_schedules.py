"""Hyper-parameters as functions of the step: formulas, tables, and a step's own values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from drawn_steps import DRAWS, noisy_step, samples
from gopt.cli.main import main

import gopt
from gopt.documents.default_values import DefaultValue
from gopt.documents.roles import RolesRecord
from gopt.errors import GoptError, InputError, OptionError
from gopt.ir.graph import ROLES
from gopt.runtime.training.schedules import default_schedule, parse_schedule

PEAK, WARMUP, TOTAL = 0.5, 10, 50


def test_each_form_gives_its_values(tmp_path):
    """Against the formulas of PyTorch's and other libraries' schedulers, written out."""
    (tmp_path / "rates.txt").write_text("0.1\n0.2\n\n0.3\n")
    np.save(tmp_path / "rates.npy", np.array([0.1, 0.2, 0.3]))

    def cosine(share: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))

    expected = {
        "1e-3": lambda step: 1e-3,
        "constant:0.25": lambda step: 0.25,
        "linear:0.1:0.3:20": lambda step: 0.1 + 0.2 * min(step / 20, 1),
        "cosine:0.4:0.2:40": lambda step: 0.2 + 0.2 * cosine(step / 40),
        "step:0.8:7:0.5": lambda step: 0.8 * 0.5 ** (step // 7),
        "warmup-constant:0.5:10": lambda step: 0.5 * min(step / 10, 1),
        "warmup-linear:0.5:10:50": lambda step: 0.5 * (step / 10 if step < 10 else max(0, (50 - step) / 40)),
        "warmup-cosine:0.5:10:50": lambda step: 0.5 * (step / 10 if step < 10 else cosine((step - 10) / 40)),
        "warmup-cosine:0.5:10:50:0.1:0.2": lambda step: (
            0.2 + 0.3 * step / 10 if step < 10 else 0.1 + 0.4 * cosine((step - 10) / 40)
        ),
    }
    for text, rule in expected.items():
        found = parse_schedule(text)
        assert found.steps is None
        for step in (0, 1, 5, 6, 7, 9, 10, 11, 29, 30, 49, 50, 51, 1000):
            assert found.at(step) == pytest.approx(rule(step), rel=1e-12, abs=1e-15), (text, step)
    for name in ("rates.txt", "rates.npy"):
        found = parse_schedule(f"table:{tmp_path / name}")
        assert found.steps == 3 and [found.at(step) for step in range(3)] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("-1e-3", "cannot be -0.001"),
        ("nan", "cannot be nan"),
        ("inf", "cannot be inf"),
        ("cosine:1e-3:-1:100", "cannot be -1"),
        ("linear:nan:0:100", "cannot be nan"),
        ("cosine:1e-3:0", "cannot read"),
        ("warmup-cosine:1:2:3:4:5:6", "cannot read"),
        ("warmup-cosine:1e-3:100:50", "the warm-up of 100 steps is longer than all 50"),
        ("step:1:2.5:0.1", "2.5 is no number of steps"),
        ("fast", "cannot read"),
        ("table:no/such.txt", "cannot read"),
    ],
)
def test_what_is_no_schedule_is_refused(text, said):
    with pytest.raises(GoptError, match=said):
        parse_schedule(text)


def test_a_table_of_other_things_is_refused(tmp_path):
    for content, said in (("0.1\nfast\n", "could not convert"), ("0.1\n-0.2\n", "step 2: -0.2"), ("nan\n", "step 1")):
        (tmp_path / "rates.txt").write_text(content)
        with pytest.raises(GoptError, match=said):
            parse_schedule(f"table:{tmp_path / 'rates.txt'}")


@pytest.mark.parametrize("text", ["os:getcwd", "table:/etc/hostname", "", "-1", "nan"])
def test_a_model_names_no_file_and_no_function(text):
    """Its values are data: what a model says imports nothing and reads nothing."""
    with pytest.raises(InputError, match="the value of 'lr' in the step"):
        default_schedule("lr", DefaultValue(text))


# --- runs -----------------------------------------------------------------------------------------------------------


def sharded(folder: Path, given: DefaultValue | None) -> Path:
    path = noisy_step(folder / "step.onnx")
    model = onnx.load(path)
    hyper = None if given is None else {"lr": given}
    record = RolesRecord(draws=DRAWS, batch=("x", *DRAWS), hyper=hyper)
    onnx.helper.set_model_props(model, {ROLES: record.text()})
    onnx.save(model, path)
    gopt.shard(gopt.load(path), 2).write(folder / "ranks", force=True)
    samples(folder / "d.npz")
    return folder / "ranks"


def run(ranks: Path, steps: int = 3, **more: Any) -> Any:
    return gopt.run(ranks, ranks.parent / "d.npz", steps, **more)


def states(found: Any) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in found.states.items()}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (DefaultValue("0.002"), "0.002"),
        (DefaultValue("linear:0.002:0:3", steps=9), "linear:0.002:0:3"),
        (DefaultValue(table=(0.003, 0.002, 0.0, 0.001)), "table:rates.txt"),
    ],
    ids=["number", "formula", "table"],
)
def test_a_run_takes_the_value_of_the_step(given, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rates.txt").write_text("\n".join(map(str, given.table)))
    ranks = sharded(tmp_path, given)
    assert states(run(ranks)) == states(run(ranks, settings={"lr": text}))
    assert states(run(ranks)) != states(run(ranks, settings={"lr": 0.01}))


def test_a_run_past_the_end_of_a_schedule_is_refused(tmp_path):
    ranks = sharded(tmp_path, DefaultValue(table=(0.1, 0.2)))
    with pytest.raises(OptionError, match="lr has values for 2 steps, and steps is 3"):
        run(ranks)
    ranks = sharded(tmp_path, DefaultValue("cosine:0.1:0:100", steps=2))
    with pytest.raises(OptionError, match="lr has values for 2 steps, and steps is 3"):
        run(ranks)
    run(ranks, settings={"lr": "cosine:0.1:0:100"})


def test_a_function_that_gives_no_number_ends_the_run(tmp_path, monkeypatch):
    (tmp_path / "rates.py").write_text("def falling(step):\n    return 0.001 - 0.001 * step\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=r"lr is -0\.001 in step 3"):
        run(sharded(tmp_path, None), settings={"lr": "rates:falling"})


def test_the_command_says_what_it_takes(tmp_path, capsys):
    ranks = sharded(tmp_path, DefaultValue("0.002"))
    usual = ["run", str(ranks), "--data", str(tmp_path / "d.npz"), "--steps", "1", "--json"]
    assert main(usual) == 0
    out, err = capsys.readouterr()
    assert "lr is 0.002, as the step has it; --set lr=VALUE takes another" in err
    assert json.loads(out)["hyper"] == {"lr": {"schedule": "0.002", "of": "step"}}
    assert main([*usual, "--set", "lr=1e-3"]) == 0
    out, err = capsys.readouterr()
    assert "lr is" not in err and json.loads(out)["hyper"] == {"lr": {"schedule": "1e-3", "of": "--set"}}
    assert main([*usual, "--set", "lr=1e-3", "--set", "lr=2e-3"]) == 2
    assert "--set gives 'lr' two values: 1e-3 and 2e-3" in capsys.readouterr().err
    for wrong in ("lr=-1", "lr=nan", "lr=warmup-cosine:1e-3:5"):
        assert main([*usual, "--set", wrong]) == 2, wrong
        assert capsys.readouterr().err.count("gopt: error:") == 1
    for wrong in (["lr=nan"], ["lr=1e-3", "lr=1e-3"]):
        sets = [word for each in wrong for word in ("--set", each)]
        assert main(["verify", str(ranks), "--steps", "1", *sets]) == 2
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "step.onnx")]) == 0
    assert "lr 0.002" in " ".join(capsys.readouterr().out.split())
    assert main(["inspect", str(tmp_path / "step.onnx"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["defaults"] == {"lr": {"schedule": "0.002"}}


def test_a_missing_value_is_asked_for(tmp_path):
    with pytest.raises(OptionError, match="the step needs a value for 'lr'"):
        run(sharded(tmp_path, None))
