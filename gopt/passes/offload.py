"""Keep optimizer states, and values between forward and backward, in the memory of the host."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from gopt.analysis.training import Phase, StateKind
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, descendants
from gopt.ir.host_copies import HOST, TO_DEVICE, TO_HOST
from gopt.ir.phase import complete_phases
from gopt.operators.kinds import VIEWS
from gopt.passes.base import Pass
from gopt.records.host_values import HostValues
from gopt.records.mesh import PIPELINE
from gopt.records.pass_facts import OffloadFacts, PassOptions
from gopt.records.placements import OnMember
from gopt.records.topology import parse_bytes
from gopt.spmd.host_memory import copied, copied_bytes
from gopt.spmd.local_sizes import LocalSizes
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram
from gopt.spmd.schedule_memory import on_rank
from gopt.spmd.stage_plan import transfers
from gopt.spmd.step_memory import held_on_host, live, members
from gopt.spmd.traffic import calls_of
from gopt.text.sanitize import show
from gopt.text.suggestions import did_you_mean

OFFLOAD = "offload"
STATES, ACTIVATIONS = "states", "activations"
_SIZE = re.compile(r"[0-9.]+\s*([KMGT](i?B)?|B)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class OffloadOptions(PassOptions):
    """The options of offload say which values are in the memory of the host."""

    what: str = STATES
    """The text lists, with commas or semicolons between, states: optimizer states, and parameters that the forward
    reads as a copy; activations: values of the forward that the backward reads; patterns over names of states, of
    values and of their nodes; or the most bytes that a rank has alive at once on the device beside its states, such as
    200MiB, for as few activations as that takes."""
    least: str = "1KiB"
    """A value smaller than this is moved only where a pattern matches it."""


def offload(program: SpmdProgram, options: OffloadOptions) -> PassResult:
    """Keep optimizer states, and values between forward and backward, in the memory of the host.

    Requires: to run last. Guarantees: the graphs of ranks stay the same; an engine with a device copies the values, and
    runs the update of states on the host there. On the wire between ranks: nothing.
    """
    if program.first is not None:  # all variants move the same values
        program.host = program.first.host
        return PassResult()
    complete_phases(program.graph.nodes)
    movable, most = Movable(program), None
    states, values = set[str](), set[str]()
    least = parse_bytes(options.least)
    for word in filter(None, (word.strip() for word in re.split("[,;]", options.what))):
        if word == STATES:
            states.update(name for name in movable.states if movable.nbytes(name) >= least)
        elif word == ACTIVATIONS:
            values.update(name for name in movable.activations if movable.nbytes(name) >= least)
        elif _SIZE.fullmatch(word):
            most = parse_bytes(word)
        else:
            of_states, of_values = movable.matches(word)
            states |= of_states
            values |= of_values
    before = _peaks(program)
    program.host = HostValues(tuple(name for name in movable.states if name in states), tuple(sorted(values)))
    if most is not None:
        for member, peak in _peaks(program).items():
            if peak > most:
                named = [name for name in movable.longest_first(member) if movable.nbytes(name) >= least]
                program.host = _under(program, member, named, most)
    if not program.host.states and not program.host.activations:
        why = "a rank has no more bytes alive at once" if most is not None else f"no value has {options.least} or more"
        return PassResult(note=f"{why}: nothing is moved to the host")
    return PassResult(facts=_facts(program, max(before.values())))


class Movable:
    """Values for the memory of the host. ``states``: inputs of ranks; ``activations``: value -> positions
    of the node that makes it and of the first reader in the backward."""

    def __init__(self, program: SpmdProgram) -> None:
        self.program, self.graph = program, program.graph
        self.makers = {name: node for node in self.graph.nodes for name in node.outputs}
        read_early = {name for node in self.graph.nodes if node.phase is not Phase.UPDATE for name in node.reads}
        self._captured = {name for node in self.graph.nodes for name in node.captures}
        kinds = {state.tensor: state.kind for state in program.training.states}
        narrow = program.copies()
        self.states = [
            state.input for state in program.states
            if not state.copy and state.input not in read_early | self._captured
            and self.graph.types[state.input].elements > 1  # a number, such as the count of steps, is read everywhere
            and (kinds[state.slices[0].tensor] is StateKind.OPTIMIZER_STATE or state.slices[0].tensor in narrow)
        ]  # fmt: skip
        self.activations = dict(self._activations())

    def _activations(self) -> Iterator[tuple[str, tuple[int, int]]]:
        graph, program = self.graph, self.program
        batch = descendants(GraphIndex(graph), program.training.batch)
        results, roots = program.results() | self._captured, dict[str, str]()
        produced: dict[str, int] = {}
        late: dict[str, int] = {}
        for position, node in enumerate(graph.nodes):
            if node.is_in(VIEWS) and node.outputs[0] not in results:
                roots[node.outputs[0]] = roots.get(node.inputs[0], node.inputs[0])
                continue
            if node.phase is Phase.BACKWARD:
                for name in node.reads:
                    late.setdefault(roots.get(name, name), position)
            elif node.phase is Phase.FORWARD and self._on_stage(node):
                produced.update((name, position) for name in node.outputs if name in batch and name not in results)
        for name, position in produced.items():
            if name in late and graph.type_of(name).static:
                yield name, (position, late[name])

    def _on_stage(self, node: Node) -> bool:
        """Return whether a node is of one stage, where there are stages."""
        one = transfers(node) and not transfers(node, to_all=True)
        return self.program.stages is None or one or isinstance(node.sharding.on(PIPELINE), OnMember)

    def nbytes(self, name: str) -> int:
        return self.graph.type_of(name).nbytes

    def longest_first(self, member: int) -> list[str]:
        """The activations of a member of the axis of stages, by the number of nodes without a reader in between."""
        names = [name for name in self.activations if self._member(name) == member]
        return sorted(names, key=lambda name: self.activations[name][0] - self.activations[name][1])

    def _member(self, name: str) -> int:
        node = self.makers[name]
        if transfers(node):
            return int(node.attributes["target"])
        placement = node.sharding.on(PIPELINE)
        return placement.member if isinstance(placement, OnMember) else 0

    def matches(self, pattern: str) -> tuple[set[str], set[str]]:
        """The states and activations of a pattern; raises OptionError for a pattern without a match, UnsupportedError
        for a match of immovable values."""
        tensors = {state.input: {part.tensor for part in state.slices} for state in self.program.states}
        states = {
            name for name in self.states
            if any(fnmatchcase(text, pattern) for text in (name, *tensors[name]))
        }  # fmt: skip
        values = {
            name for name in self.activations
            if fnmatchcase(name, pattern) or fnmatchcase(self.makers[name].name, pattern)
        }  # fmt: skip
        if not states and not values:
            candidates = sorted(
                {*self.makers, *self.graph.inputs, *(name for names in tensors.values() for name in names)}
            )
            matched = next((name for name in candidates if fnmatchcase(name, pattern)), None)
            if matched is None:
                hint = did_you_mean(pattern, [*self.states, *self.activations]) or "see the values with gopt inspect"
                raise OptionError(f"--offload: {show(pattern)} is not states, activations, bytes or a value", hint)
            raise UnsupportedError(
                f"--offload: {show(matched)} cannot be on the host",
                "name an optimizer state, or a value of the forward that the backward reads",
            )
        return states, values


def _under(program: SpmdProgram, member: int, names: Sequence[str], most: int) -> HostValues:
    """The values on the host, and as few further activations of a member as the peak takes; raises UnsupportedError."""
    host, trial = program.host, program.fork()

    def peak(count: int) -> int:
        for variant in trial.variants:
            variant.host = with_values(host, names[:count])
        return _peaks(trial)[member]

    counts = [*(1 << power for power in range(len(names).bit_length())), len(names)]
    tried = {count: peak(count) for count in counts}  # more values may mean more copies that are early
    high = next((count for count, bytes in tried.items() if bytes <= most), 0)
    if not high:
        raise UnsupportedError(
            f"--offload: a rank has at least {min(tried.values())} bytes alive on its device, and {most} may be",
            "allow more, shard the step further, or add --recompute",
        )
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if peak(middle) <= most else (middle, high)
    return with_values(host, names[:high])


def with_values(host: HostValues, names: Sequence[str]) -> HostValues:
    """The same with further activations."""
    return replace(host, activations=tuple(sorted({*host.activations, *names})))


def _peaks(program: SpmdProgram) -> Mapping[int, int]:
    """The peak of live bytes of each member of the axis of stages on the device; without stages, of member 0."""
    peaks: dict[int, int] = {}
    for at in members(program):
        variant, member = program.at(at), at.get(PIPELINE, 0)
        peaks[member] = max(peaks.get(member, 0), live(variant, calls_of(variant), at).peak)
    return peaks


def _facts(program: SpmdProgram, before: int) -> OffloadFacts:
    """The figures of the rank with the most copies."""
    host = program.host
    update = program.fork()
    moved = {TO_HOST: 0, TO_DEVICE: 0}
    activation_bytes = on_host = 0
    for variant in (update, *update.others):
        variant.host = replace(host, activations=())
    for at in members(program):
        variant, sizes = update.at(at), LocalSizes.at(program.at(at), at)
        nodes = on_rank(variant.graph.nodes, at)
        step = copied(variant, nodes, sizes)
        results = {name for node in nodes for name in node.outputs}
        saved = sum(map(sizes.nbytes, results.intersection(host.activations)))
        copies = {kind: nbytes + saved * program.micro_steps for kind, nbytes in copied_bytes(step, sizes).items()}
        if sum(copies.values()) > sum(moved.values()):
            moved = copies
        activation_bytes = max(activation_bytes, saved)
        hosted = [node for node in step.nodes if node.domain != HOST and not step.on_host.isdisjoint(node.outputs)]
        on_host = max(on_host, len(hosted))
    return OffloadFacts(
        states=len(host.states), state_bytes=max(held_on_host(program)), activations=len(host.activations),
        activation_bytes=activation_bytes, nodes=on_host, to_host=moved[TO_HOST], to_device=moved[TO_DEVICE],
        live_bytes_before=before, live_bytes=max(_peaks(program).values()),
    )  # fmt: skip


PASS = Pass(
    OFFLOAD, OffloadOptions, offload,
    after=(
        "pipeline", "tensor-parallel", "hoist-casts", "shard", "refold-optimizers", "statistics", "stage-transfers",
        "fuse-collectives", "recompute", "overlap", "prune",
    ), facts=OffloadFacts,
)  # fmt: skip
