"""Gathers of parameters, from the owners of elements to the reading nodes.

Behind the update (stages 1 and 2): every rank holds whole parameters, or their narrow copies, and the new values are
gathered at the end. Before the use (stage 3): a rank holds a shard alone; each bucket is gathered before its first
reader in the forward and once more for the backward, unless nothing else is gathered in between."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gopt.analysis.training import Phase
from gopt.analysis.updates import UpdateSubgraph
from gopt.ir.graph import Node
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType, dtype_code
from gopt.passes.shard import emit
from gopt.records.placements import OnMember, Sharding
from gopt.spmd.program import ShardedState, SpmdProgram


@dataclass(frozen=True, slots=True)
class OwnedParameter:
    """A part of a bucket's parameters, of a class or a tensor: before and after the update."""

    current: str
    updated: str
    sharding: Sharding
    elements: int


@dataclass(frozen=True, slots=True)
class GatherBucket:
    """The parameters of a bucket to gather: ``cuts`` for one call, None for a broadcast by each owner."""

    bucket: str
    subgraphs: tuple[UpdateSubgraph, ...]
    parts: tuple[OwnedParameter, ...]
    cuts: tuple[int, ...] | None


@dataclass(slots=True)
class _Readers:
    """Readers of a bucket's parameters, in the order of the file: in the forward and in the backward."""

    forward: list[Node]
    backward: list[Node]


