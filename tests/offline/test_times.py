"""How long the calls of a step take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import source

import gopt
from gopt.offline.times import call_times, times
from gopt.records.mesh import Mesh
from gopt.records.topology import Topology
from gopt.spmd.traffic import find_calls


def one_link(ranks: int) -> Topology:
    return Topology.parse("200GB/s:5us", Mesh((("shard", ranks),)))


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


def test_calls_that_combine_values_add_those_of_one_round():
    """Of a bucket of B bytes each of four members adds 3/4·B, whether the sum then goes around or not."""
    for stage, added in ((0, {"AllReduce": 0.5}), (1, {"ReduceScatter": 1.0, "AllGather": 0.0})):
        calls = find_calls(gopt.shard(source("mlp_adamw"), 4, stage=stage).program)
        assert {call.node.op_type for call in calls} == added.keys()
        for call in calls:
            start, free = call_times(call, one_link(4))
            more = added[call.node.op_type] * 200 * free  # a link of 200 GB/s, shares as uneven as those sent
            assert call_times(call, one_link(4), 1e9) == (start, pytest.approx(free + more))
