"""What random operators draw: of a distribution, and the same in every run where they have a seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gopt.operators.table import OPERATORS
from gopt.operators.torch_call import called

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
COUNT = 40_000
SEEDS = [{}, {"seed": 0.0}, {"seed": 7.0}, {"seed": -3.25}]


def drawn(name: str, *operands: Any, results: int = 1, opset: int = 22, **attributes: Any) -> Any:
    torch.manual_seed(5)
    return called(OPERATORS[name], torch, operands, attributes, opset, results)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("like", [False, True])
def test_uniform_numbers_fill_their_range_evenly(seed, like):
    operands = [torch.zeros(200, COUNT // 200)] if like else []
    how = {} if like else {"shape": [200, COUNT // 200]}
    (x,) = drawn("RandomUniform" + "Like" * like, *operands, low=-1.0, high=3.0, **how, **seed)
    counts = np.histogram(x.numpy(), 20, (-1, 3))[0]
    assert (x.shape, x.dtype, counts.sum()) == ((200, COUNT // 200), torch.float32, COUNT)
    chi = ((counts - COUNT / 20) ** 2 / (COUNT / 20)).sum()
    assert chi < 50  # of 19 degrees of freedom: passed by one seed in ten thousand
    pairs = np.corrcoef(x.numpy().reshape(-1)[:-1], x.numpy().reshape(-1)[1:])[0, 1]
    assert abs(pairs) < 4 / COUNT**0.5


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("like", [False, True])
def test_normal_numbers_have_the_moments_of_their_distribution(seed, like):
    operands = [torch.zeros(COUNT, dtype=torch.float64)] if like else []
    how = {} if like else {"shape": [COUNT], "dtype": 11}
    (x,) = drawn("RandomNormal" + "Like" * like, *operands, mean=2.0, scale=3.0, **how, **seed)
    y = (x - 2) / 3
    assert x.dtype == torch.float64
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((y**power).mean() - moment) < 4 * (spread / COUNT) ** 0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_flags_and_classes_come_as_often_as_their_odds_say(seed):
    (flags,) = drawn("Bernoulli", torch.full([COUNT], 0.3), dtype=9, **seed)
    assert flags.dtype == torch.bool
    assert abs(flags.float().mean() - 0.3) < 4 * (0.21 / COUNT) ** 0.5
    odds = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]])
    (classes,) = drawn("Multinomial", odds.log(), sample_size=COUNT, **seed)
    assert (classes.shape, classes.dtype) == ((2, COUNT), torch.int32)
    for row, shares in zip(classes, odds):
        found = torch.bincount(row.long(), minlength=4) / COUNT
        assert ((found - shares).abs() < 4 * (shares * (1 - shares) / COUNT).sqrt()).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_dropout_keeps_a_share_and_scales_it(seed):
    x = torch.ones(COUNT, dtype=torch.float16)
    for ratio in (torch.tensor(0.25), 0.25):
        y, mask = drawn("Dropout", x, ratio, True, results=2, **seed)
        assert (y.dtype, mask.dtype) == (torch.float16, torch.bool)
        assert abs(mask.float().mean() - 0.75) < 4 * (0.1875 / COUNT) ** 0.5
        assert torch.equal(y, mask * torch.tensor(4 / 3, dtype=torch.float16))
    assert torch.equal(drawn("Dropout", x, 0.25, False)[0], x)


def test_a_seed_gives_the_same_numbers_in_every_run_and_another_seed_others():
    from torch.fx.experimental.proxy_tensor import make_fx

    def of(seed: float) -> Any:
        return called(OPERATORS["RandomUniform"], torch, [], {"shape": [COUNT], "seed": seed}, 22)[0]

    assert torch.equal(of(1.0), of(1.0))
    assert torch.equal(make_fx(lambda: of(1.0), tracing_mode="fake")()(), of(1.0))
    assert abs(np.corrcoef(of(1.0), of(2.0))[0, 1]) < 4 / COUNT**0.5
