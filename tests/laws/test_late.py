"""Splits without rounds, and of mode geo: what a server holds after each push is what the source's update gives."""

from __future__ import annotations

import numpy as np
import pytest
from products import part
from split_gen import arrivals
from split_gen.judge import Setting as SplitSetting
from whole_gen.late import drawn_geo, drawn_late, judged_late
from whole_gen.odd import net
from whole_gen.splits import judged_split
from whole_gen.steps import written
from whole_gen.writer import Writer

from gopt.artifact.server_entries import Mode
from gopt.parameter_server.options import SplitOptions


@pytest.mark.parametrize("seed", part(range(1000, 1160), 7))
def test_a_drawn_order_of_pushes(seed):
    found = judged_late(lambda samples, scale: written(seed, samples, scale), drawn_late(seed), seed, told=True)
    assert found.kind in ("right", "refused"), found


@pytest.mark.parametrize("seed", part(range(4000, 4100), 4))
def test_a_drawn_exchange(seed):
    found = judged_late(lambda samples, scale: written(seed, samples, scale), drawn_geo(seed), seed, told=True)
    assert found.kind in ("right", "refused"), found


def momentum(samples: int, scale: int) -> Writer:
    w = Writer(2, samples, scale)
    parameters, gradients = net(w)
    for name, value in parameters.items():
        held = w.state(f"{name}.m", np.zeros(value.shape))
        new = held * 0.9 + gradients[name]
        w.becomes(held, new)
        w.becomes(value, value - new * 0.1)
    return w


COMPENSATED = SplitOptions(trainers=3, servers=2, minimum=1, mode=Mode.ASYNC, compensation=2.0)


def test_compensation_is_held_against_its_formula(monkeypatch):
    assert judged_late(momentum, COMPENSATED, 11).kind == "right"
    monkeypatch.setattr(arrivals.Serial, "pull", lambda self, trainer: self.backup[trainer])
    assert judged_late(momentum, COMPENSATED, 11).kind == "WRONG"


def test_a_loss_scale_that_is_held_with_a_parameter():
    """In rounds every server has it, and trainers pull it; without rounds one server alone does."""

    def make(samples: int, scale: int) -> Writer:
        return written(2178, samples, scale)

    assert judged_split(make, SplitSetting(trainers=2, servers=2, minimum=1), 2178).kind == "right"
    found = judged_late(make, SplitOptions(trainers=2, servers=2, minimum=1, mode=Mode.ASYNC, tables_off=True))
    assert found.kind == "refused" and "trainers read 'scale'" in found.text, found


def test_a_joint_update_with_norms_of_one_parameter():
    found = judged_late(lambda samples, scale: written(2118, samples, scale), drawn_late(2118))
    assert found.kind == "refused" and "the gradient of" in found.text, found
