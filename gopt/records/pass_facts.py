"""The facts of passes as records: the figures of each pass in the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Annotated, Any

from gopt.documents.records import OPTIONAL, Amount, Bounds, Count, Loose, key, one_of, to_document

Figure = Count
TrafficKind = Annotated[str, one_of("gradients", "parameters", "other")]
Share = Annotated[float, Bounds(minimum=0, maximum=1)]
SIZES = one_of("balanced", "ceil", "floor-last")
STATISTICS = one_of("auto", "mean", "root", "local", "sync")
STAGES = Bounds(minimum=0)


def figures_of(facts: Any) -> Mapping[str, Any]:
    """Return the facts of a pass, a record of this file or a table like it, as the report has them."""
    return to_document(facts) if is_dataclass(facts) else facts


@dataclass(frozen=True, slots=True)
class PassRecord:
    """A pass run: the options as resolved, and the figures."""

    name: str
    """The pass has this name."""
    options: Mapping[str, Any]
    """The table has the options of the pass as resolved; its keys depend on the pass, and null means that none was
    given."""
    facts: Mapping[str, Any] = field(repr=False)
    """The table has the figures of the pass; its keys depend on the pass, and it is empty when the pass did nothing."""
    note: str = field(default="", metadata=OPTIONAL)
    """The note says in words what is special, mostly why the pass did nothing; the key is absent when nothing is."""


class PassOptions(Loose):
    """The options of a pass, as the report has them."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class MappingFacts:
    """A region mapping that the source had already."""

    mapping: str
    """The text names the mapping, such as gather from region."""
    group: str
    """The mapping goes over these mesh axes."""
    call: str
    """The forward has this operator; the text is empty where it hands the value on."""
    value: str
    """The forward makes this value; the text is empty where it hands a value on and nothing marks it."""
    dual: str
    """The backward has this operator, or identity where it hands the gradient on; the text is empty where no call was
    found."""
    gradient: str
    """The dual makes this value; the text is empty where there is no call."""


@dataclass(frozen=True, slots=True)
class TensorParallelFacts(Loose):
    """The figures of tensor-parallel say what is split; they are absent where nothing is."""

    parameters: Mapping[str, str]
    """The table has the parameters that are split. The text says why the parameter is split, and how."""
    mappings: Mapping[str, Count]
    """The table has the region mappings that were put in. This many mappings of the kind were put in."""
    source_mappings: tuple[MappingFacts, ...]
    """The list has the region mappings that the source had already, along axes whose ranks see the same samples; it is
    absent without such mappings. The entry is one mapping, with its dual."""
    computed_whole: Mapping[str, Count]
    """The table has the nodes that all members compute whole although an operand is sharded. The results of the node
    have this many bytes."""


@dataclass(frozen=True, slots=True)
class HoistFacts(Loose):
    """The figures of hoist-casts count casts of parameters."""

    parameters: Count
    """Ranks keep a low-precision copy of this many parameters; the key is absent without such copies."""
    casts_removed: Count
    """The pass removed this many casts of the source; the key is absent when there is no low-precision copy."""


@dataclass(frozen=True, slots=True)
class BucketFacts(Loose):
    """A bucket of the pass ``shard``."""

    name: str
    """The bucket has this name, which stands in the names of its nodes and values."""
    mode: Annotated[str, one_of("split", "whole", "replicated")]
    """The mode says who updates the tensors of the bucket: the members split them, one owner has each whole, or every
    rank that holds the tensors does all: a single rank on a mesh without data axes."""
    tensors: tuple[str, ...]
    """The parameters of the bucket stand in this order. Each item is the name of a parameter."""
    nbytes: Count = field(metadata=key("bytes"))
    """The gradients of the bucket, as the backward makes them, have this many bytes."""
    dtype: str
    """The gradients of the bucket have elements of this type."""
    closed_because: str
    """The text says why no further tensor is in the bucket."""
    classes: Count | None = field(default=None, metadata=OPTIONAL)
    """The bucket has this many runs of tensors of one class; the key is absent when the mode is not split."""
    reasons: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    """The list says why the updates are not split; the key is absent when the mode is split."""

    def sharing(self, data_ranks: int) -> str:
        """The mode for people; ``data_ranks``: ranks with different samples."""
        return "not shared" if data_ranks == 1 else self.mode


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts(Loose):
    """The figures of shard describe its buckets and its calls."""

    gathered_before_use: Count | None = field(default=None, metadata=OPTIONAL)
    """This many groups of parameters are gathered before their first reader; the key is absent below stage 3."""
    kept_for_backward: Count | None = field(default=None, metadata=OPTIONAL)
    """This many of those are not gathered again for the backward, since nothing else is gathered in between; the key is
    absent below stage 3."""
    scalar_calls: Count
    """This many calls complete scalars over all gradients, such as norms."""
    scalars: Count
    """The calls complete this many scalars."""
    bucket_cap_bytes: Count
    """A bucket has at most this many bytes of gradients, unless it is one tensor."""
    parameters: Mapping[str, Count]
    """The table counts parameters by the mode of their update: split between the members of the group, whole on one
    owner each, or replicated on every rank; a mode without parameters is absent."""
    buckets: tuple[BucketFacts, ...]
    """The list has the buckets in the order in which their gradients are complete."""


