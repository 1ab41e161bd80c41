"""Fuse collectives that no cut binds: fewer, larger calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gopt.analysis.partition import MIB
from gopt.errors import OptionError
from gopt.ir.graph import COMM, Node
from gopt.ir.rewriter import GraphRewriter
from gopt.passes.base import Pass
from gopt.passes.fuse_collectives.diagnose import Place, neighbours
from gopt.passes.fuse_collectives.emit import NAME, fuse
from gopt.passes.fuse_collectives.order import CallOrder, orders
from gopt.passes.fuse_collectives.pack import BoundCalls, Packing, item, pack
from gopt.passes.fuse_collectives.rules import combine
from gopt.records.pass_facts import FusionFacts, PassOptions
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram
from gopt.spmd.verifier import parts_so_far


@dataclass(frozen=True, kw_only=True)
class FusionOptions(PassOptions):
    """The options of fuse-collectives limit what one call carries."""

    cap_mb: float | None = None
    """A call carries at most this many MiB, and 0 leaves every call as it is; null means that the limit follows from
    the sizes of the tensors."""
    max_tensors: int | None = None
    """A call carries at most this many tensors; null means any number."""
    first_mb: float | None = None
    """The first call of a kind carries at most this many MiB, for an early start; null means the limit of the
    others."""


def fuse_collectives(program: SpmdProgram, options: FusionOptions) -> PassResult:
    """Join calls of one kind, group, root, dtype and reduction into packed ones; simplify pairs of calls.

    Requires: to run after shard and statistics, whose cut buckets it leaves alone. Guarantees: no call waits for what
    it makes; all ranks issue the same calls in one order; every value keeps its name. On the wire: the same bytes in
    fewer calls; less where a reduce and a broadcast, or an all-reduce and a slice, become one call.
    """
    _check(options)
    rewriter = GraphRewriter(program.graph, NAME)
    combined = combine(program, rewriter)
    rewriter.finish()
    bound = BoundCalls(program.graph, parts_so_far(program))
    free = [node for node in program.graph.nodes if node.domain == COMM and not bound.why(node)]
    result = [_plan(program, free, order, options) for order in orders(program, free)] if free else [()]
    packings = min(result, key=lambda plan: sum(len(packing.buckets) for packing in plan))
    removed = rewriter.removed
    rewriter = GraphRewriter(program.graph, NAME)
    placed: dict[int, Place] = {}
    number = 0
    for packing in packings:
        for position, bucket in enumerate(packing.buckets):
            call = bucket.items[0].node
            if len(bucket.items) > 1:
                call = fuse(rewriter, [packed.node for packed in bucket.items], packing.key, f"b{number}")
                number += 1
            placed[id(call)] = position, bucket
    rewriter.finish()
    facts = FusionFacts(
        fused_calls=number, **combined, keys=tuple(packing.facts for packing in packings),
        neighbours=neighbours(program.graph, placed, bound),
    )  # fmt: skip
    calls = any(node.domain == COMM for node in program.graph.nodes)
    return PassResult(
        removed=removed + rewriter.removed,
        facts=facts,
        note="" if calls else "there are no calls",
    )


def _plan(program: SpmdProgram, free: Sequence[Node], order: CallOrder, options: FusionOptions) -> Sequence[Packing]:
    cap, initial = (None if size is None else int(size * MIB) for size in (options.cap_mb, options.first_mb))
    items = [item(program.graph, node, order, program.weighed) for node in free]
    if program.micro_steps > 1:
        micro, stages = _of_micro_steps(program), program.value_stages
        items = [
            packed if micro.isdisjoint(packed.node.outputs)
            else replace(packed, key=replace(packed.key, stage=stages.get(packed.node.first_output, 0)))
            for packed in items
        ]  # fmt: skip
    return pack(items, cap, initial, options.max_tensors)


def _of_micro_steps(program: SpmdProgram) -> set[str]:
    """The values needed for the results of each micro-step: other values belong to the update."""
    needed = set(program.phase_results()[0].values())
    for node in reversed(program.graph.nodes):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.reads)
    return needed


def _check(options: FusionOptions) -> None:
    for name, value in (("cap-mb", options.cap_mb), ("first-mb", options.first_mb)):
        if value is not None and not 0 <= value < float("inf"):
            raise OptionError(f"pass {NAME}: {name} cannot be {value}", "0 leaves every call as it is")
    if options.max_tensors is not None and options.max_tensors < 1:
        raise OptionError(f"pass {NAME}: max-tensors cannot be {options.max_tensors}", "give at least 1")


PASS = Pass(NAME, FusionOptions, fuse_collectives, after=("shard", "statistics"), facts=FusionFacts)
