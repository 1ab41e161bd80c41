"""Links between ranks: how they are read, which one a group takes, and how long a call takes on one."""

from __future__ import annotations

import pytest

from gopt.errors import OptionError
from gopt.records.mesh import Mesh
from gopt.records.topology import Link, Topology, parse_bytes

MESH = Mesh((("dp", 2), ("shard", 4)))
FAST, SLOW = Link(200e9, 5e-6), Link(25e9, 10e-6)


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


def test_a_call_takes_its_starts_and_its_bytes():
    assert SLOW.start(2, 4) == pytest.approx(60e-6)
    assert SLOW.seconds(2, 4, 25e3) == pytest.approx(61e-6)
