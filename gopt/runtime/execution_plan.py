"""Plans a rank's program before memory is allocated: steps, buffers, and buffers for ranks to share.

Every rank plans (here), the ranks agree on shared memory, and each rank allocates and compiles
(``gopt.runtime.executor``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gopt.ir.graph import COMM, Graph
from gopt.ir.opaque.expand import expand
from gopt.ir.types import TensorType
from gopt.records.host_values import HostValues
from gopt.runtime.device import HOST, Device
from gopt.runtime.emulate_half import emulate_half
from gopt.runtime.fold_transposes import fold_transposes
from gopt.runtime.host_side import ON_DEVICE, with_host
from gopt.runtime.inlined_functions import inlined
from gopt.runtime.partition import CallStep, CopyStep, OverwritingSegment, ProgramStep, Segment, partition
from gopt.runtime.planner.assignment import BufferAssignment, MemberIndex
from gopt.runtime.planner.hazards import OrderedGather, find_hazards
from gopt.runtime.shared_memory import GatherRequest, SendRequest, SharedMemory

ProgramPart: TypeAlias = Segment | OverwritingSegment | CallStep | CopyStep


@dataclass(frozen=True, slots=True)
class FinalPlan:
    """A plan with known shared buffers.

    ``aliases``: number of a step -> result -> the overwritten operand. ``waits``: for every step, the values that must
    be available before the step runs."""

    assignment: BufferAssignment
    aliases: Mapping[int, Mapping[str, str]]
    waits: Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """The plan of one rank's graph, or of a graph without collectives.

    ``graph``: lowered for the device. ``replaces``: output -> the state with this value in the next step."""

    graph: Graph
    device: Device
    replaces: Mapping[str, str]
    plans_memory: bool
    assignment: BufferAssignment
    """With all buffers that ranks may share."""
    types: dict[str, TensorType]
    parts: Sequence[ProgramPart]
    steps: Sequence[ProgramStep]
    """The parts, each as its segment or call."""
    ordered: Mapping[int, OrderedGather]
    """Number of a gather -> when its buffer is read and written, where ranks may share it."""
    hosted: frozenset[str] = frozenset()
    """Values in the memory of the host, beside a device."""

    def send_requests(self) -> dict[int, SendRequest]:
        """Number of a call -> the buffer it could share."""
        return {
            number: SendRequest(send.call, send.count, send.dtype)
            for number, send in self.assignment.sends.items() if number in self.assignment.donatable
        }  # fmt: skip

    def gather_requests(self) -> dict[int, GatherRequest]:
        """Number of a gather -> the buffer it could share."""
        return {number: gather.request for number, gather in self.ordered.items()}

    def calls(self) -> list[str]:
        """The group of every call, by number in the file."""
        return [str(node.attributes["group"]) for node in self.graph.nodes if node.domain == COMM]

    def resolve(self, shared: SharedMemory) -> FinalPlan:
        """Return the plan with the granted shared buffers. All other shards stay in memory of this rank."""
        refused = {call for call in self.assignment.local_shards.values() if call not in shared.gathers}
        assignment = self.assignment.without(refused)
        sent = assignment.send_names.union(
            *(send.names for number, send in assignment.sends.items() if number in shared.sends)
        )
        waits = [list(step.inputs) for step in self.steps]
        for number, gather in self.ordered.items():
            if number in shared.gathers and gather.waits_for is not None:
                waits[gather.step].append(gather.waits_for)
        aliases = _input_aliases(self.parts, self.steps, self.graph, self.replaces, assignment, sent)
        return FinalPlan(assignment, aliases, [tuple(names) for names in waits])


def plan_execution(
    graph: Graph, replaces: Mapping[str, str] | None = None, device: Device = HOST, member: MemberIndex | None = None,
    host: HostValues = ON_DEVICE,
) -> ExecutionPlan:  # fmt: skip
    """Plan a graph, which is not changed. Linear time.

    ``replaces`` is given for training: long elementwise runs are tiled, a result that replaces a state may overwrite
    the array fed for the state, and the data sent by one call lies in one buffer. Without ``replaces`` no fed array is
    written. ``member``: group -> this rank's position in the group; None where ranks share no memory. ``host``: values
    in the memory of the host, if the device has another."""
    graph = inlined(expand(graph, "gopt.run"))
    graph = fold_transposes(emulate_half(graph)) if device.emulates_half else graph
    hosted = frozenset[str]()
    if device.has_host and host != ON_DEVICE:
        graph, hosted = with_host(graph, host, replaces or {})
    tuning = device.tuning
    trains = replaces is not None
    assignment = device.assign_buffers(graph, replaces, member) if replaces is not None else BufferAssignment(graph)
    types = assignment.graph.types | assignment.graph.inputs
    parts: list[ProgramPart] = []
    for step in partition(assignment.graph, hosted):
        parts += tuning.split(step, types) if trains and isinstance(step, Segment) else [step]
    steps = [part.segment if isinstance(part, OverwritingSegment) else part for part in parts]
    aliases = _input_aliases(parts, steps, graph, replaces or {}, assignment, assignment.send_names)
    ordered = find_hazards(assignment, steps, aliases)
    plans_memory = trains and tuning.plans_memory
    return ExecutionPlan(graph, device, replaces or {}, plans_memory, assignment, types, parts, steps, ordered, hosted)


def _input_aliases(
    parts: Sequence[ProgramPart], steps: Sequence[ProgramStep], graph: Graph, replaces: Mapping[str, str],
    buffers: BufferAssignment, sent: frozenset[str],
) -> dict[int, dict[str, str]]:  # fmt: skip
    """Number of a part -> result -> the overwritten operand. ``sent``: results in the buffer of a call."""
    last = {name: number for number, step in enumerate(steps) for name in step.inputs}
    read_until: dict[int, int] = {}
    """Number of a gather -> the last step that reads what it made in the buffer of a local shard."""
    for number, gather in buffers.gathers.items():
        read_until[number] = max(last.get(name, -1) for name in gather.outputs)
    aliases, outputs = {}, frozenset(graph.outputs)
    for number, part in enumerate(parts):
        if not isinstance(part, OverwritingSegment):
            continue
        rows: dict[str, str] = {}
        for output in part.segment.outputs:
            state = replaces.get(output)
            if state is not None and last.get(state) == number and state not in outputs:
                extent = buffers.slices.get(state)
                if extent is None or state not in buffers.local_shards or read_until[extent.call] < number:
                    rows[output] = state
            row = buffers.input_alias(output, part.rows, number, last)
            if row is not None:
                rows[output] = row
        aliases[number] = {output: row for output, row in rows.items() if row in part.rows and output not in sent}
    return aliases
