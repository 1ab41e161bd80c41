"""Estimates the time of a step's calls on the links between ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from gopt.collectives.table import COLLECTIVES
from gopt.records.topology import Topology
from gopt.spmd.traffic import CollectiveCall


@dataclass(frozen=True, slots=True)
class CommTimes:
    """Seconds of a step's calls: all calls one after the other; the part hidden by no computation, and its latency."""

    total: float
    exposed: float
    latency: float


def times(calls: Iterable[CollectiveCall], topology: Topology) -> CommTimes:
    """Ring times (anchors: section 4.6): (n-1)·α a round and the bytes sent over the bandwidth.

    Where shares are uneven the ring waits for the largest. The bytes of a call with independent heavy work between the
    issue and the first reader count as hidden; the latency does not, for every call costs a start."""
    total = exposed = latency = 0.0
    for call in calls:
        start, bytes_ = call_times(call, topology)
        total += start + bytes_
        exposed += start + (0.0 if call.hidden else bytes_)
        latency += start
    return CommTimes(total, exposed, latency)


def call_times(call: CollectiveCall, topology: Topology, adding: float = math.inf) -> tuple[float, float]:
    """Seconds of a call until the first byte, and of the bytes sent by a rank; ``adding``: bytes that a rank adds in a
    second where the call combines values."""
    group = str(call.node.attributes["group"])
    link, record = topology.of(group), COLLECTIVES[call.node.op_type]
    sent = call.sent * _skew(call)
    return link.start(record.rounds, topology.mesh.size(group)), sent / link.bandwidth + record.added(sent) / adding


def _skew(call: CollectiveCall) -> float:
    """The largest share of a call over the mean share."""
    cuts = call.node.attributes.get("cuts")
    if not cuts or not cuts[-1]:
        return 1.0
    return float(max(stop - start for start, stop in itertools.pairwise(cuts)) * (len(cuts) - 1) / cuts[-1])
