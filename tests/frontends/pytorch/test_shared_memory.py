"""Tensors of one memory, which a graph would carry apart. By hand, ``pytest -m torch``."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.eager_steps import EagerSteps  # noqa: E402
from gopt.frontends.pytorch.factory import make_recipe  # noqa: E402
from gopt.frontends.pytorch.shared_memory import refuse_shared_memory  # noqa: E402
from gopt.frontends.pytorch.states import find_places  # noqa: E402
from gopt.frontends.pytorch.surroundings import tensors_around  # noqa: E402


def looked_at(module):
    recipe = make_recipe((module, None, torch.optim.SGD(module.parameters(), 0.1), {"x": torch.ones(2, 4)}))
    refuse_shared_memory(find_places(recipe, EagerSteps()), tensors_around(recipe))


def two(change):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    change(module)
    return module


def by_data(module):
    module[1].weight.data = module[0].weight.data


def as_a_buffer(module):
    module.register_buffer("row", module[0].weight.data[0])


def as_an_attribute(module):
    module.row = module[0].weight.data[0]


@pytest.mark.parametrize("change", [by_data, as_a_buffer, as_an_attribute])
def test_memory_that_a_step_writes_to_by_two_tensors_is_refused(change):
    with pytest.raises(UnsupportedError, match=r"'0\.weight' and '[^']*' are two tensors of one memory"):
        looked_at(two(change))


def tied(module):
    module[1].weight = module[0].weight


def apart(module):
    flat = torch.randn(32)
    module[0].weight.data, module[1].weight.data = flat[:16].view(4, 4), flat[16:].view(4, 4)


def constants(module):
    table = torch.ones(4)
    module.register_buffer("a", table)
    module.register_buffer("b", table[:2])


@pytest.mark.parametrize("change", [tied, apart, constants])
def test_tied_parameters_parts_of_one_array_and_constants_are_not(change):
    looked_at(two(change))


def test_an_lstm_keeps_its_weights_in_one_array():
    looked_at(nn.LSTM(4, 4))
