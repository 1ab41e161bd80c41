"""A key on an asynchronous server: when its counters go on, which rate a push sees, backups and versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from async_steps import scheduled, served
from helpers import ROOT

from gopt.errors import InputError
from gopt.runtime.device import Host
from gopt.runtime.parameter_server.key_state import Counting, KeyState
from gopt.runtime.session import SessionCache
from gopt.runtime.training.hyper_parameters import HyperParameter
from gopt.runtime.training.schedules import RateSchedule
from gopt.runtime.tuning.tuning import tuning_of

PUSHES = (0, 1, 1, 0, 2, 0)
"""Trainers in the order in which they push."""


@pytest.mark.parametrize(
    ("rule", "seen"), [("round", [0, 0, 0, 1, 1, 1]), ("push", [0, 1, 2, 3, 4, 5]), ("chief", [0, 1, 1, 1, 2, 2])]
)
def test_counters_go_on_by_the_rule(rule: str, seen: list[int]) -> None:
    counting = Counting(rule)
    found = []
    for trainer in PUSHES:
        found.append(counting.advances)
        counting.accept(trainer, 3)
    assert found == seen


@pytest.mark.parametrize("rule", ["round", "push", "chief"])
def test_with_one_trainer_all_rules_are_one(rule: str) -> None:
    counting = Counting(rule)
    assert [counting.accept(0, 1) for _ in range(3)] == [True] * 3 and counting.advances == 3


def test_those_that_are_left_make_a_round() -> None:
    counting = Counting("round")
    assert [counting.accept(trainer, 3) for trainer in (0, 1)] == [False, False]
    assert counting.accept(0, 2)


def keys(tmp_path: Path, **given: object) -> KeyState:
    """The only key of an SGD whose rate is a hyper-parameter."""
    split = served(ROOT / "fixtures/optim/clip_each.onnx", tmp_path / "out", servers=1, minimum=1 << 20, **given)
    ((_, _, (block, *_)),) = split.servers
    rate = HyperParameter("lr", RateSchedule(lambda step: (1.0, 0.5, 0.25)[step]), np.empty((), np.float32))
    (values,) = split.values()
    return KeyState(block, values, split.plan.count, [rate], Host(tuning_of(True)), SessionCache())


def test_a_rate_that_is_fed_is_that_of_the_keys_own_round(tmp_path: Path) -> None:
    key = keys(tmp_path)
    pushed = np.full(key.type.dims, 1e-3, np.float32)
    moved = []
    for trainer in (0, 1, 0, 1):
        key._states = {name: np.zeros_like(value) for name, value in key.states.items()}
        key.push(trainer, pushed, 2)
        moved.append(float(key.value.reshape(-1)[0]))
    assert moved[0] == moved[1] == 2 * moved[2] == 2 * moved[3] != 0


def test_a_push_is_late_by_the_updates_since_its_pull(tmp_path: Path) -> None:
    key = keys(tmp_path)
    pushed = np.zeros(key.type.dims, np.float32)
    key.pull(0)
    key.pull(1)
    assert [key.push(trainer, pushed, 2) for trainer in (0, 1, 1)] == [0, 1, 2]
    key.pull(0)
    assert key.push(0, pushed, 2) == 0


def test_what_was_pulled_stays_as_it_was(tmp_path: Path) -> None:
    key = keys(tmp_path)
    key.push(0, np.ones(key.type.dims, np.float32), 4)
    before = key.pull(0)
    kept = before.copy()
    for _ in range(3):  # an update writes where the one before the last did
        key.push(0, np.ones(key.type.dims, np.float32), 4)
        assert np.array_equal(before, kept) and not np.array_equal(key.value, kept)


def test_the_value_that_a_trainer_has_stays_as_it_was(tmp_path: Path) -> None:
    key = keys(tmp_path, compensation=1.0)
    key.push(1, np.ones(key.type.dims, np.float32), 2)
    kept = key.pull(0).copy()
    for _ in range(3):
        key.push(1, np.ones(key.type.dims, np.float32), 2)
        assert np.array_equal(key.backups[0], kept)


def test_backups_are_set_at_pull_and_start_as_the_first_value(tmp_path: Path) -> None:
    key = keys(tmp_path, compensation=1.0)
    first = key.value
    key.push(1, np.ones(key.type.dims, np.float32), 2)
    key.pull(0)
    kept = key.extra(2)
    root = f"gopt.async.key{key.block.key}"
    assert np.array_equal(kept[f"{root}.backup0"], key.value) and np.array_equal(kept[f"{root}.backup1"], first)


def test_a_checkpoint_without_the_key_is_refused(tmp_path: Path) -> None:
    key = keys(tmp_path)
    kept = key.extra(2)
    key.restore(kept.get)
    with pytest.raises(InputError, match="does not say how often"):
        key.restore(lambda name: None)


def test_a_key_goes_on_with_its_own_counters(tmp_path: Path) -> None:
    split = served(scheduled(tmp_path / "m.onnx"), tmp_path / "out", servers=1)
    ((_, _, (block, *_)),) = split.servers
    (values,) = split.values()
    key, other = (KeyState(block, values, "push", [], Host(tuning_of(True)), SessionCache()) for _ in range(2))
    for _ in range(2):
        key.push(0, np.zeros(key.type.dims, np.float32), 2)
    other.restore(key.extra(2).get)
    assert float(other.counters["step"]) == 2.0 and other.counting == key.counting and other.version == 2
