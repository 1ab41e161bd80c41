"""Emits whole and replicated buckets: unchanged updates, on the owner or on every rank."""

from __future__ import annotations

from gopt.analysis.updates import UpdateSubgraph
from gopt.errors import UnsupportedError
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType
from gopt.passes.shard import emit
from gopt.passes.shard.emitted_bucket import EmittedBucket
from gopt.passes.shard.gradient_reduction import GradientReduction, ReducedGradients, ReducedValue
from gopt.passes.shard.parameter_gather import GatherBucket, OwnedParameter
from gopt.passes.shard.plan import ReplicatedBucket, TransferStyle, WholeBucket
from gopt.passes.shard.scalar_reductions import PartialScalar, ScalarReductions
from gopt.records.placements import Sharding
from gopt.spmd.program import BucketSlice, ShardedState


def emit_replicated(bucket: ReplicatedBucket, reduction: GradientReduction) -> EmittedBucket:
    """Reduce the gradients of a bucket on every rank; the updates stay unchanged."""
    return EmittedBucket(
        reduced=reduction.everywhere(bucket.name, [subgraph.gradient for subgraph in bucket.subgraphs])
    )


def emit_whole(
    rewriter: GraphRewriter,
    bucket: WholeBucket,
    style: TransferStyle,
    scalars: ScalarReductions,
    reduction: GradientReduction,
    *,
    owned: bool,
) -> EmittedBucket:
    """Bring whole gradients to their owners and run each update there. ``owned``: owners alone hold the parameters."""
    types = rewriter.graph.types
    out = EmittedBucket(reduced=_reduce(rewriter, bucket, style, scalars, reduction))
    parts = []
    for position, subgraph in enumerate(bucket.subgraphs):
        part = _run_on_owner(rewriter, bucket, position, owned=owned)
        out.scalars += partial_scalars(rewriter, bucket, position, scalars)
        parts.append(part if style is TransferStyle.BROADCAST else _flat(rewriter, bucket, position, part, scalars))
        for state in subgraph.states[0 if owned else 1 :]:
            input = part.current if state is subgraph.parameter else state.tensor
            whole = BucketSlice(state.tensor, 0, types[state.tensor].elements)
            out.states[state.tensor] = ShardedState(
                input, state.updated, types[state.tensor].dtype, (whole,), bucket.owned(position)
            )
            out.layout.append((state.tensor,))
    cuts = None if style is TransferStyle.BROADCAST else bucket.cuts
    out.parameters = GatherBucket(bucket.name, bucket.subgraphs, tuple(parts), cuts)
    if not owned:
        out.layout.insert(0, tuple(subgraph.parameter.tensor for subgraph in bucket.subgraphs))
    return out


def _reduce(
    rewriter: GraphRewriter,
    bucket: WholeBucket,
    style: TransferStyle,
    scalars: ScalarReductions,
    reduction: GradientReduction,
) -> ReducedGradients:
    """Reduce each gradient to the ranks of its update."""
    gradients = [subgraph.gradient for subgraph in bucket.subgraphs]
    if any(subgraph.whole_gradient for subgraph in bucket.subgraphs):
        return reduction.everywhere(bucket.name, gradients)
    if style is TransferStyle.BROADCAST:
        return reduction.to_owners(bucket.name, gradients, bucket.owners)
    reduced, types = ReducedGradients(), rewriter.graph.types
    shard = reduction.to_shard(bucket.name, gradients, bucket.cuts)
    for position, (gradient, subgraph) in enumerate(zip(gradients, bucket.subgraphs)):
        if not types[gradient].static:
            raise UnsupportedError(
                f"the shape of {gradient!r}, the gradient of {subgraph.parameter.tensor!r}, is not known",
                "declare its type in the file (value_info)",
            )
        whole, exact = emit.named(bucket.name, f"gradient{position}"), ""
        _unpack(rewriter, whole, types[gradient], shard.name, bucket.run(position), scalars)
        if shard.unrounded:
            exact = f"{whole}_exact"
            type = TensorType(types[shard.unrounded].dtype, types[gradient].shape)
            _unpack(rewriter, exact, type, shard.unrounded, bucket.run(position), scalars)
        reduced.add(gradient, ReducedValue(whole, exact))
    return reduced


