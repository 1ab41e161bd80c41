"""Steps whose states follow the batch without a gradient (fixtures/cases): roles, rules, and every number."""

from __future__ import annotations

from pathlib import Path

import pytest

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.errors import UnsupportedError

CASES = Path(__file__).parents[2] / "fixtures/cases"
RULES = {
    "b1_max_read": {"amax": "max"}, "b1_max_unread": {"amax": "max"}, "c08_scale_ema": {"amax": "max"},
    "brn": {"rm": "mean", "rs": "mean"}, "c03_expert_bias_linear": {"expert_bias": "sum"}, "moe_bias": {"bias": "sum"},
    "kfac_old": {"kA": "mean", "kG": "mean"}, "sumloss_read2": {"c": "mean"}, "sumloss_unread": {"c": "mean"},
    "qk_clip_state": {"maxlogit": "max"},
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_ranks_combine_each_as_it_follows_the_batch(name):
    sharded = gopt.shard(CASES / f"roles/{name}.onnx", 2)
    assert {each.tensor: each.rule for each in sharded.program.reductions.values()} == RULES[name]
    assert RULES[name].keys().isdisjoint(sharded.source.training.gradients)


@pytest.mark.parametrize(
    ("name", "accumulate"),
    [("kfac_old", 2), ("b1_max_read", 1)]
    + [pytest.param(name, k, marks=pytest.mark.slow) for name in RULES for k in (1, 2)],
)
def test_ranks_equal_the_source(name, accumulate, tmp_path):
    sharded = gopt.shard(CASES / f"roles/{name}.onnx", 2, accumulate=accumulate)
    assert gopt.verify(sharded, steps=2).outcome == "equal"


def test_what_divides_a_sum_by_a_count_of_its_own_is_no_gradient():
    """Centres of classes; the hint settles it."""
    with pytest.raises(UnsupportedError, match="count of the batch that the loss does not know") as caught:
        gopt.shard(CASES / "roles/centre_loss.onnx", 2)
    assert "--statistics centres=sum" in caught.value.hints[0]
    sharded = gopt.shard(CASES / "roles/centre_loss.onnx", 2, statistics="centres=sum")
    assert "centres" not in sharded.source.training.gradients and gopt.verify(sharded, steps=2).outcome == "equal"


def test_the_users_rule_goes_first(tmp_path):
    sharded = gopt.shard(CASES / "roles/b1_max_unread.onnx", 2, statistics="amax=mean")
    assert sharded.program.reductions["amax"].rule == "mean"
    assert gopt.shard(CASES / "roles/b1_max_unread.onnx", 2, statistics="local").program.states[-1].local


def test_an_update_cannot_read_what_ranks_hold_apart():
    with pytest.raises(UnsupportedError, match=r"reads the statistic 'k[AG]', which ranks hold apart"):
        gopt.shard(CASES / "roles/kfac_old.onnx", 2, statistics="local")


@pytest.mark.parametrize(("mesh", "stage"), [("shard=2", 1), ("shard=3", 3), ("dp=3", 0)])
def test_a_queue_is_refused_once_and_its_hint_gathers_the_rows(mesh, stage):
    path = CASES / "roles/moco.onnx"
    with pytest.raises(UnsupportedError, match="keeps rows of single samples, by Concat") as caught:
        gopt.shard(path, mesh)
    assert caught.value.hints[0].startswith("--statistics queue=gather: ranks gather the rows of all; local keeps")
    sharded = gopt.shard(path, mesh, statistics="queue=gather", stage=stage)
    assert sharded.program.reductions["queue"].rule == "gather" and gopt.verify(sharded, steps=2).outcome == "equal"


def test_a_queue_has_room_for_the_rows_of_all_ranks():
    with pytest.raises(UnsupportedError, match="4 ranks bring 12 rows in a step, and 'queue' has 9"):
        gopt.shard(CASES / "roles/moco.onnx", 4, statistics="queue=gather")


def test_ranks_may_keep_queues_of_their_own():
    """The reference of verify keeps the statistics of each rank apart, as ranks do."""
    sharded = gopt.shard(CASES / "roles/moco.onnx", 2, statistics="queue=local")
    assert gopt.verify(sharded, steps=2).outcome == "equal"


@pytest.mark.parametrize("name", ["b3_rows_set", "c05_maxnorm_mask"])
def test_rows_that_the_forward_writes_are_refused_by_name(name):
    """It averaged new values, and verify called them confirmed."""
    for roles in (RoleMap(), RoleMap(states={"emb": "emb_out"})):
        with pytest.raises(UnsupportedError) as caught:
            gopt.load(CASES / f"roles/{name}.onnx", roles=roles)
        assert "the forward writes 'emb' anew by the batch" in "".join([caught.value.message, *caught.value.hints])


def test_a_history_that_the_backward_reads_is_asked_for_by_name():
    histories = {name: f"{name}_out" for name in ("hist_x", "hist_w", "hist_g")}
    with pytest.raises(UnsupportedError, match="reads 'hist_g', which no loss depends on") as caught:
        gopt.load(CASES / "roles/fp8_delayed.onnx", roles=RoleMap(states=histories))
    assert "--statistics hist_g=max" in caught.value.hints[0]
    source = gopt.load(CASES / "roles/fp8_delayed.onnx", roles=RoleMap(states=histories, statistics={"hist_g": "max"}))
    assert gopt.verify(gopt.shard(source, 2), steps=2).outcome == "equal"


def test_a_note_says_that_micro_steps_move_statistics():
    report = gopt.shard(CASES / "roles/kfac_old.onnx", 2, accumulate=2).report()
    assert "with --accumulate 2 a statistic moves 2 times a step, once by each micro-step: kA, kG" in report.notes
