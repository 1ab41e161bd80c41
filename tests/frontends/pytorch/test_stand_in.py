"""Small parameters in the place of those without values. By hand, ``pytest -m torch``."""

from __future__ import annotations

from itertools import chain

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import first_step_optimizers as special  # noqa: E402

from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.eager_steps import EagerSteps  # noqa: E402
from gopt.frontends.pytorch.factory import make_recipe  # noqa: E402
from gopt.frontends.pytorch.first_steps import first_steps_apart  # noqa: E402
from gopt.frontends.pytorch.shapes import without_values  # noqa: E402
from gopt.frontends.pytorch.stand_in import stand_in  # noqa: E402


def shapes(*makers):
    """A recipe without values whose layers are of one optimizer each."""
    with without_values():
        net = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in makers))
        made = [maker(layer.parameters()) for maker, layer in zip(makers, net)]
        return make_recipe((net, torch.nn.functional.mse_loss, made, (torch.randn(2, 300), torch.randn(2, 300))))


def test_it_has_small_parameters_in_the_same_groups_and_optimizers_of_its_own():
    recipe = shapes(lambda p: torch.optim.Adagrad(p, 0.1), special.InLists)
    small = stand_in(recipe)
    assert [[list(p.shape) for p in each.param_groups[0]["params"]] for each in small.optimizers] == [[[4, 4], [4]]] * 2
    assert small.optimizers[1].foreach is None and small.optimizers[0] is not recipe.optimizers[0]
    assert all(torch.equal(p, q) for p, q in zip(small.module.parameters(), chain(*groups_of(small))))
    assert [list(each["sum"].shape) for each in small.optimizers[0].state.values()] == [[4, 4], [4]]
    small.loss_of(small.batch).backward()
    small.optimizers[1].step()
    assert all(list(each.shape) == [300, 300] for each in recipe.module.parameters() if each.dim() == 2)


def groups_of(recipe):
    return [group["params"] for each in recipe.optimizers for group in each.param_groups]


DAMPENED = [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.3), special.Difference, special.Centered]


def test_first_steps_of_their_own_are_seen_without_values():
    plain = [lambda p: torch.optim.AdamW(p), lambda p: torch.optim.Adagrad(p), special.Flagged]
    assert first_steps_apart(shapes(*DAMPENED, *plain), EagerSteps(), []) == {0, 1, 2}


class Wide(special.Sgd):
    def update(self, parameter, state):
        return parameter.grad * parameter[100:].numel() / parameter[200].numel()


def test_an_optimizer_that_small_parameters_do_not_suit_is_refused():
    with pytest.raises(UnsupportedError, match=r"--no-values: whether the optimizer's first step.*IndexError"):
        first_steps_apart(shapes(Wide), EagerSteps(), [])
