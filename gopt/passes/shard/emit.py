"""Adds layout operators and calls to the rank-independent graph; ``specialise`` resolves them for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gopt.collectives.layout import format_shape
from gopt.ir.graph import COMM, SPMD, Node
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType
from gopt.records.placements import FULLY_REPLICATED, Sharding
from gopt.spmd.program import BucketSlice


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of calls: ``shard`` shares out states, ``outer`` has equal shards, ``data`` is both together.

    None is a group of one rank."""

    shard: str
    outer: str | None
    data: str | None


def named(bucket: str, role: str) -> str:
    """``gopt.shard.<bucket>.<role>`` (contract section 4)."""
    return f"gopt.shard.{bucket}.{role}"


def flat(dtype: str, elements: int) -> TensorType:
    """Elements of a bucket, on all ranks together; each rank has a part as a 1-D tensor."""
    return TensorType(dtype, (elements,))


def run(dtype: str, sharding: Sharding) -> TensorType:
    """The elements of a bucket shared out by a sharding."""
    assert sharding.flat is not None
    _, span = sharding.flat
    return flat(dtype, span.stop - span.start)


def local_slice(
    rewriter: GraphRewriter, slices: Sequence[BucketSlice], sharding: Sharding, output: str, dtype: str
) -> None:
    """The rank's elements of a run, cut out of whole tensors with the bucket's ``slices``."""
    sources = [item.tensor for item in slices]
    sizes, wholes = [item.elements for item in slices], [rewriter.graph.types[name].elements for name in sources]
    attributes = {"starts": [item.offset for item in slices], "sizes": sizes}
    if sizes != wholes:
        attributes |= {"firsts": [item.start for item in slices], "wholes": wholes}
    rewriter.add(
        "LocalSlice", sources, {output: run(dtype, sharding)}, domain=SPMD, attributes=attributes, sharding=sharding
    )


def shard_slice(rewriter: GraphRewriter, source: str, sharding: Sharding, output: str, dtype: str) -> None:
    """The rank's elements of a run, cut out of the rank's part of the bucket."""
    rewriter.add("ShardSlice", [source], {output: run(dtype, sharding)}, domain=SPMD, sharding=sharding)


def local_concat(
    rewriter: GraphRewriter,
    group: str,
    sources: Sequence[str],
    output: str,
    dtype: str,
    sizes: Sequence[int],
    before: Node | None = None,
) -> None:
    """The rank's parts of several values, one after the other; absent parts are left out.

    ``sizes``: elements of each value on all members of the group together.
    """
    attributes = {"group": group, "sizes": list(sizes)}
    outputs = {output: flat(dtype, sum(sizes))}
    rewriter.add("LocalConcat", sources, outputs, domain=SPMD, attributes=attributes, before=before)


def select(
    rewriter: GraphRewriter, group: str, source: str, output: str, reduce: str, of: Sequence[str]
) -> None:  # fmt: skip
    """A term of a reduction over a group where the term exists; on every other rank the neutral element. ``of``: the
    results of the source with this part."""
    attributes = {"group": group, "reduce": reduce, "of": list(of)}
    rewriter.add("Select", [source], {output: rewriter.graph.types[source]}, domain=SPMD, attributes=attributes)


def reduce_scatter(
    rewriter: GraphRewriter, group: str, gradients: Sequence[str], cuts: Sequence[int], output: str, kind: str = "mean"
) -> None:
    """The mean (or sum) of the gradients over the group; each member keeps one part of the bucket."""
    dtype = rewriter.graph.types[gradients[0]].dtype
    attributes = {"group": group, "reduce": kind, "cuts": list(cuts)}
    rewriter.add(
        "ReduceScatter", gradients, {output: flat(dtype, cuts[-1])}, domain=COMM, attributes=attributes,
        after=rewriter.latest(gradients),
    )  # fmt: skip


def reduce(rewriter: GraphRewriter, group: str, root: int, gradient: str, output: str, kind: str = "mean") -> None:
    """The mean (or sum) of one gradient over the group, on its ``root`` member alone."""
    attributes = {"group": group, "reduce": kind, "root": root}
    outputs = {output: rewriter.graph.types[gradient]}
    rewriter.add("Reduce", [gradient], outputs, domain=COMM, attributes=attributes, after=rewriter.latest([gradient]))


def all_gather(
    rewriter: GraphRewriter,
    group: str,
    source: str,
    cuts: Sequence[int],
    outputs: Sequence[str],
    before: Node | None = None,
) -> None:
    """All members' parts of a bucket, as whole tensors."""
    types = {name: rewriter.graph.types[name] for name in outputs}
    shapes = [format_shape(type.dims) for type in types.values()]
    attributes = {"group": group, "cuts": list(cuts), "shapes": shapes}
    rewriter.add("AllGather", [source], types, domain=COMM, attributes=attributes, before=before)


def broadcast(
    rewriter: GraphRewriter, group: str, root: int, source: str, output: str, before: Node | None = None
) -> None:
    """The ``root`` member's tensor on every member; ``specialise`` takes the input from the others."""
    type = rewriter.graph.types[output]
    shapes = [format_shape(type.dims)]
    attributes = {"group": group, "root": root, "dtype": type.dtype, "shapes": shapes}
    rewriter.add("Broadcast", [source], {output: type}, domain=COMM, attributes=attributes, before=before)


def all_reduce(
    rewriter: GraphRewriter,
    group: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    reduce: str,
    sharding: Sharding = FULLY_REPLICATED,
) -> None:
    """One packed call over tensors of one dtype."""
    types = {new: rewriter.graph.types[old] for old, new in zip(inputs, outputs)}
    rewriter.add(
        "AllReduce", inputs, types, domain=COMM, attributes={"group": group, "reduce": reduce}, sharding=sharding,
        after=rewriter.latest(inputs),
    )  # fmt: skip
