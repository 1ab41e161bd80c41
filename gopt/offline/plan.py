"""What each choice of stage and partition would cost, without writing anything: bytes, traffic, calls, time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gopt import api
from gopt.errors import OptionError
from gopt.graph.model import COMM
from gopt.mesh import Mesh
from gopt.specialise import RankGraph
from gopt.summary import call_bytes

PARTITIONS = ("flat", "rows", "whole")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class Link:
    """A link: ``bandwidth`` in bytes a second and direction, ``latency`` in seconds a message."""

    bandwidth: float
    latency: float

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read ``200GB/s:5us``; raises OptionError on anything else."""
        match = re.fullmatch(r"([\d.]+)\s*([KMGT]?)B/s(?::([\d.]+)(us|ms|ns))?", text.strip(), re.I)
        if match is None:
            raise OptionError(f"cannot read {text!r} as a link", "write --link 200GB/s:5us")
        scale = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}[(match[4] or "us").lower()]
        rate = float(match[1]) * 1000 ** "KMGT".find(match[2].upper()) * 1000 if match[2] else float(match[1])
        return cls(rate, float(match[3] or 0) * scale)


def parse_bytes(text: str) -> int:
    """``80GB`` or ``80GiB`` -> bytes, powers of 1024; raises OptionError."""
    match = re.fullmatch(r"([\d.]+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.I)
    if match is None:
        raise OptionError(f"cannot read {text!r} as a size", "write --memory 80GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to shard, and what it costs: bytes are the largest over the ranks, traffic the mean of a step."""

    stage: int
    partition: str
    parameters: int
    optimizer_states: int
    gradients: int
    live: int
    """Largest sum of values that are alive at once beside the states: activations, gradients, gathered parameters."""
    sent: int
    bound: int
    calls: int
    balance: float
    seconds: float
    """Time of the calls one after the other on the link, with no overlap; 0 without a link."""

    @property
    def held(self) -> int:
        return self.parameters + self.optimizer_states + self.live

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "partition": self.partition,
            "bytes": {
                "parameters": self.parameters,
                "optimizer_states": self.optimizer_states,
                "gradients": self.gradients,
                "live": self.live,
                "total": self.held,
            },
            "traffic": {"sent": self.sent, "bound": self.bound, "ratio": _over(self.sent, self.bound)},
            "calls": self.calls,
            "balance": self.balance,
            "seconds": self.seconds,
        }


def _over(value: float, bound: float) -> float:
    return round(value / bound, 6) if bound else 1.0


def choices(
    source: api.Source,
    mesh: Mesh,
    *,
    stages: Sequence[int] = (0, 1, 2, 3),
    bucket_mb: float | None = None,
    link: Link | None = None,
    advance: Callable[[str], None] = lambda _: None,
) -> Iterator[Choice]:
    """Shard the step in memory in every way of the mesh and weigh the result."""
    for stage in stages:
        for partition in PARTITIONS if stage else PARTITIONS[:1]:
            advance(f"stage {stage}, {partition}")
            sharded = api.shard(source, mesh, stage=stage, partition=partition, bucket_mb=bucket_mb)
            yield weigh(sharded, stage, partition, link)


def weigh(sharded: api.Sharded, stage: int, partition: str, link: Link | None) -> Choice:
    """The cost of one sharded step."""
    report = sharded.report()
    held = {kind: max(row["bytes"][kind] for row in report["ranks"]) for kind in report["ranks"][0]["bytes"]}
    sent = [sum(call["bytes_sent"] for call in row["communication"]) for row in report["ranks"]]
    return Choice(
        stage,
        partition,
        held["parameters"],
        held["optimizer_states"],
        held["gradients"],
        max(live_bytes(sharded, rank) for rank in sharded.ranks[:: max(len(sharded.ranks) // 4, 1)]),
        round(sum(sent) / len(sent)),
        traffic_bound(sharded, stage),
        sum(call["calls"] for call in report["ranks"][0]["communication"]),
        max(report["balance"].values(), default=1.0),
        _seconds(sharded, link) if link is not None else 0.0,
    )


def traffic_bound(sharded: api.Sharded, stage: int) -> int:
    """Bytes no rank can send less of on average, for gradients and parameters in the types in which they travel.

    All-reduce over D ranks: 2(D-1)/D·G. Sharded among N of them, M groups: (N-1)/N·G to scatter, 2(M-1)/M·G/N between
    the groups, (N-1)/N·P for each gather of the parameters: one, or two at stage 3 (anchors: ring, bandwidth-optimal).
    """
    step = sharded.step
    types = step.training.graph.types
    data = step.mesh.data_group
    ranks = step.mesh.size(data) if data else 1
    gradients = sum(types[name].nbytes for name in set(step.training.gradients.values()))
    if stage == 0 or step.members == 1:
        return round(2 * (ranks - 1) / ranks * gradients)
    gathered = 0
    for node in step.graph.nodes:
        if node.domain == COMM and node.op_type == "AllGather":
            gathered += sum(step.graph.types[name].nbytes for name in node.outputs)
    members, groups = step.members, ranks // step.members
    scatter = (members - 1) / members * (gradients + gathered)
    return round(scatter + 2 * (groups - 1) / groups * gradients / members)


def live_bytes(sharded: api.Sharded, rank: RankGraph) -> int:
    """Peak of the bytes alive at once on a rank, states and constants aside, in the order of its nodes."""
    types = sharded.step.graph.types
    last: dict[str, int] = {}
    for place, node in enumerate(rank.nodes):
        for name in node.reads:
            last[name] = place
    ends: dict[int, list[str]] = {}
    for name, place in last.items():
        ends.setdefault(place, []).append(name)
    held: dict[str, int] = {}
    now = peak = 0
    for place, node in enumerate(rank.nodes):
        for name in node.outputs:
            type = rank.types.get(name) or types.get(name)
            held[name] = type.nbytes if type is not None else 0
            now += held[name]
        peak = max(peak, now)
        for name in ends.get(place, ()):
            now -= held.pop(name, 0)
    return peak


def _seconds(sharded: api.Sharded, link: Link) -> float:
    """Ring time of all calls of the first rank: latency a hop, then bytes over the bandwidth."""
    step, rank = sharded.step, sharded.ranks[0]
    total = 0.0
    for node in rank.nodes:
        if node.domain == COMM:
            hops = step.mesh.size(str(node.attributes["group"])) - 1
            hops *= 2 if node.op_type == "AllReduce" else 1
            total += hops * link.latency + call_bytes(step, rank, node) / link.bandwidth
    return total


def ranked(found: Sequence[Choice], memory: int | None) -> list[Choice]:
    """Best first: those that fit in ``memory``, then least time, least traffic, fewest bytes held."""

    def key(choice: Choice) -> tuple[bool, float, int, int, float]:
        over = memory is not None and choice.held > memory
        return over, choice.seconds, choice.sent, choice.held, choice.balance

    return sorted(found, key=key)
