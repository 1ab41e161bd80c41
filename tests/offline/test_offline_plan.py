"""``gopt plan``: every choice once, and an order that is explained."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from helpers import source

from gopt.errors import OptionError, UnsupportedError
from gopt.offline.call_search import CallSearch
from gopt.offline.plan import PlanChoice, bucket_choices, estimate_cost, split_program
from gopt.offline.plan_ranking import best, rank_choices
from gopt.offline.plan_settings import ShardSettings
from gopt.offline.times import CommTimes
from gopt.passes.pipeline import Pipeline
from gopt.records.mesh import Mesh
from gopt.records.topology import Topology


def choices(training, mesh, caps=None, link=None) -> list[PlanChoice]:
    return list(CallSearch(link, caps=caps).whole(training, mesh, None))


@functools.cache
def weighed(name: str = "gpt_adamw") -> list[PlanChoice]:
    return choices(source(name).training, Mesh((("shard", 4),)), [None, 0.005], "200GB/s:5us")


def one_link(ranks: int) -> Topology:
    return Topology.parse("200GB/s:5us", Mesh((("shard", ranks),)))


def test_sharding_and_reshard_lower_what_is_alive():
    by_stage = {
        each.settings.stage: each
        for each in weighed()
        if each.settings == ShardSettings(each.settings.stage, "flat", 0.005)
    }
    assert by_stage[0].live.gradients > by_stage[2].live.gradients
    assert by_stage[0].live.gathered == by_stage[2].live.gathered == 0 < by_stage[3].live.gathered
    assert by_stage[3].parameters < by_stage[2].parameters == by_stage[0].parameters
    assert by_stage[3].held < by_stage[2].held < by_stage[0].held


@pytest.mark.parametrize("name", ["gpt_adamw", "mlp_adamw_accum"])
def test_every_choice_once(name):
    found = [each.settings for each in weighed(name)]
    assert len(found) == len(set(found)) == 2 * (4 + 3 + 3)
    assert sum(settings.stage == 0 for settings in found) == 2


def test_what_is_copied_from_stage_1_is_right():
    for each in weighed():
        if each.settings.stage == 2:
            split = split_program(source("gpt_adamw").training, Mesh((("shard", 4),)), one_link(4))
            assert estimate_cost(split, each.settings, one_link(4)) == each


def test_caps_that_give_the_same_buckets_are_tried_once():
    assert bucket_choices(source("mlp_adamw").training) == [None]


def test_the_order_is_explained():
    rows = rank_choices(weighed(), None)
    assert rows[0].why.startswith("least time:")
    seconds = [float(f"{each.choice.times.exposed:.3g}") for each in rows]
    assert seconds == sorted(seconds)
    assert all(each.why for each in rows)
    slower = [each for each in rows if each.why[0].isdigit()]
    assert slower
    assert all(" times the time of the first: " in each.why for each in slower)
    assert any("more memory than the first" in each.why for each in rows)


def test_what_does_not_fit_comes_last():
    most = max(each.held for each in weighed())
    rows = rank_choices(weighed(), most - 1)
    assert rows[0].fits and not rows[-1].fits
    assert rows[-1].why.startswith("does not fit: ")
    assert [each.fits for each in rows] == sorted((each.fits for each in rows), reverse=True)
    with pytest.raises(OptionError, match=r"nothing fits in 1\.0 KiB a rank: stage 3, "):
        best(weighed(), 1024)


def test_without_a_link_the_fewest_bytes_are_first():
    rows = rank_choices([replace(each, times=None) for each in weighed()], None)
    assert rows[0].choice.costs.traffic.sent == min(each.choice.costs.traffic.sent for each in rows)
    assert rows[0].choice.settings.stage > 0
    assert rows[0].why == "fewest bytes sent, then least memory"
    assert any("sends 1." in each.why for each in rows)


def test_a_choice_that_hides_everything_is_no_divisor():
    one, other = weighed()[:2]
    nothing = replace(one, times=CommTimes(1.0, 0.0, 0.0))
    assert rank_choices([replace(other, times=CommTimes(1.0, 0.5, 0.0)), nothing], None)[1].why.startswith(
        "the first adds no time"
    )


def test_an_uneven_cut_is_named():
    mesh = Mesh((("shard", 8),))
    topology = Topology.parse("1MB/s", mesh)
    split = split_program(source("cnn_mom_fp16").training, mesh, topology)
    rows = rank_choices([estimate_cost(split, ShardSettings(2, cut), topology) for cut in ("whole", "flat")], None)
    assert rows[0].choice.settings.partition == "flat"
    assert "the ring waits for the largest share" in rows[1].why


@pytest.mark.parametrize(
    ("axes", "count"), [((("shard", 1),), 1), ((("dp", 4),), 1), ((("shard", 2), ("tp", 2)), 10), ((("tp", 2),), 1)]
)
def test_any_mesh_is_weighed(axes, count):
    """Where no ranks share states all stages are one."""
    found = rank_choices(choices(source("mlp_adamw").training, Mesh(axes)), None)
    assert len(found) == count
    with pytest.raises(UnsupportedError):
        choices(source("mlp_adamw").training, Mesh((*axes, ("pp", 2))))


def test_a_step_is_split_once_for_all_choices(monkeypatch):
    """And stays as it is: each choice has a fork of it."""
    asked: list[tuple[str, Mesh]] = []

    def counted(self, program):
        asked.extend((stage.spec.name, program.mesh) for stage in self.stages)
        return run(self, program)

    run = Pipeline.run
    monkeypatch.setattr(Pipeline, "run", counted)
    mesh = Mesh((("shard", 2), ("tp", 3)))  # parts of two sizes
    found = choices(source("mlp_adamw").training, mesh)
    names = [name for name, _ in asked]
    assert names.count("tensor-parallel") == 1 and names.count("shard") == len(found) - 3  # stage 2 is stage 1's
    for each in found[-1:] + found[:1]:
        assert estimate_cost(split_program(source("mlp_adamw").training, mesh), each.settings, None) == each


def test_what_calls_add_counts_for_each_batch():
    """Two ranks that compute a batch together need half the time a step of two that see batches of their own may."""
    one = weighed()[0]
    assert one.batches == 4
    two = replace(one, mesh=Mesh((("shard", 2), ("tp", 2))))
    assert (two.seconds, two.sent) == (pytest.approx(2 * one.seconds, rel=0.01), 2 * one.sent)
    rows = rank_choices([two, one], None)
    assert rows[0].choice is one
    assert rows[1].why.startswith("2.00 times the time of the first for each batch: ")
    bytes_ = rank_choices([replace(two, times=None), replace(one, times=None)], None)
    assert bytes_[1].why == "sends 2.00 times the bytes for each batch"
    alone = replace(one, times=None, costs=replace(one.costs, traffic=replace(one.costs.traffic, sent=0)))
    assert "sends " in rank_choices([one, alone], None)[1].why
