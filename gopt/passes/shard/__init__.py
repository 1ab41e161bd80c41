"""Shard the optimizer states, gradients, updates and parameters of a step (ZeRO stages 0 to 3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from gopt.analysis.coupling import settled_reduction
from gopt.analysis.training import Phase
from gopt.analysis.update_subgraphs import find_updates
from gopt.analysis.updates import UpdateMode, UpdateSubgraph
from gopt.ir.rewriter import GraphRewriter
from gopt.operators.kinds import CASTS
from gopt.passes.base import Pass
from gopt.passes.shard.emit import Groups
from gopt.passes.shard.emitted_bucket import EmittedBucket
from gopt.passes.shard.gradient_reduction import GradientReduction, ReducedGradients
from gopt.passes.shard.loss_weights import LossWeights
from gopt.passes.shard.options import Options, Stage, check, layout_of
from gopt.passes.shard.parameter_gather import ParameterGather
from gopt.passes.shard.plan import ReplicatedBucket, SplitBucket, TransferStyle, WholeBucket, make_plan
from gopt.passes.shard.scalar_reductions import ScalarReductions
from gopt.passes.shard.shared_scalars import share
from gopt.passes.shard.split import emit_split
from gopt.passes.shard.whole import emit_replicated, emit_whole
from gopt.records.pass_facts import BucketFacts, ShardFacts
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram


def shard(program: SpmdProgram, options: Options) -> PassResult:
    """Reduce the gradients; share the updates and states out among the ranks; gather the new parameters.

    Requires: roles recovered, no sharding yet. Guarantees: each element is updated by exactly one member of the
    group, or by all from equal inputs. On the wire, per rank and step, B bytes of gradients and P of parameters:
    stage 0 sends 2(N-1)/N·B; stages 1 and 2 send (N-1)/N·(B + P), and one scalar call per dependency level; stage 3
    sends (N-1)/N·(B + 2P), or (B + P) when the backward reads what the forward gathered. With K micro-steps an update,
    stage 2 and up scatter gradients in each of them; all else travels once.
    """
    check(program, options)
    program.loss_reduction = settled_reduction(program.source, options.loss_reduction)
    data = program.mesh.data_group
    if (data is None or program.mesh.size(data) == 1) and program.micro_steps == 1:
        return PassResult(note="one rank sees all the data: nothing to reduce or share out")
    training = program.training
    uncut = options.style is TransferStyle.BROADCAST
    axis = program.mesh.shard_axis
    updates = find_updates(training, whole_accumulators=options.stage is Stage.STATES, uncut=uncut)
    if options.stage is Stage.NONE or not axis:
        updates = updates.replicated("stage 0" if options.stage is Stage.NONE else "no axis shards the states")
    whole = program.source.graph.types
    if empty := {name for name in updates.subgraphs if name in whole and whole[name].elements == 0}:
        updates = updates.replicated("it has no elements", empty)
    layout = layout_of(program, options)
    rewriter = GraphRewriter(program.graph, "shard")
    scalars = ScalarReductions(rewriter, training.graph, updates, axis)
    groups = Groups(
        axis, program.mesh.replica_group, data if data is not None and program.mesh.size(data) > 1 else None
    )
    if options.reduce_dtype is not None and groups.data is not None:  # else nothing is sent
        program.reduce_dtype = options.reduce_dtype.value
    weights = LossWeights(program, rewriter, groups.data)
    reduction = GradientReduction(program, rewriter, groups, options.stage >= Stage.GRADIENTS, weights)
    before_use = options.stage is Stage.PARAMETERS
    gather = ParameterGather(program, rewriter, axis, before_use, options.reshard_after_forward, options.persist)
    plan = make_plan(training, updates, layout, gather.copies, program.weighed)
    emitted, reduced = [], ReducedGradients()
    for bucket in plan.buckets:
        owned = gather.owned(bucket.subgraphs[0])
        parts = _emit(rewriter, bucket, options.style, scalars, reduction, owned=owned)
        if parts.parameters is not None:
            gather.behind_update(parts.parameters)
        reduced.update(parts.reduced)
        emitted.append(parts)
    parameters = [bucket.parameters for bucket in emitted if bucket.parameters is not None]
    facts = gather.before_use(parameters) | scalars.complete(
        [
            replace(scalar, stage=layout.stages.get(bucket.subgraphs[0].parameter.tensor))
            for bucket, parts in zip(plan.buckets, emitted)
            for scalar in parts.scalars
        ]
    )
    _read_reduced(rewriter, reduced)
    share(program, rewriter, groups.data)
    rewriter.finish()
    _set_states(program, emitted, gather.dropped_copies(parameters), reduced.values)
    modes = Counter(subgraph.mode.value for subgraph in updates.subgraphs.values())
    figures = ShardFacts(
        **facts, bucket_cap_bytes=plan.cap, parameters=dict(sorted(modes.items())),
        buckets=tuple(_describe(program, bucket) for bucket in plan.buckets),
    )  # fmt: skip
    return PassResult(removed=rewriter.removed, facts=figures)


def _emit(
    rewriter: GraphRewriter,
    bucket: object,
    style: TransferStyle,
    scalars: ScalarReductions,
    reduction: GradientReduction,
    *,
    owned: bool,
) -> EmittedBucket:
    if isinstance(bucket, SplitBucket):
        return emit_split(rewriter, bucket, scalars, reduction, owned=owned)
    if isinstance(bucket, WholeBucket):
        return emit_whole(rewriter, bucket, style, scalars, reduction, owned=owned)
    assert isinstance(bucket, ReplicatedBucket)
    return emit_replicated(bucket, reduction)


def _set_states(
    program: SpmdProgram, emitted: list[EmittedBucket], dropped: set[str], reduced: Mapping[str, str]
) -> None:
    """Let the step know the ranks' states, and the order of storage.

    A state that keeps a gradient keeps the ``reduced`` gradient: the update is replicated (``update_subgraphs``)."""
    states = {name: holding for item in emitted for name, holding in item.states.items()}
    shown = (replace(h, output=reduced[h.output]) if h.output in reduced else h for h in program.states)
    entries = (states.get(holding.input, holding) for holding in shown if holding.input not in dropped)
    program.layout = [names for item in emitted for names in item.layout]
    program.set_states(
        list({id(holding): holding for holding in entries}.values())
    )  # one of a class represents many states


def _read_reduced(rewriter: GraphRewriter, reduced: ReducedGradients) -> None:
    """Only readers in the update see the reduced gradient: the backward keeps the local one."""
    for node in rewriter.kept():
        if node.phase is Phase.UPDATE:
            node.inputs = [reduced.values.get(name, name) for name in node.inputs]
            if node.is_in(CASTS):  # a cast may read the value before it is rounded to the gradient's type
                node.inputs[0] = reduced.unrounded.get(node.inputs[0], node.inputs[0])


def _describe(program: SpmdProgram, bucket: object) -> BucketFacts:
    """Return the facts about a bucket for the report."""
    subgraphs: tuple[UpdateSubgraph, ...] = bucket.subgraphs  # type: ignore[attr-defined]
    types, mode = program.training.graph.types, subgraphs[0].mode
    return BucketFacts(
        name=bucket.name,  # type: ignore[attr-defined]
        mode=mode.value,
        tensors=tuple(subgraph.parameter.tensor for subgraph in subgraphs),
        nbytes=sum(types[subgraph.gradient].nbytes for subgraph in subgraphs),
        dtype=types[subgraphs[0].gradient].dtype,
        closed_because=bucket.why,  # type: ignore[attr-defined]
        classes=len(bucket.groups) if isinstance(bucket, SplitBucket) else None,
        reasons=() if mode is UpdateMode.SPLIT else tuple(sorted({subgraph.why for subgraph in subgraphs})),
    )


def needed(program: SpmdProgram) -> str:
    """Return the reason why a step needs this pass, or ''."""
    if program.mesh.data_ranks > 1:
        return f"{program.mesh.data_ranks} ranks see different data, and nothing else reduces their gradients"
    if program.micro_steps > 1:
        return f"nothing else sums the gradients of {program.micro_steps} micro-steps"
    return ""


PASS = Pass("shard", Options, shard, after=("hoist-casts",), needed=needed, facts=ShardFacts)
