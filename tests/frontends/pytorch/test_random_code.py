"""Training code drawn at random: the file computes what PyTorch does on batches that the export did not see.
``cd tests && python -m code_gen --minutes 5`` draws more. By hand, ``pytest -m torch``."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from code_gen import oracle  # noqa: E402
from code_gen.codes import draw_code  # noqa: E402
from code_gen.judge import judge  # noqa: E402

SEEDS = (501, 502, 503, 504, 506)


@pytest.mark.parametrize("seed", SEEDS)
def test_code_of_a_seed_is_equal_to_pytorch(seed):
    verdict = judge(seed, ranks=seed % 5 == 0)
    assert verdict.outcome in ("equal", "equal on ranks"), f"{verdict.told}: {verdict.why}"


def test_the_comparison_sees_a_planted_difference(monkeypatch):
    trained = oracle.trained

    def planted(code, *given, **more):
        found = trained(code, *given, **more)
        name = next(each for each in found.states if each.endswith("weight"))
        found.states[name] = found.states[name] * (1 + 1e-3)
        return found

    monkeypatch.setattr(oracle, "trained", planted)
    assert judge(SEEDS[0]).outcome == "WRONG"


def test_a_seed_draws_the_same_code():
    assert draw_code(7).told == draw_code(7).told
    first, second = (draw_code(7).make()[0].state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