def _unpack(
    rewriter: GraphRewriter, whole: str, type: TensorType, shard: str, run: Sharding, scalars: ScalarReductions
) -> None:
    """One tensor of a bucket in the tensor's shape, on the owner."""
    emit.shard_slice(rewriter, shard, run, f"{whole}_flat", type.dtype)
    shape = scalars.constant("shape" + "_".join(map(str, type.dims)), list(type.dims))
    rewriter.add("Reshape", [f"{whole}_flat", shape], {whole: type}, sharding=run)


def _flat(
    rewriter: GraphRewriter, bucket: WholeBucket, position: int, part: OwnedParameter, scalars: ScalarReductions
) -> OwnedParameter:
    """An owned parameter as a run of the bucket."""
    one = scalars.constant("one", [-1])
    names = [emit.named(bucket.name, f"{role}{position}_flat") for role in ("parameter", "updated")]
    for source, name in zip((part.current, part.updated), names):
        outputs = {name: emit.flat(rewriter.graph.types[source].dtype, part.elements)}
        rewriter.add("Reshape", [source, one], outputs, sharding=part.sharding)
    return OwnedParameter(names[0], names[1], part.sharding, part.elements)


def partial_scalars(
    rewriter: GraphRewriter, bucket: WholeBucket, position: int, scalars: ScalarReductions
) -> list[PartialScalar]:
    """The reductions inside an update, computed by the owner alone."""
    subgraph, owner = bucket.subgraphs[position], bucket.owned(position)
    partials = []
    for number, node in enumerate(subgraph.reductions):
        name = node.outputs[0]
        value = emit.named(bucket.name, f"share{position}_{number}")
        _rename(rewriter, subgraph, name, value)
        type = rewriter.graph.types[value]
        if type.dims:
            empty, scalar = scalars.constant("shape", []), f"{value}.scalar"
            rewriter.add("Reshape", [value, empty], {scalar: TensorType(type.dtype, ())}, sharding=owner)
            value = scalar
        partials.append(scalars.partial([name], value))
    return partials


def _run_on_owner(rewriter: GraphRewriter, bucket: WholeBucket, position: int, *, owned: bool) -> OwnedParameter:
    """Put the source's own nodes on the owner; returns the parameter there, before and after the update."""
    subgraph, owner = bucket.subgraphs[position], bucket.owned(position)
    for node in subgraph.nodes:
        rewriter.counterpart(node).sharding = owner
        why = f"{bucket.name}: the parameter is updated by its owner alone; {subgraph.why}"
        rewriter.annotate(node, why, of=subgraph.parameter.tensor)
    type = rewriter.graph.types[subgraph.parameter.updated]
    parameter, updated = subgraph.parameter.tensor, subgraph.parameter.updated
    if owned:
        # The owner's master has a name of its own: the source's name is what every rank gathers.
        parameter = emit.named(bucket.name, f"parameter{position}")
        rewriter.graph.types[parameter] = type
        for node in map(rewriter.counterpart, subgraph.nodes):
            rewriter.rewire(node, subgraph.parameter.tensor, parameter)
    else:
        updated = emit.named(bucket.name, f"parameter{position}_out")
        _rename(rewriter, subgraph, subgraph.parameter.updated, updated)
    return OwnedParameter(parameter, updated, owner, type.elements)


def _rename(rewriter: GraphRewriter, subgraph: UpdateSubgraph, old: str, new: str) -> None:
    """Rename a value made by a subgraph, inside the subgraph."""
    for node in map(rewriter.counterpart, subgraph.nodes):
        if old in node.outputs:
            rewriter.rename_output(node, old, new)
        rewriter.rewire(node, old, new)
