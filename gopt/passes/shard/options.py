"""The options of ``shard`` and their combinations: no option is ignored silently."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from fnmatch import fnmatchcase
from typing import Annotated

from gopt.analysis.partition import Owners, Partition, PartitionRule
from gopt.analysis.training import StateKind
from gopt.errors import OptionError
from gopt.passes.shard.plan import StateLayout, TransferStyle
from gopt.records.pass_facts import STAGES, Figure, PassOptions
from gopt.spmd.program import SpmdProgram
from gopt.text.suggestions import did_you_mean


class Stage(IntEnum):
    """The tensors that are sharded (contract section 1)."""

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
class Options(PassOptions):
    """The options of shard say what is sharded, and how."""

    stage: Annotated[Stage, STAGES] = Stage.GRADIENTS
    """The stage says what is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too."""
    partition: Partition = Partition.FLAT
    """The partition says where a bucket may be cut: flat anywhere, rows between rows, whole between tensors."""
    override: str = ""
    """The text gives some parameters another partition, as PATTERN:PARTITION with semicolons between; it is empty when
    no parameter has one."""
    owners: Owners = Owners.LARGEST_FIRST
    """The rule says how a tensor that stays whole finds its owner: largest-first, round-robin, in-order or hash."""
    rule: PartitionRule = PartitionRule.BALANCED
    """The rule says how rows are cut: balanced or ceil."""
    min_piece: int | None = None
    """The rule ceil cuts no piece of fewer elements; null means the default."""
    style: TransferStyle = TransferStyle.GATHER
    """The style says how whole tensors travel: gather or broadcast."""
    bucket_mb: float | None = None
    """A bucket has at most this many MiB of gradients; null means the default."""
    reduce_dtype: WireType | None = None
    """Gradients travel in this type; null means the type in which they are made."""
    reshard_after_forward: bool = True
    """The value says whether, at stage 3, the backward gathers parameters again."""
    persist: Figure = 0
    """At stage 3, parameters of fewer elements stay on every rank."""
    loss_reduction: str = "mean"
    """Gradients of ranks are combined as mean, sum, weighted:VALUE, or sum:NAME,NAME (all others by mean), as in the
    manifest; auto where gopt chose it: each as the step has it, a note and the manifest have the choice."""


MOST_MB = 1 << 30
"""MiB of a bucket: more than any machine has."""


def check(program: SpmdProgram, options: Options) -> None:
    """Refuse options without a use beside the others: no option is dropped silently."""
    if options.bucket_mb is not None and not 0 <= options.bucket_mb <= MOST_MB:
        raise OptionError(
            f"--bucket-mb cannot be {options.bucket_mb}",
            f"it is a number of MiB up to {MOST_MB}; 0 means one tensor a call",
        )
    if options.persist < 0 or (options.min_piece is not None and options.min_piece < 1):
        raise OptionError(
            f"persist is {options.persist} and min-piece {options.min_piece}: both are numbers of elements",
            "give persist at least 0, and min-piece at least 1",
        )
    for why, *hints in useless(options).values():
        raise OptionError(f"shard: {why}", *hints)
    if program.stages is not None and program.micro_steps > 1 and not options.reshard_after_forward:
        raise OptionError(
            "shard: reshard-after-forward=false would keep gathered parameters for each micro-batch of a pipeline",
            "leave it out, or use stage=2, at which each rank holds whole parameters",
        )
    if program.micro_steps > 1 and any(state.kind is StateKind.ACCUMULATOR for state in program.training.states):
        accumulator = next(s.tensor for s in program.training.states if s.kind is StateKind.ACCUMULATOR)
        raise OptionError(
            f"--accumulate: the model accumulates gradients itself, in {accumulator}", "leave --accumulate out"
        )


def useless(options: Options) -> dict[str, tuple[str, ...]]:
    """Options without a use beside the others -> the reason, and the way to a use."""
    kinds = {options.partition, *(kind for _, kind in _parse_overrides(options.override))}
    stage = f"has no use at stage {options.stage.value}"
    result: dict[str, tuple[str, ...]] = {}
    if options.stage is Stage.NONE:
        sharding = ("partition", "override", "owners", "rule", "min_piece", "style")
        hint = "leave it out, or add stage=1, 2 or 3"
        result |= {name: (f"{name.replace('_', '-')} {stage}", hint) for name in sharding}
    if options.stage is not Stage.PARAMETERS:
        hint = "leave it out, or add stage=3"
        result |= {name: (f"{name.replace('_', '-')} {stage}", hint) for name in ("persist", "reshard_after_forward")}
    if Partition.ROWS not in kinds:
        cut = ("rule and min-piece cut rows, and nothing is cut in rows", "add partition=rows")
        result = {"rule": cut, "min_piece": cut} | result
    if kinds != {Partition.WHOLE}:
        whole = ("style=broadcast sends whole tensors, and some are to be cut", "add partition=whole")
        result = {"style": whole} | result
    return {name: why for name, why in result.items() if getattr(options, name) != getattr(Options(), name)}


def layout_of(program: SpmdProgram, options: Options) -> StateLayout:
    """Return the layout of the options; raises OptionError for an override that matches no parameter."""
    overrides = _parse_overrides(options.override)
    names = [state.tensor for state in program.training.parameters if state.tensor in program.training.gradients]
    for pattern, kind in overrides:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = did_you_mean(pattern, names) or "see the parameters with gopt inspect"
            raise OptionError(f"shard: override {pattern}:{kind.value} matches no parameter", hint)
    return StateLayout(
        program.mesh.shard_axis, program.mesh.shard_ranks,
        options.partition, options.owners, options.rule, options.min_piece, overrides,
        None if options.bucket_mb is None else int(options.bucket_mb * (1 << 20)),
        options.stage is Stage.PARAMETERS, options.persist,
        {name: sharding.sharding_axes for name, sharding in program.parts.items()},
        program.stages.states if program.stages is not None else {},
    )  # fmt: skip


def _parse_overrides(text: str) -> tuple[tuple[str, Partition], ...]:
    """``embed*:rows;*.bias:whole`` -> patterns with partitions; raises OptionError."""
    result = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        pattern, colon, kind = part.rpartition(":")
        if not colon or kind not in {item.value for item in Partition}:
            raise OptionError(f"cannot read {part!r} as a partition of some parameters", "write it as 'embed*:rows'")
        result.append((pattern, Partition(kind)))
    return tuple(result)
