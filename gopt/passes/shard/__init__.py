"""Shard the optimizer states, gradients, updates and parameters of a step (ZeRO stages 0 to 3)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, IntEnum
from fnmatch import fnmatchcase

from gopt.analysis.cones import find_updates
from gopt.analysis.partition import Owners, Partition, Rule
from gopt.analysis.spmd import Step
from gopt.analysis.training import Kind, Phase
from gopt.analysis.updates import Cone, Mode
from gopt.errors import OptionError
from gopt.graph.edit import Draft
from gopt.passes.base import Pass
from gopt.passes.shard.delivery import Delivery
from gopt.passes.shard.layout import Groups
from gopt.passes.shard.plan import (
    Layout,
    ReplicatedBucket,
    SplitBucket,
    Style,
    WholeBucket,
    make_plan,
    parse_overrides,
)
from gopt.passes.shard.reduction import Reduction
from gopt.passes.shard.scalars import Scalars
from gopt.passes.shard.split import Emitted, emit_split
from gopt.passes.shard.whole import emit_replicated, emit_whole
from gopt.report import Change


class Stage(IntEnum):
    """What is sharded (contract section 1)."""

    NONE = 0
    STATES = 1
    GRADIENTS = 2
    PARAMETERS = 3


class WireType(str, Enum):
    """Type in which gradients travel and are rounded once; sums of halves are taken in float32 whatever it is."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is sharded and how: ``override`` gives some parameters another partition (``embed*:rows;*.bias:whole``),
    ``owners`` says who holds what stays whole, ``rule`` and ``min_piece`` (elements) where rows are cut, ``style`` how
    whole tensors travel; ``persist``: at stage 3, parameters of fewer elements stay on every rank."""

    stage: Stage = Stage.GRADIENTS
    partition: Partition = Partition.FLAT
    override: str = ""
    owners: Owners = Owners.LARGEST_FIRST
    rule: Rule = Rule.BALANCED
    min_piece: int | None = None
    style: Style = Style.GATHER
    bucket_mb: float | None = None
    reduce_dtype: WireType | None = None
    reshard_after_forward: bool = True
    persist: int = 0


def shard(step: Step, options: Options) -> Change:
    """Reduce the gradients; share the updates and states out among the ranks; gather the new parameters.

    Requires: roles recovered, no sharding yet. Guarantees: each element is updated by exactly one member of the
    group, or by all from equal inputs. On the wire, per rank and step, B bytes of gradients and P of parameters:
    stage 0 sends 2(N-1)/N·B; stages 1 and 2 send (N-1)/N·(B + P), and one scalar call per dependency level; stage 3
    sends (N-1)/N·(B + 2P), or (B + P) when the backward reads what the forward gathered. With K micro-steps an update,
    stage 2 and up scatter gradients in each of them; all else travels once.
    """
    _check(step, options)
    data = step.mesh.data_group
    if (data is None or step.mesh.size(data) == 1) and step.micro_steps == 1:
        return Change(note="one rank sees all the data: nothing to reduce or share out")
    training = step.training
    uncut = options.style is Style.BROADCAST
    updates = find_updates(training, whole_accumulators=options.stage is Stage.STATES, uncut=uncut)
    if options.stage is Stage.NONE or step.members == 1:
        updates = updates.replicated("stage 0" if options.stage is Stage.NONE else "no axis shards the states")
    layout = _layout(step, options)
    draft = Draft(step.graph, "shard")
    scalars = Scalars(draft, training.graph, updates, step.group)
    wire = options.reduce_dtype.value if options.reduce_dtype is not None else ""
    groups = Groups(step.group, step.outer, data if data is not None and step.mesh.size(data) > 1 else None)
    reduction = Reduction(step, draft, groups, wire, options.stage >= Stage.GRADIENTS)
    before_use = options.stage is Stage.PARAMETERS
    delivery = Delivery(step, draft, step.group, before_use, options.reshard_after_forward, options.persist)
    plan = make_plan(training, updates, layout, delivery.copies)
    emitted = [_emit(draft, bucket, options.style, scalars, reduction, delivery) for bucket in plan.buckets]
    facts = delivery.finish() | scalars.finish()
    _read_reduced(step, draft, reduction)
    draft.finish()
    _hold(step, emitted, delivery.dropped)
    modes = Counter(cone.mode.value for cone in updates.cones.values())
    facts |= {"bucket_cap_bytes": plan.cap, "parameters": dict(sorted(modes.items()))}
    facts["buckets"] = [_describe(step, bucket) for bucket in plan.buckets]
    return Change(removed=draft.reasons, facts=facts)


def _check(step: Step, options: Options) -> None:
    """Refuse options that have no use beside the others: none is dropped silently."""
    if options.bucket_mb is not None and not options.bucket_mb >= 0:
        raise OptionError(f"--bucket-mb cannot be {options.bucket_mb}", "0 means one tensor a call")
    if options.persist < 0 or (options.min_piece is not None and options.min_piece < 1):
        raise OptionError("persist and min-piece are numbers of elements, at least 0 and 1")
    kinds = {options.partition, *(kind for _, kind in parse_overrides(options.override))}
    rows, whole = Partition.ROWS in kinds, kinds == {Partition.WHOLE}
    sharding = ("partition", "override", "owners", "rule", "min_piece", "style")
    useless = {
        **dict.fromkeys(sharding, options.stage is Stage.NONE),
        "persist": options.stage is not Stage.PARAMETERS,
        "reshard_after_forward": options.stage is not Stage.PARAMETERS,
    }
    for name, refused in useless.items():
        if refused and getattr(options, name) != getattr(Options(), name):
            raise OptionError(f"shard: {name.replace('_', '-')} has no use at stage {options.stage.value}")
    if not rows and (options.rule is not Rule.BALANCED or options.min_piece is not None):
        raise OptionError("shard: rule and min-piece cut rows, and nothing is cut in rows", "add partition=rows")
    if not whole and options.style is Style.BROADCAST:
        raise OptionError("shard: style=broadcast sends whole tensors, and some are to be cut", "add partition=whole")
    if step.micro_steps > 1 and any(state.kind is Kind.ACCUMULATOR for state in step.training.states):
        held = next(s.tensor for s in step.training.states if s.kind is Kind.ACCUMULATOR)
        raise OptionError(f"--accumulate: the model accumulates gradients itself, in {held}", "leave --accumulate out")


def _layout(step: Step, options: Options) -> Layout:
    overrides = parse_overrides(options.override)
    names = [state.tensor for state in step.training.parameters if state.tensor in step.training.gradients]
    for pattern, kind in overrides:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = get_close_matches(pattern, names, 1)
            hint = f"did you mean {close[0]!r}?" if close else "see the parameters with gopt inspect"
            raise OptionError(f"shard: override {pattern}:{kind.value} fits no parameter", hint)
    return Layout(
        step.members, options.partition, options.owners, options.rule, options.min_piece, overrides,
        None if options.bucket_mb is None else int(options.bucket_mb * (1 << 20)),
        options.stage is Stage.PARAMETERS, options.persist,
    )  # fmt: skip


def _emit(
    draft: Draft, bucket: object, style: Style, scalars: Scalars, reduction: Reduction, delivery: Delivery
) -> Emitted:
    if isinstance(bucket, SplitBucket):
        return emit_split(draft, bucket, scalars, reduction, delivery)
    if isinstance(bucket, WholeBucket):
        return emit_whole(draft, bucket, style, scalars, reduction, delivery)
    assert isinstance(bucket, ReplicatedBucket)
    emit_replicated(bucket, reduction)
    return Emitted()


def _hold(step: Step, emitted: list[Emitted], dropped: set[str]) -> None:
    """Let the step know what the ranks hold now, and in which order it is stored."""
    holdings = {name: holding for each in emitted for name, holding in each.holdings.items()}
    kept = (holdings.get(held.input, held) for held in step.holdings if held.input not in dropped)
    step.layout = [names for each in emitted for names in each.layout]
    step.hold(list({id(holding): holding for holding in kept}.values()))  # one of a class stands for many states


def _read_reduced(step: Step, draft: Draft, reduction: Reduction) -> None:
    """Only readers in the update see the reduced gradient: the backward keeps the local one."""
    for node, phase in zip(step.training.graph.nodes, step.training.phases):
        if phase is Phase.UPDATE and (kept := draft.kept(node)) is not None:
            kept.inputs = [reduction.reduced.get(name, name) for name in kept.inputs]
            if kept.is_a("Cast"):  # a cast need not start from what was rounded to the gradient's type
                kept.inputs = [reduction.exact.get(name, name) for name in kept.inputs]


def _describe(step: Step, bucket: object) -> dict[str, object]:
    """What the report says of a bucket."""
    cones: tuple[Cone, ...] = bucket.cones  # type: ignore[attr-defined]
    types = step.training.graph.types
    row: dict[str, object] = {
        "name": bucket.name,  # type: ignore[attr-defined]
        "mode": cones[0].mode.value,
        "tensors": [cone.parameter.tensor for cone in cones],
        "bytes": sum(types[cone.gradient].nbytes for cone in cones),
        "dtype": types[cones[0].gradient].dtype,
        "closed_because": bucket.why,  # type: ignore[attr-defined]
    }
    if isinstance(bucket, SplitBucket):
        row["classes"] = len(bucket.segments)
    if cones[0].mode is not Mode.SPLIT:
        row["reasons"] = sorted({cone.why for cone in cones})
    return row


PASS = Pass("shard", Options, shard, after=("hoist-casts",))
