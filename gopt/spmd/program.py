"""The rank-independent step: a graph with placements, and each rank's part of every state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from gopt.analysis.loss_reduction import LossReduction
from gopt.analysis.statistic_points import StatisticReduction
from gopt.analysis.synchronised_values import SynchronisedValues
from gopt.analysis.training import StateKind, TrainingGraph
from gopt.ir.graph import COMM, Graph
from gopt.ir.types import TensorType
from gopt.records.boxes import Box, box_of
from gopt.records.host_values import HostValues
from gopt.records.mesh import Mesh
from gopt.records.placements import FULLY_REPLICATED, FlatShard, OnMember, Sharding
from gopt.spmd.pass_records import PassRun
from gopt.spmd.stage_plan import StagePlan

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BucketSlice:
    """Elements of a source tensor inside a bucket: offset in the bucket, number, and offset in the tensor."""

    tensor: str
    offset: int
    elements: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class ShardedState:
    """A state as the ranks hold it.

    Sharded flat: each rank's elements of the bucket the ``slices`` make, as one 1-D tensor. Otherwise the tensor
    ``slices[0]``, placed by the sharding.
    """

    input: str
    output: str
    dtype: str
    slices: tuple[BucketSlice, ...]
    sharding: Sharding = FULLY_REPLICATED
    local: bool = False
    copy: bool = False
    """A copy of ``slices[0]``: in low precision, always the cast of the master; or of another pipeline stage."""

    @property
    def sharded(self) -> bool:
        """Return whether the state differs between ranks, or is missing on some."""
        return any(isinstance(placement, (FlatShard, OnMember)) for _, placement in self.sharding.by_axis)


@dataclass(frozen=True, slots=True)
class Accumulator:
    """A sum of gradients a rank carries through the micro-steps of an update: zero at the start.

    ``input`` -> ``output`` in both phases: ``added`` is the value after a micro-step, ``output`` the zeros left by the
    update. ``type``: of the whole sum.
    """

    input: str
    output: str
    added: str
    type: TensorType
    sharding: Sharding = FULLY_REPLICATED
    own_along: tuple[str, ...] = ()
    """Axes along which members sum other elements, in parts of a parameter."""
    reduced: bool = False
    """It sums what is equal on all ranks, such as weights that are reduced in each micro-step."""

    def present(self, coordinates: Mapping[str, int]) -> bool:
        """Return whether a rank has the sum. Every member of a bucket's axis has a part, perhaps an empty part."""
        parts = self.sharding.by_axis
        return all(isinstance(part, FlatShard) or part.covers(coordinates[axis]) for axis, part in parts)

    def local_type(self, coordinates: Mapping[str, int]) -> TensorType:
        """The type on a rank."""
        return TensorType(self.type.dtype, self.sharding.local_shape(self.type.dims, coordinates))


class PlacementExplainer(Protocol):
    """Says where the placement of a value came from."""

    def lines(self, value: str) -> list[str]: ...


