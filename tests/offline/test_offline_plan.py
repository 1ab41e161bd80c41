"""``gopt plan``: its bytes are the ranks', its links and times follow their formulas, its order is explained."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
from helpers import FIXTURES, NAMES, Builder, perceptron, sgd

import gopt
from gopt.analysis.traffic import find_calls
from gopt.api import Source
from gopt.errors import OptionError, UnsupportedError
from gopt.mesh import Mesh
from gopt.offline.memory import balance, held, live, reduced_gradient_bytes
from gopt.offline.plan import Choice, ShardSettings, best, bucket_choices, choices, estimate_cost, rank_choices
from gopt.offline.topology import CommTimes, Link, Topology, parse_bytes, times
from gopt.program import SpmdProgram

MESH = Mesh((("dp", 2), ("shard", 4)))
FAST, SLOW = Link(200e9, 5e-6), Link(25e9, 10e-6)


@functools.cache
def source(name: str) -> Source:
    return gopt.load(FIXTURES / f"{name}.onnx")


@functools.cache
def weighed(name: str = "gpt_adamw") -> list[Choice]:
    return list(choices(source(name).training, Mesh((("shard", 4),)), caps=[None, 0.005], topology=one_link(4)))


def one_link(ranks: int) -> Topology:
    return Topology.parse("200GB/s:5us", Mesh((("shard", ranks),)))


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", ["flat", "rows", "whole"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_ranks(name, stage, partition):
    if stage == 0 and partition != "flat":
        pytest.skip("nothing is cut at stage 0")
    result = gopt.shard(source(name), MESH, stage=stage, partition=partition, bucket_mb=0.005)
    report = result.report().to_json()
    rows: dict[str, Any] = held(result.program)
    rows["gradients"] = reduced_gradient_bytes(result.program, find_calls(result.program))
    for kind, row in rows.items():
        assert row == [each["bytes"][kind] for each in report["ranks"][:4]], kind
    assert balance(rows) == max(report["balance"].values())


def test_live_bytes_of_a_chain(tmp_path):
    b = Builder()
    sgd(b, perceptron(b, (8, 8, 8), batch=4, bias=False))
    training = gopt.load(b.save(tmp_path / "step.onnx")).training
    step = SpmdProgram.start(training, Mesh((("shard", 1),)))
    found = live(step, find_calls(step), 0)
    assert found.gathered == 0
    # Both gradients (8·8·4 bytes each) are alive when the second update's product is made.
    assert found.gradients == 2 * 256
    assert found.peak >= found.gradients
    assert found.peak <= sum(type.nbytes for type in training.graph.types.values())


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


# --- choices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt_adamw", "mlp_adamw_accum"])
def test_every_choice_once(name):
    found = [each.settings for each in weighed(name)]
    assert len(found) == len(set(found)) == 2 * (4 + 3 + 3)
    assert sum(settings.stage == 0 for settings in found) == 2


def test_what_is_copied_from_stage_1_is_right():
    for each in weighed():
        if each.settings.stage == 2:
            assert (
                estimate_cost(source("gpt_adamw").training, Mesh((("shard", 4),)), each.settings, one_link(4)) == each
            )


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
    training, mesh = source("cnn_mom_fp16").training, Mesh((("shard", 8),))
    topology = Topology.parse("1MB/s", mesh)
    rows = rank_choices(
        [estimate_cost(training, mesh, ShardSettings(2, cut), topology) for cut in ("whole", "flat")], None
    )
    assert rows[0].choice.settings.partition == "flat"
    assert "the ring waits for the largest share" in rows[1].why


@pytest.mark.parametrize("axes", [(("shard", 1),), (("dp", 4),), (("shard", 2), ("tp", 2))])
def test_any_mesh_is_weighed(axes):
    found = rank_choices(list(choices(source("mlp_adamw").training, Mesh(axes))), None)
    assert len(found) == 10
    with pytest.raises(UnsupportedError):
        next(choices(source("mlp_adamw").training, Mesh((*axes, ("pp", 2)))))


# --- links and times ------------------------------------------------------------------------------------------------


def test_links_are_read():
    assert Link.parse("200GB/s:5us") == FAST
    assert Link.parse("1.5 kB/s") == Link(1500.0, 0.0)
    assert Link.parse("25GB/s:0.01ms") == SLOW
    assert Link.parse("1600Gb/s:5us") == Link.parse("1600 Gbit/s:5us") == FAST
    assert (parse_bytes("80GB"), parse_bytes("1.5 KiB"), parse_bytes("7B"), parse_bytes("8g")) == (
        80 << 30,
        1536,
        7,
        8 << 30,
    )


@pytest.mark.parametrize(
    "text",
    ["fast", "200GB", "0GB/s", "shard=200GB/s", "dp=1GB/s,shard=2GB/s,tp=1GB/s", "dp=1GB/s,2GB/s", "8xGB/s,1GB/s",
     "8x2GB/s,4x1GB/s,1GB/s", "2GB/s,1GB/s", "8x2GB/s", "1..5GB/s", "dp=1GB/s,dp=1GB/s", "", "200Gbps", "200GiB/s",
     "200mB/s", "9" * 400 + "GB/s", "٤GB/s"],
)  # fmt: skip
def test_links_that_say_nothing_clear_are_refused(text):
    with pytest.raises(OptionError):
        Topology.parse(text, MESH)


@pytest.mark.parametrize("text", ["80XB", "GB", "-1GB", "1.2.3GB", "80Gb", "80", "9" * 400 + "GB", "٤GB"])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(OptionError):
        parse_bytes(text)


def test_a_group_over_several_axes_goes_at_the_slowest():
    topology = Topology.parse("shard=200GB/s:5us,dp=25GB/s:10us", MESH)
    assert (topology.of("shard"), topology.of("dp"), topology.of("dp+shard")) == (FAST, SLOW, SLOW)


def test_a_group_inside_a_node_goes_at_the_first_tier():
    topology = Topology.parse("4x200GB/s:5us,25GB/s:10us", MESH)
    assert (topology.of("shard"), topology.of("dp"), topology.of("dp+shard")) == (FAST, SLOW, SLOW)
    wide = Mesh((("shard", 4), ("tp", 2)))
    assert Topology.parse("2x200GB/s:5us,25GB/s:10us", wide).of("tp") == FAST
    assert Topology.parse("4x200GB/s:5us,25GB/s:10us", wide).of("shard") == SLOW
    # Groups of 3 do not stay inside nodes of 4.
    assert Topology.parse("4x200GB/s:5us,25GB/s:10us", Mesh((("dp", 4), ("shard", 3)))).of("shard") == SLOW


def test_time_is_that_of_a_ring():
    step = gopt.shard(source("mlp_adamw"), 4, stage=0).program
    calls = find_calls(step)
    elements = sum(step.graph.types[state.tensor].elements for state in step.training.parameters)
    found = times(calls, one_link(4))
    assert found.latency == pytest.approx(2 * 3 * 5e-6)
    assert found.total == pytest.approx(2 * 3 * 5e-6 + 2 * 3 / 4 * 4 * elements / 200e9)
    assert found.exposed == found.total
    hidden = times([replace(call, hidden=True) for call in calls], one_link(4))
    assert hidden.exposed == pytest.approx(2 * 3 * 5e-6)


def test_uneven_shares_take_longer():
    by_cut = {}
    for partition in ("flat", "whole"):
        calls = find_calls(gopt.shard(source("gpt_adamw"), 4, partition=partition, bucket_mb=0.005).program)
        by_cut[partition] = times(calls, one_link(4)).total
    assert by_cut["whole"] > by_cut["flat"]