@dataclass(frozen=True, slots=True)
class ExpandedWeights(Loose):
    """Weights of an opaque optimizer whose updates stay written out in standard operators, and why."""

    weights: tuple[str, ...]
    """The reason holds for these weights. Each item is the name of a weight."""
    why: str
    """The text says why the operator is not put back."""


@dataclass(frozen=True, slots=True)
class OperatorFacts(Loose):
    """An opaque optimizer behind the pass ``refold-optimizers``."""

    name: str
    """The node has this name, or has this value as its first output where it has no name."""
    operator: str
    """The node has this operator."""
    kept: Count
    """The operator still updates this many weights."""
    merged: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    """The updates of these weights run as a part of another weight's update; the key is absent without such weights.
    Each item is the name of a weight."""
    expanded: tuple[ExpandedWeights, ...] = field(default=(), metadata=OPTIONAL)
    """The list has the weights whose updates stay written out in standard operators; the key is absent without such
    weights. Each item is the weights that have one reason in common."""


@dataclass(frozen=True, slots=True)
class RefoldFacts(Loose):
    """The figures of refold-optimizers say what became of each opaque optimizer."""

    operators: tuple[OperatorFacts, ...]
    """The list has the nodes of opaque optimizers; the key is absent when the source has none. Each item is one node of
    the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFacts(Loose):
    """The figures of pipeline count parameters by stage; the table is empty on a mesh without axis pp."""

    parameters: tuple[Count, ...]
    """The list has the number of parameters of each stage, in order. Each item is the number of one stage."""
    elements: tuple[Count, ...]
    """The list has the number of elements of these parameters, stage by stage. Each item is the number of one stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTransferFacts(Loose):
    """The figures of stage-transfers count nodes and transfers; the table is empty on a mesh without axis pp."""

    transfers: Count
    """This many values are sent from a stage to another, or to all others."""
    nodes: tuple[Count, ...]
    """The list has the number of nodes that each stage runs alone. Each item is the number of one stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsFacts(Loose):
    """The figures of statistics count what the pass did."""

    averaged: Count | None = field(default=None, metadata=OPTIONAL)
    """This many running statistics are averaged; the key is absent when none is."""
    of_root: Count | None = field(default=None, metadata=OPTIONAL)
    """This many running statistics come from the group's first rank; the key is absent without statistics=root."""
    local: Count | None = field(default=None, metadata=OPTIONAL)
    """This many running statistics stay each rank's own; the key is absent without statistics=local."""
    reduced: Count | None = field(default=None, metadata=OPTIONAL)
    """This many running statistics are made of sums, means or extremes that ranks reduce; the key is absent when none
    is."""
    calls: Count | None = field(default=None, metadata=OPTIONAL)
    """They are averaged, reduced, or sent by the first rank, by this many calls; the key is absent when none is."""
    synchronised: Count | None = field(default=None, metadata=OPTIONAL)
    """This many values of the source are averaged as soon as they are made; the key is absent without
    statistics=sync."""


@dataclass(frozen=True, slots=True)
class FusedCalls(Loose):
    """Calls that could be joined with one another."""

    kind: str
    """The calls are of this collective."""
    group: str
    """The calls run over this group."""
    root: Count | None = field(default=None, metadata=OPTIONAL, kw_only=True)
    """The member of this index in the group is the root; the key is absent when the collective has no root."""
    reduce: str = field(default="", metadata=OPTIONAL, kw_only=True)
    """The calls reduce in this way; the key is absent when the collective reduces nothing."""
    dtype: str
    """The elements that the calls carry have this type."""
    cap_bytes: Count
    """A joined call carries at most this many bytes, unless it is one call as it was."""
    calls_before: Count
    """There were this many calls before the pass."""
    calls_after: Count
    """There are this many calls behind the pass."""
    packing_bound: Count
    """No packing under the cap has fewer calls than this."""


