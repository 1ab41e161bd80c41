"""Planted errors in written splits: the simulator's comparison must see each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import FIXTURES
from split_gen.judge import EXACT, REDUCED, Setting, judge
from split_gen.plants import KEY, PLANTS, on, reduction_dropped

pytestmark = pytest.mark.usefixtures("unchecked")


def test_nothing_planted_is_equal(tmp_path: Path) -> None:
    path = FIXTURES / "mlp_adamw.onnx"
    assert judge(path, KEY, tmp_path, steps=2, edit=on("*.onnx", lambda model: None)).outcome == "equal"


@pytest.mark.parametrize("name", PLANTS)
def test_what_is_planted_is_seen(name: str, tmp_path: Path) -> None:
    path = FIXTURES / "mlp_adamw.onnx"
    found = judge(path, KEY, tmp_path, steps=2, edit=PLANTS[name], allow=lambda _: EXACT)
    assert found.outcome == "WRONG" and found.why, found


def test_a_norm_of_one_server_is_seen(tmp_path: Path) -> None:
    path = FIXTURES / "mlp_mom_clip_sched.onnx"
    setting = Setting(2, 3)
    assert judge(path, setting, tmp_path / "right", steps=2, allow=lambda _: REDUCED).outcome == "equal"
    edit = on("server_*.onnx", reduction_dropped)
    assert judge(path, setting, tmp_path / "all", steps=2, allow=lambda _: REDUCED, edit=edit).outcome == "WRONG"
    edit = on("server_0001.onnx", reduction_dropped)
    found = judge(path, setting, tmp_path / "one", steps=2, allow=lambda _: REDUCED, edit=edit)
    assert found.outcome == "WRONG" and "stuck" in found.why