@dataclass(slots=True)
class SpmdProgram:
    """The program rewritten by passes: the roles of the source, one graph for all ranks, and the mesh.

    ``states`` are in the order of the source's states; ``layout`` lists the sequences in which values are stored.
    ``micro_steps`` forwards and backwards make one update; when there are several, ``accumulators`` carry the
    gradients, and ``loop_carried`` the statistics: input -> value after a micro-step.
    """

    training: TrainingGraph
    graph: Graph
    mesh: Mesh
    states: list[ShardedState]
    layout: list[tuple[str, ...]] = field(default_factory=list)
    passes: list[PassRun] = field(default_factory=list)
    """The passes that ran, in order, with their results."""
    micro_steps: int = 1
    accumulators: list[Accumulator] = field(default_factory=list)
    loop_carried: dict[str, str] = field(default_factory=dict)
    loss_reduction: LossReduction = field(default_factory=LossReduction)
    """How the ranks' gradients become the step's."""
    reduce_dtype: str = ""
    """The type in which gradients travel; '' for their own."""
    sharded: dict[str, Sharding] = field(default_factory=dict)
    """Values that ranks hold in parts, once the program is verified."""
    source: TrainingGraph = field(init=False)
    """The step as it was read; ``training`` is what one member of it computes, once the computation is split."""
    parts: dict[str, Sharding] = field(default_factory=dict)
    """State of the source -> its sharding, where dimensions of it are."""
    fed: dict[str, Sharding] = field(default_factory=dict)
    """Input of the batch -> its sharding, where ranks are fed parts of it."""
    explanations: list[PlacementExplainer] = field(default_factory=list)
    """The effects on values of the source of axes along which the computation is split."""
    synchronised: SynchronisedValues = field(default_factory=SynchronisedValues)
    """Values that ranks average in the forward and the backward."""
    warnings: list[str] = field(default_factory=list)
    """Warnings of passes, beside their notes: options that the step contradicts."""
    reductions: dict[str, StatisticReduction] = field(default_factory=dict)
    """How the ranks' values of each statistic are combined."""
    statistics_of_root: bool = False
    """New running statistics come from the first of the ranks that see different data, and are not their mean."""
    split: dict[str, str] = field(default_factory=dict)
    """Axis that splits the computation -> the rule by which parts get their sizes."""
    stages: StagePlan | None = None
    """The stages of a pipeline; None where the mesh has no axis of stages."""
    value_stages: dict[str, int] = field(default_factory=dict)
    """Value of a stage -> the stage of the node behind the value."""
    host: HostValues = field(default_factory=HostValues)
    """The values in the memory of the host, beside a device."""
    places: tuple[Mapping[str, int], ...] = ()
    """Where the ranks of this program stand on the axes that split the computation; (): all ranks are of it."""
    others: list[SpmdProgram] = field(default_factory=list)
    """The programs of the other ranks, whose parts have other sizes. Passes do to them what they do to this one."""
    first: SpmdProgram | None = None
    """The program whose ``others`` has this one."""
    _found: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _found_for: tuple[object, ...] = field(default=(), init=False, repr=False, compare=False)
    """The lists of nodes and states behind ``_found``."""

    def __post_init__(self) -> None:
        self.source = self.training

    def __repr__(self) -> str:
        did = f"{len(self.graph.nodes)} nodes, {len(self.passes)} passes applied"
        return f"<SpmdProgram {self.graph.name} on {self.mesh}: {did}>"

    @property
    def variants(self) -> tuple[SpmdProgram, ...]:
        """The programs of all ranks: a program for each class of ranks with parts of equal sizes."""
        return (self, *self.others)

    def of(self, rank: int) -> SpmdProgram:
        """The variant a rank runs."""
        return self.at(self.mesh.coordinates(rank))

    def at(self, coordinates: Mapping[str, int]) -> SpmdProgram:
        """The variant run at some coordinates."""
        return next(variant for variant in self.variants if variant._has(coordinates))

    def _has(self, at: Mapping[str, int]) -> bool:
        return not self.places or any(
            all(at[axis] == at_axis for axis, at_axis in coordinates.items()) for coordinates in self.places
        )

    @property
    def weighed(self) -> Mapping[str, TensorType]:
        """Return the types for weighing values in passes: the first variant's, so that all variants decide
        alike."""
        return (self.first or self).graph.types

    def once(self, question: Hashable, find: Callable[[], T]) -> T:
        """Return the cached result of ``find`` for ``question``, which must concern the nodes and states only.

        It is found again once either list was replaced: a pass changing some assigns another. The returned object is
        shared: callers must not change it.
        """
        lists = (self.graph.nodes, self.states)
        if len(self._found_for) != 2 or any(before is not now for before, now in zip(self._found_for, lists)):
            self._found, self._found_for = {}, lists
        if question not in self._found:
            self._found[question] = find()
        answer: T = self._found[question]
        return answer

    @property
    def applied(self) -> list[str]:
        """The names of the passes that ran."""
        return [run.record.name for run in self.passes]

    @classmethod
    def start(cls, training: TrainingGraph, mesh: Mesh, micro_steps: int = 1) -> SpmdProgram:
        """Every state whole on every rank, the graph a copy of the source."""
        program = cls(training, training.graph.copy(), mesh, [], micro_steps=micro_steps)
        program.hold_whole()
        return program

    def hold_whole(self) -> None:
        """Let every rank hold every state of ``training`` whole."""
        types = self.training.graph.types
        self.set_states([
            ShardedState(
                s.tensor, s.updated, types[s.tensor].dtype, (BucketSlice(s.tensor, 0, types[s.tensor].elements),)
            )
            for s in self.training.states
        ])  # fmt: skip

    def fork(self) -> SpmdProgram:
        """The program as it stands, once more with the variants, for passes tried on it.

        The fork has new graphs and lists, and shares the rest.
        """
        program = self._alone()
        program.others = [variant._alone() for variant in self.others]
        for sibling in program.others:
            sibling.first = program
        return program

    def _alone(self) -> SpmdProgram:
        program = copy(self)
        program.graph = self.graph.twin()
        program.states, program.layout, program.passes = list(self.states), list(self.layout), list(self.passes)
        program.accumulators, program.explanations = list(self.accumulators), list(self.explanations)
        program.loop_carried, program.sharded = dict(self.loop_carried), dict(self.sharded)
        program.value_stages = dict(self.value_stages)
        return program

    def split_along(self, gradient: str) -> tuple[str, ...]:
        """Return the axes along which members have different parts of a gradient."""
        if not self.parts:
            return ()
        shardings = {self.parts.get(name) for name in self.training.weights_of(gradient)}
        sharding = (
            shardings.pop() if len(shardings) == 1 else None
        )  # of parameters that are not split alike it is whole
        return sharding.sharding_axes if sharding is not None else ()

    def box(self, tensor: str, coordinates: Mapping[str, int]) -> Box | None:
        """Return a rank's part of a state with sharded dimensions; None: the whole state."""
        sharding = self.parts.get(tensor)
        if sharding is None:
            return None
        return box_of(sharding, self.source.graph.types[tensor].dims, coordinates)

    def fed_boxes(self, coordinates: Mapping[str, int]) -> dict[str, Box]:
        """Return the parts of batch inputs fed to a rank, for inputs fed in parts."""
        types = self.source.graph.types
        boxes = {name: box_of(sharding, types[name].dims, coordinates) for name, sharding in self.fed.items()}
        return {name: box for name, box in boxes.items() if box is not None}

    def set_states(self, states: list[ShardedState]) -> None:
        """Set ``states`` as the ranks' states, and update the graph's inputs and outputs."""
        source, types = self.training.graph, self.graph.types
        inputs = {state.tensor for state in self.training.states}
        outputs = {state.updated for state in self.training.states}
        self.states = states
        self.graph.inputs = {name: type for name, type in source.inputs.items() if name not in inputs}
        self.graph.outputs = {name: type for name, type in source.outputs.items() if name not in outputs}
        for state in states:
            self.graph.inputs[state.input] = types[state.input]
            self.graph.outputs[state.output] = types[state.output]
        for accumulator in self.accumulators:
            self.graph.inputs[accumulator.input] = types[accumulator.input]
            self.graph.outputs[accumulator.output] = types[accumulator.output]
        self.graph.initializers = {name: tensor for name, tensor in source.initializers.items() if name not in inputs}

    def results(self) -> set[str]:
        """Return every value leaving the step or a phase."""
        names = {*self.training.shown, *self.loop_carried.values()}
        names.update(state.output for state in self.states)
        return names.union(*((accumulator.output, accumulator.added) for accumulator in self.accumulators))

    def phase_results(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the results of a micro-step and of the update: output -> value."""
        summed = {accumulator.input for accumulator in self.accumulators}
        for node in self.graph.nodes:
            if not summed.isdisjoint(node.reads):
                summed.update(node.outputs)
        shown = self.training.shown
        micro = {accumulator.output: accumulator.added for accumulator in self.accumulators}
        update = {accumulator.output: accumulator.output for accumulator in self.accumulators}
        statistics = {state.tensor for state in self.training.states if state.kind is StateKind.STATISTIC}
        for state in self.states:
            if state.input in self.loop_carried:
                micro[state.output] = self.loop_carried[state.input]
            moves = state.input in statistics and state.input not in self.loop_carried  # in each micro-step
            single = moves and state.output not in summed
            (micro if single else update)[state.output] = state.output
        micro.update({name: name for name in shown if name not in summed})
        update.update({name: name for name in shown if name in summed})
        return micro, update

    def live_nodes(self) -> set[int]:
        """Return the ids of all calls and of the nodes needed for a result of the step. A sweep."""
        needed, live = self.results(), set()
        for node in reversed(self.graph.nodes):
            if node.domain == COMM or not needed.isdisjoint(node.outputs):
                live.add(id(node))
                needed.update(node.reads)
        return live

    def copies(self) -> dict[str, ShardedState]:
        """Low-precision copies by parameter; behind the pass stage-transfers, of other stages too."""
        return {state.slices[0].tensor: state for state in self.states if state.copy}
