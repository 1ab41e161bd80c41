"""Place the calls of a step beside the computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gopt.errors import OptionError
from gopt.ir.graph import COMM, Node
from gopt.ir.node_kinds import heavy
from gopt.ir.rewriter import GraphRewriter
from gopt.passes.base import Pass
from gopt.records.pass_facts import Figure, HeldGather, OverlapFacts, PassOptions
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram
from gopt.spmd.step_memory import overlap_of
from gopt.spmd.traffic import CollectiveCall, calls_of, made_again
from gopt.spmd.verifier import shardings_so_far

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class OverlapOptions(PassOptions):
    """The options of overlap say how early gathers are issued."""

    prefetch: Figure = 1
    """A gather is issued this many gathers ahead of its use."""
    limit_mb: float | None = None
    """Gathered values that are alive at once have at most this many MiB; null means any number."""


@dataclass(frozen=True, slots=True)
class LiveRange:
    """Lifetime of a gathered value of ``nbytes`` bytes: nodes ``first`` to ``last`` read it.

    ``copy``: the last reader of an earlier gather of the same values, or -1."""

    first: int
    last: int
    nbytes: float
    copy: int = -1


@dataclass(frozen=True, slots=True)
class Issue:
    """A gather is issued right before the node at place ``at``; ``why``: the reason for no earlier place, if any."""

    at: int
    why: str = ""


def overlap(program: SpmdProgram, options: OverlapOptions) -> PassResult:
    """Issue calls where their inputs are ready, and gathers of parameters ahead of their use.

    Requires: to run behind all passes that add calls. Guarantees: a call that reduces stands right behind the node
    that completes its inputs, so gradients travel in reverse order of the forward, and no update waits for it before
    the backward is done. A gather before use stands in front of the first reader of the gather ``prefetch`` places
    before it, at latest in front of its own; gathered values that are alive together stay within ``limit_mb`` MiB where
    the graph allows it at all; no bucket is gathered again while an earlier copy is alive. Nothing but the order of
    nodes changes, alike for all ranks. On the wire: nothing.
    """
    if options.prefetch < 0:
        raise OptionError(f"prefetch cannot be {options.prefetch}", "0 gathers just before use")
    if options.limit_mb is not None and not options.limit_mb >= 0:
        raise OptionError(f"limit-mb cannot be {options.limit_mb}", "0 gathers just before use")
    calls, shardings = calls_of(program), shardings_so_far(program)
    if not calls:
        return PassResult(note="the step makes no calls")
    nodes = program.graph.nodes
    gathers = sorted((call for call in calls if call.before_use), key=lambda call: (call.first, call.place))
    limit = None if options.limit_mb is None else options.limit_mb * MIB
    issues = issue(_live_ranges(gathers), options.prefetch, limit)
    early, moved = _early(nodes, calls)
    if due := early | _ahead(nodes, gathers, issues):
        _move(program, due)
        shardings_so_far(program, shardings)
    result = overlap_of(program)
    over = limit is not None and result.peak_gathered_bytes > limit
    facts = OverlapFacts(
        result.hidden_share, result.by_kind, result.peak_gathered_bytes, len(gathers),
        sum(item.at < call.first for item, call in zip(issues, gathers)), moved,
        tuple(HeldGather(call.node.label, item.why) for call, item in zip(gathers, issues) if item.why),
    )  # fmt: skip
    return PassResult(
        facts=facts,
        note=f"over the limit: {result.peak_gathered_bytes} gathered bytes are in use at once" if over else "",
    )


def issue(live_ranges: Sequence[LiveRange], prefetch: int, limit: float | None) -> list[Issue]:
    """Return the place at which each gather is issued.

    ``live_ranges``: in the order of first use; ``limit``: in bytes. Every gather is live during its reads; remaining
    memory goes to prefetches, in order of use. Pure."""
    budget = None if limit is None else _MemoryBudget(live_ranges, limit)
    result = []
    for position, live_range in enumerate(live_ranges):
        wanted = live_ranges[position - prefetch].first if position >= prefetch else 0
        at, why = min(max(wanted, live_range.copy + 1), live_range.first), ""
        if at > wanted:
            why = "an earlier copy is still in use"
        if budget is not None and (fits := budget.take(at, live_range)) > at:
            at, why = fits, "the limit leaves no room earlier"
        result.append(Issue(at, why))
    return result


class _MemoryBudget:
    """Bytes alive between the places of changes; every live range counts from the start."""

    def __init__(self, live_ranges: Sequence[LiveRange], limit: float) -> None:
        self.limit = limit
        self.points = sorted({0, *(w.first for w in live_ranges), *(w.last + 1 for w in live_ranges)})
        self.number = {position: number for number, position in enumerate(self.points)}
        change = [0.0] * len(self.points)
        for live_range in live_ranges:
            change[self.number[live_range.first]] += live_range.nbytes
            change[self.number[live_range.last + 1]] -= live_range.nbytes
        self.alive = list(accumulate(change))

    def take(self, wanted: int, live_range: LiveRange) -> int:
        """The first place from ``wanted`` on where the live range fits until its first use; takes the bytes."""
        number = self.number[live_range.first]
        while self.points[number] > wanted and self.alive[number - 1] + live_range.nbytes <= self.limit:
            number -= 1
            self.alive[number] += live_range.nbytes
        return self.points[number]


def _live_ranges(gathers: Sequence[CollectiveCall]) -> list[LiveRange]:
    """The live ranges of the gathers; two gathers of the same inputs are copies."""
    read_until: dict[tuple[str, ...], int] = {}
    live_ranges = []
    for call in gathers:
        source = tuple(call.node.inputs)
        live_ranges.append(LiveRange(call.first, call.last, call.payload, read_until.get(source, -1)))
        read_until[source] = call.last
    return live_ranges


def _early(nodes: Sequence[Node], calls: Sequence[CollectiveCall]) -> tuple[dict[int, float], int]:
    """Place of each node to move -> the new place; and the number of calls moved forward.

    A call goes right behind its last input, and takes along the nodes made by passes in between; one that is made
    again stays in front of its readers. Readers of a call's
    results go behind the last heavy operator that does not wait for a call, so that no call is waited for early."""
    gathers, again = {call.place for call in calls if call.before_use}, made_again(nodes)
    waits = _waiting(nodes, gathers)
    stop = max((position for position, node in enumerate(nodes) if heavy(node) and not waits[position]), default=-1)
    at: dict[str, float] = {}
    due: dict[int, float] = {}
    free: dict[int, float] = {}
    for index, node in enumerate(nodes):
        call, when = node.domain == COMM, index + 0.5
        if call or node.made_by or waits[index]:  # any other stays where it is
            behind = max([at.get(name, -0.5) for name in node.reads], default=-0.5)
            if call and index not in gathers and behind > 0 and id(node) not in again:
                due[index] = when = behind
            elif node.made_by and not call and not waits[index]:
                free[index] = when = behind
            elif waits[index] and index < stop:
                due[index] = when = max(behind, stop + 0.5)
        for name in node.outputs:
            at[name] = when
    _take_along(nodes, due, free)
    staying = [0, *accumulate(int(position not in due) for position in range(len(nodes)))]
    moved = sum(c.place in due and staying[c.place] > staying[int(due[c.place] + 0.5)] for c in calls)
    late = any(when > position for position, when in due.items())
    return (due if moved or late else {}), moved


def _waiting(nodes: Sequence[Node], gathers: set[int]) -> list[bool]:
    """Return, per node, whether the node depends on the result of a call other than a gather before use."""
    behind: set[str] = set()
    waits = []
    for position, node in enumerate(nodes):
        waits.append(not behind.isdisjoint(node.reads))
        if waits[-1] or (node.domain == COMM and position not in gathers):
            behind.update(node.outputs)
    return waits


def _take_along(nodes: Sequence[Node], due: dict[int, float], free: Mapping[int, float]) -> None:
    """Add to ``due`` the free nodes read by its nodes, directly or through others."""
    wanted: set[str] = set()
    for position in range(len(nodes) - 1, -1, -1):
        node = nodes[position]
        if position in free and not wanted.isdisjoint(node.outputs):
            due[position] = free[position]
        if position in due:
            wanted.update(node.reads)


def _ahead(nodes: Sequence[Node], gathers: Sequence[CollectiveCall], issues: Sequence[Issue]) -> dict[int, float]:
    """Return gather -> the due place, also for producers of the gather's inputs, if later than due."""
    due = {call.place: item.at - 0.25 for call, item in zip(gathers, issues)}
    if not due:
        return {}
    needed: dict[str, float] = {}
    for position in range(max(due), -1, -1):
        when = min((needed[name] for name in nodes[position].outputs if name in needed), default=due.get(position))
        if when is None:
            continue
        if position not in due and position > when:
            due[position] = when
        for name in nodes[position].reads:
            needed[name] = min(when, needed.get(name, when))
    return due


def _move(program: SpmdProgram, due: Mapping[int, float]) -> None:
    """Bring the graph's nodes in the new order."""
    rewriter = GraphRewriter(program.graph, "overlap")
    for position, when in due.items():
        rewriter.move(program.graph.nodes[position], when)
    rewriter.finish()


PASS = Pass(
    "overlap",
    OverlapOptions,
    overlap,
    after=("shard", "statistics", "fuse-collectives", "recompute"),
    facts=OverlapFacts,
)
