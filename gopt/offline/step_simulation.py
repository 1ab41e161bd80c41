"""Runs the nodes of a step in order, in time: a compute stream for each stage, a link for each axis of the mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gopt.ir.graph import COMM, RECOMPUTE, Node
from gopt.ir.host_copies import HOST
from gopt.lower.lowered import AHEAD_RECEIVE, AHEAD_SEND, RECEIVE, SEND
from gopt.records.mesh import PIPELINE
from gopt.records.placements import FULLY_REPLICATED, OnMember
from gopt.spmd.stage_plan import transfers


class Delivery(NamedTuple):
    """The time of arrival of a value from a link, and whether another stage is the sender."""

    time: float
    from_stage: bool


@dataclass(slots=True)
class ComputeStream:
    """The compute stream of a member, and the links, in seconds. ``clock``: the end of the work so far, the sum of
    ``compute`` and ``recompute`` of nodes, of waits for calls and starts of calls (``exposed``), of waits for stages,
    and of ``fixed`` seconds of runs. ``free``: for each axis, the end of the last call; ``arrivals``: of results of
    calls; ``computing``: whether the last node took time and was no call."""

    clock: float = 0.0
    compute: float = 0.0
    recompute: float = 0.0
    exposed: float = 0.0
    fixed: float = 0.0
    free: dict[str, float] = field(default_factory=dict)
    arrivals: dict[str, Delivery] = field(default_factory=dict)
    computing: bool = False

    def wait(self, names: Iterable[str]) -> None:
        """Wait for values from calls, or from other stages."""
        arrivals = self.arrivals
        for name in names:
            if name in arrivals and arrivals[name].time > self.clock:
                late, self.clock = arrivals[name].time - self.clock, arrivals[name].time
                if not arrivals[name].from_stage:
                    self.exposed += late

    def open(self, seconds: float) -> None:
        """Spend time on the run of a file, or on the start of a segment."""
        self.clock += seconds
        self.fixed += seconds
        self.computing = False

    def start(self, seconds: float) -> None:
        """Spend time on a call's start."""
        self.clock += seconds
        self.exposed += seconds
        self.computing = False

    def compute_from(self, segment: float) -> None:
        """Begin to compute, in a new segment after a call."""
        if not self.computing:
            self.open(segment)
            self.computing = True

    def finish(self) -> None:
        """Wait for all calls."""
        end = max([self.clock, *self.free.values()])
        self.exposed += end - self.clock
        self.clock = end


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds beside the nodes. ``transfers``: tag of a transfer between stages -> seconds on the link; ``start``: of
    each call, and ``message``: of each transfer, without any computation on the member; ``segment``: of the nodes
    between two calls; ``overlaps``: whether a member computes during a call."""

    transfers: Mapping[int, float] = field(default_factory=dict)
    start: float = 0.0
    message: float = 0.0
    segment: float = 0.0
    overlaps: bool = True


class StepSimulation:
    """The members of the pipeline's axis; all ranks beside a member do the same at the same time.

    A call starts when the operands are there and the links of the axes are free; a node starts when all nodes before
    are done and the operands are there. ``apart``: transfers between stages take no time here; ``sent`` has their
    seconds for each member.
    """

    def __init__(self, members: int, prices: Prices, apart: bool = False) -> None:
        self.prices, self.apart = prices, apart
        self.streams = [ComputeStream() for _ in range(members)]
        self.sent = [0.0] * members

    def run(self, nodes: Sequence[Node], seconds: Sequence[float]) -> None:
        """Run nodes in order; ``seconds``: of each node, and of each call on its link. Linear time."""
        everyone = self.streams
        for node, time in zip(nodes, seconds, strict=True):
            if transfers(node):
                self._transfer(node)
                continue
            streams = everyone
            if node.sharding is not FULLY_REPLICATED:
                placement = node.sharding.on(PIPELINE)
                streams = [everyone[placement.member]] if isinstance(placement, OnMember) else everyone
            for stream in streams:
                if node.domain == COMM:
                    self._call(stream, node, time)
                elif node.domain == HOST:
                    self._copy(stream, node, time)
                else:
                    if stream.arrivals:
                        stream.wait(node.reads)
                    if time:
                        stream.compute_from(self.prices.segment)
                    stream.clock += time
                    if node.made_by == RECOMPUTE:
                        stream.recompute += time
                    else:
                        stream.compute += time

    def finish(self) -> float:
        """Wait for all calls; returns the end of the last member."""
        for stream in self.streams:
            stream.finish()
        return max(stream.clock for stream in self.streams)

    def _call(self, stream: ComputeStream, node: Node, time: float) -> None:
        stream.start(self.prices.start)
        axes = str(node.attributes["group"]).split("+")
        ready = [stream.arrivals[name].time for name in node.reads if name in stream.arrivals]
        begin = max([stream.clock, *ready, *(stream.free.get(axis, 0.0) for axis in axes)])
        end = begin + time
        stream.free.update(dict.fromkeys(axes, end))
        stream.arrivals.update(dict.fromkeys(node.outputs, Delivery(end, False)))
        if not self.prices.overlaps:
            stream.wait(node.outputs[:1])

    def _copy(self, stream: ComputeStream, node: Node, time: float) -> None:
        """A copy between device and host starts behind the copies before, and behind the nodes before."""
        ready = [stream.arrivals[name].time for name in node.inputs if name in stream.arrivals]
        end = max([stream.clock, *ready, stream.free.get(HOST, 0.0)]) + time
        stream.free[HOST] = end
        stream.arrivals[node.outputs[0]] = Delivery(end, False)

    def _transfer(self, node: Node) -> None:
        """A value goes from a stage to others; of an action, the sending or the receiving half."""
        attributes, half = node.attributes, node.attributes.get("half")
        seconds = self.prices.transfers[attributes["tag"]]
        receivers = self._receivers(node)
        sender = self.streams[attributes["source"]]
        if half in (None, SEND, AHEAD_SEND):
            sender.wait(node.reads)
            sender.start(self.prices.message)
            self.sent[attributes["source"]] += seconds * len(receivers)
        if self.apart:
            for number in receivers if half in (None, RECEIVE, AHEAD_RECEIVE) else ():
                self.streams[number].start(self.prices.message)
            return
        begin = max(sender.clock, sender.free.get(PIPELINE, 0.0))
        for number in receivers:
            begin += seconds
            delivery = Delivery(begin + self.prices.message, True)
            self.streams[number].arrivals.update(dict.fromkeys(node.outputs, delivery))
            self.streams[number].computing = False
        sender.free[PIPELINE] = begin

    def _receivers(self, node: Node) -> Sequence[int]:
        source, target = node.attributes["source"], node.attributes["target"]
        if target >= 0:
            return [target]
        if node.attributes.get("half") is not None:
            later: Sequence[int] = node.attributes["later"]
            return later
        return [number for number in range(len(self.streams)) if number != source]
