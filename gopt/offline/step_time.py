"""The time of a step on a device: nodes by the roofline, in the order of the file, beside the calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from gopt.ir.graph import COMM, Node
from gopt.ir.host_copies import HOST
from gopt.lower.phases import UPDATE, LoweredPhase, phases
from gopt.offline.device import DeviceFigures
from gopt.offline.roofline import node_works
from gopt.offline.step_simulation import ComputeStream, Prices, StepSimulation
from gopt.offline.times import call_times
from gopt.records.host_values import HostValues
from gopt.records.mesh import PIPELINE
from gopt.records.placements import OnMember
from gopt.records.topology import Topology
from gopt.spmd.host_memory import copied
from gopt.spmd.local_sizes import LocalSizes
from gopt.spmd.program import SpmdProgram
from gopt.spmd.stage_plan import transfers
from gopt.spmd.traffic import calls_of


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, the sum of the other fields; parts are a mean over the stages.

    ``compute``: nodes of the step; ``recompute``: nodes in a second run; ``exposed``: calls and copies while a rank
    does not compute, and starts of calls; ``bubble``: waits for other stages; ``fixed``: seconds of the device for each
    run of a file and each step."""

    seconds: float
    compute: float
    recompute: float
    exposed: float
    bubble: float
    fixed: float


@dataclass(frozen=True, slots=True)
class Machine:
    """A device for each rank, and the links between ranks."""

    device: DeviceFigures
    topology: Topology


TimedNodes = tuple[Sequence[Node], Sequence[float]]
"""Nodes in order, and the seconds of each."""


class Clock:
    """Times the nodes of a program on the ranks at some coordinates, for all members along ``pp``."""

    def __init__(self, program: SpmdProgram, machine: Machine, coordinates: Mapping[str, int]) -> None:
        self.program, self.device, self.topology = program, machine.device, machine.topology
        self.coordinates = {axis: at for axis, at in coordinates.items() if axis != PIPELINE}
        self.members = program.mesh.size(PIPELINE) if program.stages is not None else 1
        self.sizes = LocalSizes.at(program, coordinates)
        self._calls: dict[str, float] = {}
        """First output of a call -> seconds on the link."""
        self._final = program.phase_results() if program.micro_steps > 1 else ({}, {})
        """Of a micro-step and of the update: the name of a result in the file -> the name in the step."""
        self.prices = self._prices()

    def run(self, phase: LoweredPhase, *, apart: bool = False) -> StepSimulation:
        """Simulate the file of a phase; ``apart``: transfers between stages take no time here."""
        simulation = StepSimulation(self.members, self.prices, apart)
        self.add(simulation, self.timed(phase))
        return simulation

    def add(self, simulation: StepSimulation, timed: TimedNodes) -> None:
        """Run a file in a simulation, and wait for all calls."""
        for stream in simulation.streams:
            stream.open(self.device.run)
        simulation.run(*timed)
        simulation.finish()

    def timed(self, phase: LoweredPhase) -> TimedNodes:
        """The nodes of a phase on the ranks, with the copies between device and host, and the seconds of each."""
        nodes = [node for node in phase.graph.nodes if _covers(node, self.coordinates)]
        program, device, sizes, results = self.program, self.device, self.sizes, phase.graph.outputs
        original = self._final[phase.name == UPDATE]
        if device.host_link is None or program.host == HostValues():
            works = node_works(nodes, sizes, results, device.fuse_from)
            return nodes, [
                self._call(node, original) if node.domain == COMM else work.seconds(device)
                for node, work in zip(nodes, works)
            ]
        moved = set(program.host.activations)
        step = copied(program, nodes, sizes, moved.difference(*(node.outputs for node in nodes)), moved & {*results})
        sizes, original = sizes.renamed(step.original), {**original, **step.original}
        rate = device.efficiency * device.host_link
        seconds = []
        for node, work in zip(step.nodes, node_works(step.nodes, sizes, {*results, *step.original}, device.fuse_from)):
            if node.domain == COMM:
                seconds.append(self._call(node, original))
            elif node.domain == HOST:
                seconds.append(device.launch + sizes.nbytes(node.outputs[0]) / rate)
            elif step.on_host.isdisjoint(node.outputs):
                seconds.append(work.seconds(device))
            else:
                seconds.append(work.launches * device.launch + work.nbytes / device.host_stream)
        return step.nodes, seconds

    def _call(self, node: Node, original: Mapping[str, str]) -> float:
        """Seconds of a call on its link. ``original``: a name in a file -> the name in the step."""
        name = node.outputs[0]
        while name in original and original[name] != name:
            name = original[name]
        return self._calls[name]

    def _prices(self) -> Prices:
        """The calls, on links; all ranks of a stage make the calls of the stage."""
        program, calls, device = self.program, self._calls, self.device
        for call in calls_of(program):
            start, moving = call_times(call, self.topology, math.inf if device.adding is None else device.adding)
            of_stage = program.stages is not None and isinstance(call.node.sharding.on(PIPELINE), OnMember)
            calls[call.node.outputs[0]] = start + moving * (self.members if of_stage else 1)
        seconds = {}
        for node in program.graph.nodes if program.stages is not None else ():
            if transfers(node):
                link = self.topology.of(PIPELINE)
                seconds[node.attributes["tag"]] = link.seconds(1, 2, sum(map(self.sizes.nbytes, node.inputs)))
        message = device.call if device.message is None else device.message
        return Prices(seconds, device.call, message, device.segment, device.overlaps)


def _covers(node: Node, coordinates: Mapping[str, int]) -> bool:
    """Return whether a rank runs a node on some stage."""
    return all(axis == PIPELINE or part.covers(coordinates[axis]) for axis, part in node.sharding.by_axis)


def step_time(program: SpmdProgram, machine: Machine, coordinates: Mapping[str, int]) -> StepTime:
    """The time of a step without a schedule of micro-batches, on the ranks at some coordinates.

    Micro-steps run in turn, then the update. Raises UnsupportedError where the update depends on a batch
    other than through gradients."""
    clock, device = Clock(program, machine, coordinates), machine.device
    if program.micro_steps == 1:
        return total(clock.run(phases(program)[0]).streams, device)
    runs = [(phase.times, clock.run(phase)) for phase in phases(program)]
    return total([joined([stream for times, simulation in runs for stream in simulation.streams * times])], device)


def joined(streams: Sequence[ComputeStream]) -> ComputeStream:
    """Streams in a row."""
    return ComputeStream(
        sum(stream.clock for stream in streams), sum(stream.compute for stream in streams),
        sum(stream.recompute for stream in streams), sum(stream.exposed for stream in streams),
        sum(stream.fixed for stream in streams),
    )  # fmt: skip


def total(streams: Sequence[ComputeStream], device: DeviceFigures) -> StepTime:
    """The time of the members of a pipeline, from the streams at the end of a step."""
    end = max(stream.clock for stream in streams)
    compute, recompute = fmean(stream.compute for stream in streams), fmean(stream.recompute for stream in streams)
    exposed, fixed = fmean(stream.exposed for stream in streams), fmean(stream.fixed for stream in streams)
    waits = end - compute - recompute - exposed - fixed
    bubble = waits if waits > 1e-9 * end else 0.0  # not the rounding of a sum
    return StepTime(end + device.step, compute, recompute, exposed, bubble, fixed + device.step)
