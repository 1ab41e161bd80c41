"""Links between ranks: how they are read, which one a group takes, and how long calls take on them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import source

import gopt
from gopt.errors import OptionError
from gopt.mesh import Mesh
from gopt.offline.topology import Link, Topology, parse_bytes, times
from gopt.sharding.traffic import find_calls

MESH = Mesh((("dp", 2), ("shard", 4)))
FAST, SLOW = Link(200e9, 5e-6), Link(25e9, 10e-6)


def one_link(ranks: int) -> Topology:
    return Topology.parse("200GB/s:5us", Mesh((("shard", ranks),)))


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
