"""The expression of every rank value has the numbers that the ranks compute: no law of the proof may change them."""

from __future__ import annotations

import pytest
from option_gen.make import STREAM, Setting, dropped
from option_gen.numbers import Ranks, judge
from products import part

FOUND = [
    # Some terms of a sum, in front of a factor that is made of the sum.
    Setting(f"{STREAM}65481", "sp=4", 2, 1, None, {}),
    # Rows that are looked up at some positions, and zeros at the others.
    Setting(f"{STREAM}13037", "tp=2", 2, 1, None, {}),
]


@pytest.mark.parametrize("setting", FOUND, ids=Setting.told)
def test_what_was_found_stays_right(setting, tmp_path):
    assert judge(Ranks(setting), tmp_path).outcome == "right"


@pytest.mark.parametrize("seed", part(range(360), 8))
def test_expressions_are_what_ranks_compute(seed, tmp_path):
    verdict = judge(Ranks.draw(seed), tmp_path)
    assert verdict.outcome in ("right", "refused"), verdict.why


@pytest.mark.parametrize("seed", part(range(360), 2))
def test_expressions_of_steps_with_fewer_tokens_are_what_ranks_compute(seed, tmp_path):
    verdict = judge(Ranks.draw(seed, dropped(seed)), tmp_path)
    assert verdict.outcome in ("right", "refused"), verdict.why