@dataclass(frozen=True, slots=True)
class NeighbourCalls(Loose):
    """Two consecutive calls."""

    first: str
    """The first call has this name, or has this value as its first output where it has no name."""
    second: str
    """The second call has this name, or has this value as its first output where it has no name."""
    why: str
    """The text says why the two calls are not one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionFacts(Loose):
    """The figures of fuse-collectives say which calls were joined, and why not more."""

    fused_calls: Count
    """The pass made this many calls out of several."""
    reduce_broadcast: Count
    """This many pairs of a Reduce and a Broadcast became one AllReduce."""
    reduce_slice: Count
    """This many AllReduce calls whose results were sliced became part of a ReduceScatter."""
    reduce_reduce: Count | None = field(default=None, metadata=OPTIONAL)
    """This many pairs of AllReduce calls, over one axis and then over another, became one AllReduce call over both; the
    key is absent when there were none."""
    keys: tuple[FusedCalls, ...]
    """The list has the sets of calls that could be joined with one another. Each item is one such set, described by
    what its calls have in common."""
    neighbours: tuple[NeighbourCalls, ...]
    """The list has every pair of consecutive calls, and why they are two."""


@dataclass(frozen=True, slots=True)
class HeldGather(Loose):
    """A gather that could not be issued earlier."""

    call: str
    """The gather has this name, or has this value as its first output where it has no name."""
    why: str
    """The text says what held it."""


@dataclass(frozen=True, slots=True)
class OverlapFacts(Loose):
    """The figures of overlap say what calls can hide behind, right behind the pass."""

    hidden_share: Amount
    """This share of all bytes sent, 0 to 1, has independent heavy computation to hide behind."""
    by_kind: Mapping[str, Amount]
    """The table gives the same share by what is sent: gradients, parameters, and other for scalars and running
    statistics; a kind that is not sent is absent."""
    peak_gathered_bytes: Count
    """Values that are gathered before their use have at most this many bytes at once."""
    gathers: Count
    """The step has this many gathers before use."""
    prefetched: Count
    """This many of them are issued before the first node that reads their results."""
    moved_earlier: Count
    """The pass moved this many calls to where their inputs are complete."""
    held_back: tuple[HeldGather, ...]
    """The list has the gathers that could not be issued as early as prefetch asks."""


@dataclass(frozen=True, slots=True)
class RecomputeFacts(Loose):
    """The figures of recompute say what the backward computes again, and what that saves; they are absent where it
    computes nothing again."""

    saved: Count
    """This many values of the forward are saved until the backward reads them."""
    recomputed: Count
    """This many values that the backward reads are computed again."""
    nodes: Count
    """The backward has copies of this many nodes."""
    saved_bytes_before: Count
    """The values of the forward that the backward reads had this many bytes before the pass."""
    saved_bytes: Count
    """The saved values have this many bytes behind the pass."""
    live_bytes_before: Count
    """A rank had at most this many bytes alive at once beside its states before the pass."""
    live_bytes: Count
    """A rank has at most this many bytes alive at once beside its states behind the pass."""
    operations: Count
    """The products and convolutions of the source take this many floating-point operations."""
    operations_added: Count
    """The products and convolutions of the copies take this many."""


@dataclass(frozen=True, slots=True)
class OffloadFacts(Loose):
    """The figures of offload say what is in the memory of the host, and what is copied for it; they are absent where
    nothing is."""

    states: Count
    """This many states of ranks stay in the memory of the host."""
    state_bytes: Count
    """A rank has at most this many bytes of states there."""
    activations: Count
    """This many values of the forward are moved to the host in between."""
    activation_bytes: Count
    """A rank moves at most this many bytes of them for one micro-batch."""
    nodes: Count
    """At most this many nodes of the update of a rank run on the host."""
    to_host: Count
    """The rank that copies most copies this many bytes to the host in one step, all its micro-steps included."""
    to_device: Count
    """The same rank copies this many bytes to the device."""
    live_bytes_before: Count
    """A rank had at most this many bytes alive at once beside its states before the pass."""
    live_bytes: Count
    """A rank has at most this many bytes alive at once on the device beside its states behind the pass."""


@dataclass(frozen=True, slots=True)
class PruneFacts(Loose):
    """The figure of prune counts nodes."""

    nodes: Count
    """The pass removed this many nodes."""
