"""Drawn rules with drawn hyper-parameters, in drawn spellings: named, with every value."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from drawn_updates import RULES, DrawnUpdate
from offline_graphs import saved

from gopt import api
from gopt.analysis.role_map import RoleMap
from gopt.offline.inspect import inspect_model

FRESH = random.SystemRandom().randrange(10**6)


@pytest.mark.parametrize("rule", RULES)
def test_a_drawn_update_is_named_with_its_hyper_parameters(rule: str, tmp_path: Path) -> None:
    """Three seeds that stay, and a fresh seed, which a failure names."""
    for seed in (1, 2, 3, FRESH):
        drawn = DrawnUpdate(seed, rule)
        roles = RoleMap(
            states={state: new for state, (new, _) in drawn.step.states.items()}, params={"w": drawn.step.gradient}
        )
        path = saved(drawn.step.model(), tmp_path)
        (optimizer,) = inspect_model(api.load(path, roles=roles)).optimizers
        due = {k: pytest.approx(v, rel=2e-5) if type(v) is float else v for k, v in drawn.hyper.items()}
        assert (optimizer.name, optimizer.hyper) == (drawn.name, due), f"{rule}, seed {seed}"
