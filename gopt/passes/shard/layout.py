"""Names and layout operators of the rank-independent graph; ``specialise`` resolves them for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gopt.graph.edit import Draft
from gopt.graph.model import COMM, SPMD, Node
from gopt.graph.place import Span
from gopt.graph.types import TensorType


@dataclass(frozen=True, slots=True)
class Groups:
    """Who talks to whom: ``shard`` splits the states, ``outer`` holds equal shards, ``data`` is both together."""

    shard: str
    outer: str | None
    data: str


def named(bucket: str, role: str) -> str:
    """``gopt.shard.<bucket>.<role>`` (contract section 4)."""
    return f"gopt.shard.{bucket}.{role}"


def flat(dtype: str) -> TensorType:
    """A 1-D tensor whose length is the rank's."""
    return TensorType(dtype, (None,))


def local_part(
    draft: Draft, sources: Sequence[str], starts: Sequence[int], span: Span, output: str, dtype: str
) -> None:
    """The rank's elements of a span, cut out of whole tensors that lie at ``starts`` of the bucket."""
    sizes = [draft.graph.types[name].elements for name in sources]
    attributes = {"starts": list(starts), "sizes": sizes}
    draft.add("Local", sources, {output: flat(dtype)}, domain=SPMD, attributes=attributes, place=span)


def segment(draft: Draft, source: str, span: Span, output: str, dtype: str) -> None:
    """The rank's elements of a span, cut out of its part of the bucket."""
    draft.add("Segment", [source], {output: flat(dtype)}, domain=SPMD, place=span)


def join(draft: Draft, sources: Sequence[str], output: str, dtype: str, before: Node | None = None) -> None:
    """The rank's parts of several spans, one after the other; spans the rank has not are left out."""
    draft.add("Join", sources, {output: flat(dtype)}, domain=SPMD, before=before)


def guard(draft: Draft, source: str, output: str, fill: float | int) -> None:
    """A value where it exists, ``fill`` on every other rank."""
    draft.add("Guard", [source], {output: draft.graph.types[source]}, domain=SPMD, attributes={"fill": fill})


def reduce_scatter(draft: Draft, group: str, gradients: Sequence[str], cuts: Sequence[int], output: str) -> None:
    """The mean of the gradients over the group; each member keeps its part of the bucket."""
    dtype = draft.graph.types[gradients[0]].dtype
    attributes = {"group": group, "reduce": "mean", "cuts": list(cuts)}
    draft.add(
        "ReduceScatter", gradients, {output: flat(dtype)}, domain=COMM, attributes=attributes,
        after=draft.latest(gradients),
    )  # fmt: skip


def reduce_shard(draft: Draft, groups: Groups, gradients: Sequence[str], cuts: Sequence[int], output: str) -> None:
    """The mean of the gradients over all ranks that see different data, as the member's part of the bucket.

    Scattered inside the sharding group first; what is left travels over the outer one.
    """
    if groups.outer is None:
        reduce_scatter(draft, groups.shard, gradients, cuts, output)
        return
    inner = f"{output}.inner"
    reduce_scatter(draft, groups.shard, gradients, cuts, inner)
    all_reduce(draft, groups.outer, [inner], [output], "mean")


def reduce_whole(draft: Draft, groups: Groups, bucket: str, gradients: Sequence[str]) -> dict[str, str]:
    """The mean of the gradients on every rank; returns gradient -> its reduced value."""
    reduced = {name: named(bucket, f"gradient{place}") for place, name in enumerate(gradients)}
    all_reduce(draft, groups.data, gradients, list(reduced.values()), "mean")
    return reduced


def all_gather(
    draft: Draft,
    group: str,
    source: str,
    cuts: Sequence[int],
    outputs: Sequence[str],
    before: Node | None = None,
) -> None:
    """All members' parts of a bucket, as whole tensors."""
    types = {name: draft.graph.types[name] for name in outputs}
    shapes = [",".join(map(str, type.dims)) for type in types.values()]
    attributes = {"group": group, "cuts": list(cuts), "shapes": shapes}
    draft.add("AllGather", [source], types, domain=COMM, attributes=attributes, before=before)


def all_reduce(draft: Draft, group: str, inputs: Sequence[str], outputs: Sequence[str], reduce: str) -> None:
    """One packed call over tensors of one dtype."""
    types = {new: draft.graph.types[old] for old, new in zip(inputs, outputs)}
    draft.add(
        "AllReduce", inputs, types, domain=COMM, attributes={"group": group, "reduce": reduce},
        after=draft.latest(inputs),
    )  # fmt: skip