@dataclass(slots=True)
class ParameterGather:
    """Writes the gathers. ``sharded``: ranks hold shards of parameters (stage 3), except parameters of fewer than
    ``persist`` elements; ``regather``: the backward gathers once more."""

    program: SpmdProgram
    rewriter: GraphRewriter
    group: str
    sharded: bool
    regather: bool
    persist: int = 0
    copies: dict[str, ShardedState] = field(default_factory=dict)
    _readers: dict[str, _Readers] = field(default_factory=dict)
    _position: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.copies = self.program.copies()
        if not self.sharded:
            return
        names = {state.tensor for state in self.program.training.parameters}
        names |= {copy.input for copy in self.copies.values()}
        for position, node in enumerate(self.program.training.graph.nodes):
            for name in dict.fromkeys(node.reads) if node.phase is not Phase.UPDATE else ():
                reader = self.rewriter.lookup(node) if name in names else None
                if reader is not None:
                    users = self._readers.setdefault(name, _Readers([], []))
                    (users.backward if node.phase is Phase.BACKWARD else users.forward).append(reader)
                    self._position[id(reader)] = position

    def wire_type(self, subgraph: UpdateSubgraph) -> str:
        """The type of the low-precision copy in which a parameter is sent; '' without a copy."""
        copy = self.copies.get(subgraph.parameter.tensor)
        return copy.dtype if copy is not None else ""

    def gathered_before_use(self, subgraph: UpdateSubgraph) -> bool:
        """Return whether a parameter is gathered before its reads, and not behind the update."""
        return self.sharded and self.program.weighed[subgraph.parameter.tensor].elements >= self.persist

    def owned(self, subgraph: UpdateSubgraph) -> bool:
        """Return whether owners alone hold the parameter, or its master, as with other states."""
        return self.gathered_before_use(subgraph) or bool(self.wire_type(subgraph))

    def behind_update(self, parcel: GatherBucket) -> None:
        """Write the gather of a bucket's new parameters, unless gathered before use.

        The casts to low-precision copies go: the copies are gathered."""
        for subgraph in parcel.subgraphs:
            copy = self.copies.get(subgraph.parameter.tensor)
            if copy is not None:
                self.rewriter.discard(copy.output)
        if self.gathered_before_use(parcel.subgraphs[0]):
            return
        outputs = [
            self.copies[subgraph.parameter.tensor].output if self.wire_type(subgraph) else subgraph.parameter.updated
            for subgraph in parcel.subgraphs
        ]
        self._send(parcel, self._packed(parcel, [part.updated for part in parcel.parts], None), outputs, None)

    def dropped_copies(self, parcels: Iterable[GatherBucket]) -> set[str]:
        """Low-precision copies dropped between steps, since they are gathered before use."""
        return {
            self.copies[subgraph.parameter.tensor].input
            for parcel in parcels if self.gathered_before_use(parcel.subgraphs[0])
            for subgraph in parcel.subgraphs if self.wire_type(subgraph)
        }  # fmt: skip

    def before_use(self, parcels: Iterable[GatherBucket]) -> dict[str, int]:
        """Write the gathers of all buckets gathered before use; returns figures for the report."""
        windows = []
        for parcel in parcels:
            if not self.gathered_before_use(parcel.subgraphs[0]):
                continue
            names = [self._read_as(subgraph) for subgraph in parcel.subgraphs]
            self._state_shapes(names)
            groups = [self._readers[name] for name in names if name in self._readers]
            nodes = _Readers(
                [n for item in groups for n in item.forward], [n for item in groups for n in item.backward]
            )
            windows.append((parcel, names, nodes))
        starts = sorted(
            self._at(nodes)[0] for _, _, item in windows for nodes in (item.forward, item.backward) if nodes
        )
        reused = 0
        for parcel, names, nodes in windows:
            before = self.rewriter.earliest(nodes.forward or nodes.backward)
            packed = self._packed(parcel, [part.current for part in parcel.parts], before)
            self._send(parcel, packed, names, before)
            if not (self.regather and nodes.forward and nodes.backward) or self._apart:
                continue
            end, start = self._at(nodes.forward)[1], self._at(nodes.backward)[0]
            if bisect_left(starts, start) <= bisect_right(starts, end):
                reused += 1  # nothing else is gathered in between: dropping it would free nothing in time
                continue
            self._send_regather(parcel, packed, names, nodes.backward)
        return {"gathered_before_use": len(windows), "kept_for_backward": reused} if self.sharded else {}

    @property
    def _apart(self) -> bool:
        """Whether forward and backward are actions of a schedule: each runs the gathers behind its operands
        (``StageActions``)."""
        return self.program.stages is not None and self.program.micro_steps > 1

    def _at(self, nodes: Sequence[Node]) -> tuple[int, int]:
        positions = [self._position[id(node)] for node in nodes]
        return min(positions), max(positions)

    def _read_as(self, subgraph: UpdateSubgraph) -> str:
        """The name of a parameter for its readers in forward and backward."""
        copy = self.copies.get(subgraph.parameter.tensor)
        return subgraph.parameter.tensor if copy is None else copy.input

    def _send_regather(
        self, parcel: GatherBucket, packed: Sequence[str], names: Sequence[str], backward: Sequence[Node]
    ) -> None:
        regather = {name: emit.named(parcel.bucket, f"again{position}") for position, name in enumerate(names)}
        for old, new in regather.items():
            self.rewriter.graph.types[new] = self.rewriter.graph.types[old]
            for node in self._readers[old].backward if old in self._readers else ():
                self.rewriter.rewire(node, old, new)
        self._send(parcel, packed, list(regather.values()), self.rewriter.earliest(backward))

    def _send(self, parcel: GatherBucket, packed: Sequence[str], outputs: Sequence[str], before: Node | None) -> None:
        """The call, or one call per owner, from owned values to whole ones under the names ``outputs``."""
        if parcel.cuts is not None:
            emit.all_gather(self.rewriter, self.group, packed[0], parcel.cuts, outputs, before=before)
            return
        for part, source, output in zip(parcel.parts, packed, outputs):
            owner = part.sharding.on(self.group)
            assert isinstance(owner, OnMember)
            emit.broadcast(self.rewriter, self.group, owner.member, source, output, before=before)

    def _state_shapes(self, names: Sequence[str]) -> None:
        """A reader of a shape alone needs no gather: the shape becomes a constant."""
        for name in names:
            users = self._readers.get(name, _Readers([], []))
            for readers in (users.forward, users.backward):
                for node in [item for item in readers if item.is_a("Shape") and not item.attributes]:
                    readers.remove(node)
                    output, dims = node.outputs[0], list(self.rewriter.graph.types[name].dims)
                    self.rewriter.remove(node, f"the shape of {name} is known")
                    self.rewriter.constant(output, dims, before=node)

    def _packed(self, parcel: GatherBucket, values: Sequence[str], before: Node | None) -> list[str]:
        """The owned values to send: in low precision if there is a copy; for a gather as one shard, on every rank."""
        narrow, names = self.wire_type(parcel.subgraphs[0]), []
        for position, (name, part) in enumerate(zip(values, parcel.parts)):
            if narrow:
                sent = emit.named(parcel.bucket, f"narrow{position}")
                outputs = {sent: TensorType(narrow, self.rewriter.graph.types[name].shape)}
                attributes = {"to": dtype_code(narrow)}
                self.rewriter.add("Cast", [name], outputs, attributes=attributes, sharding=part.sharding, before=before)
            names.append(sent if narrow else name)
        if parcel.cuts is None or (len(names) == 1 and all(start < stop for start, stop in pairwise(parcel.cuts))):
            return names
        joined = emit.named(parcel.bucket, "parameters")
        dtype = narrow or self.rewriter.graph.types[parcel.subgraphs[0].parameter.tensor].dtype
        sizes = [part.elements for part in parcel.parts]
        emit.local_concat(self.rewriter, self.group, names, joined, dtype, sizes, before=before)
        return [joined]
