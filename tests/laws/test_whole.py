"""Ranks hold what the source makes of the whole batch: no gradient is known, the step is written once more for all."""

from __future__ import annotations

import onnx
import pytest
import rank_simulator
from products import part
from split_gen.judge import Setting as SplitSetting
from whole_gen.judge import MESHES, SPLIT, Setting, Verdict, drawn, judged
from whole_gen.odd import load_all
from whole_gen.splits import drawn_split, judged_split
from whole_gen.steps import written
from whole_gen.writer import Writer

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.errors import UnsupportedError

STEPS = load_all()
TELLS = {
    "gauss_seidel": "--params w0=VALUE", "adam_over_row": "--params w0=VALUE",
    "exchanged_states": "--states w0.a=w0.b.new", "whole_numbers": "w0.fixed",
    **dict.fromkeys(["two_positions", "double_buffer", "nesterov_pair"], "neither is a proof"),
    "kept_gradients": "may replace any of",
    "barzilai": "--states w0=w0.new", "summed_loss_with_shared_penalty": "count it once for every rank",
    "newton_loop": "Loop",
    "row_of_two": "is made of several gradients",
    **dict.fromkeys(
        ["product_of_gradients", "two_products", "matrix_of_gradients", "signs_agree", "surgery", "clipped_each",
         "normed_each", "one_row_of_all", "clipped_row"], "is made of several gradients",
    ),
}  # fmt: skip
"""Steps that gopt refuses as they are, and words of the refusal."""
SHOWN = {"shown_values"}
"""Steps whose outputs servers cannot give back."""
NEVER = {"newton_loop", "summed_loss_with_shared_penalty", "surgery", "clipped_each", "normed_each"}
"""Those that no role settles."""


def odd(name: str, how: Setting, seed: int, verify: bool = False) -> Verdict:
    def make(samples: int, scale: int) -> Writer:
        w = Writer(seed, samples, scale)
        STEPS[name](w)
        return w

    return judged(make, how, seed, verify=verify)


@pytest.mark.parametrize("name", part(STEPS, 17))
def test_a_step_written_by_hand(name):
    seed = sorted(STEPS).index(name)
    how = drawn(seed)
    found = odd(name, how, seed)
    named = name == "summed_loss_with_penalty" and how.named  # a gradient with the penalty in it
    assert found.kind == "right" or ((named or name in TELLS) and found.kind == "refused"), found


@pytest.mark.parametrize("name", sorted(TELLS.keys() - NEVER))
def test_what_a_refusal_asks_for_settles_it(name):
    assert (
        odd(
            name,
            Setting("shard=3", {"stage": 2}, told=True, named=name not in ("exchanged_states", "kept_gradients")),
            3,
        ).kind
        == "right"
    )


@pytest.mark.parametrize("name", sorted(TELLS.keys() - {"exchanged_states"}))
def test_it_is_refused_as_it_is(name):
    found = odd(name, Setting("shard=2", {"stage": 1}), 5)
    assert found.kind == "refused" and TELLS[name] in found.text, found


def test_the_judge_sees_a_lost_reduction(monkeypatch):
    assert odd("median", Setting("shard=2", {"stage": 2}), 1).kind == "right"
    monkeypatch.setattr(rank_simulator, "combined", lambda arrays, how: arrays[0])
    assert odd("median", Setting("shard=2", {"stage": 2}), 1).kind == "WRONG"


@pytest.mark.parametrize("seed", part(range(12000, 12300), 4))
@pytest.mark.parametrize("meshes", [MESHES, SPLIT], ids=["data", "split"])
def test_a_drawn_step(seed, meshes):
    def make(samples: int, scale: int) -> Writer:
        return written(seed, samples, scale)

    found = judged(make, drawn(seed, meshes, make(4, 1)), seed)
    assert found.kind in ("right", "refused"), found


def test_a_rate_of_one_dimension_keeps_the_state_of_a_scalar():
    """The generator once made a state of shape [1] of one without dimensions, and ended there."""
    assert "s.m" in written(57000357, 4, 1).states


def test_a_check_that_adds_up_a_gradient_times_zero_reads_the_gradient(tmp_path):
    """Behind it a mean over rows is taken off: that was called the gradient, and the check a value of one rank."""
    w = written(59700055, 4, 1)
    onnx.save(w.model(), tmp_path / "step.onnx")
    found = gopt.load(tmp_path / "step.onnx").training.gradients
    assert found == {name: value.name for name, value in w.gradients.items()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", STEPS)
def test_verify_agrees(name, seed):
    how = drawn(seed * 100 + sorted(STEPS).index(name))
    assert odd(name, how, seed, verify=True).kind in ("right", "refused", "unconfirmed")


def test_a_dead_scaled_loss_before_the_loss(tmp_path):
    """The update's dead product stands before a node of the forward that reads the same sum over members."""
    found = judged(lambda samples, scale: written(1030, samples, scale), Setting("tp=3", {"stage": 2}, told=True), 1030)
    assert found.kind == "right", found


@pytest.mark.parametrize("name", part(sorted(STEPS), 15))
def test_a_split_step(name):
    seed = sorted(STEPS).index(name)

    def make(samples: int, scale: int) -> Writer:
        w = Writer(seed, samples, scale)
        STEPS[name](w)
        return w

    how = drawn_split(seed)
    found = judged_split(make, how, seed, told=True)
    if name in TELLS or name in SHOWN:
        assert found.kind in ("right", "refused"), found
    else:
        assert found.kind == "right", found


@pytest.mark.parametrize("servers", [1, 3])
def test_a_split_step_whose_states_keep_gradients(servers):
    """The gradient itself is a state's new value: servers have it, and the trainers make it."""

    def make(samples: int, scale: int) -> Writer:
        w = Writer(4, samples, scale)
        STEPS["kept_gradients"](w)
        return w

    assert judged_split(make, SplitSetting(trainers=2, servers=servers, minimum=1), 1, told=True).kind == "right"


def test_a_new_value_of_a_stored_number_is_not_taken_for_the_loss(tmp_path):
    """A loss that ends in a mean was shown beside: the scale, its update and its gradient were taken for a constant and
    the loss, and each rank had a scale of its own."""
    w = written(81192, 4, 1)
    onnx.save(w.model(), tmp_path / "step.onnx")
    with pytest.raises(UnsupportedError, match=r"'s\.new' may be the new value of 's'") as refused:
        gopt.load(tmp_path / "step.onnx")
    assert "if it is a loss, say so: --loss s.new" in refused.value.hints
    assert gopt.load(tmp_path / "step.onnx", roles=RoleMap(loss="s.new")).training.losses == ("s.new",)
    training = gopt.load(tmp_path / "step.onnx", roles=RoleMap(states={"s": "s.new"})).training
    assert training.losses == ("loss",) and "s" in training.gradients
