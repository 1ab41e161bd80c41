"""Ranks that are alike as one, and figures over all of them: what a page can show of 1,024 ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from gopt.artifact.report_record import RankUsage
from gopt.offline.html_report.record import BalanceRow, Bar, GroupTraffic, RankGroup
from gopt.spmd.pass_records import group_ranks, rank_ranges

BARS = 32
"""Bars of the chart of memory at most, the source aside."""


def alike(usages: Sequence[RankUsage], roles: Mapping[int, str]) -> tuple[RankGroup, ...]:
    """Ranks with the same role, bytes and calls, in the order of their first ranks."""
    rows = [(each.rank, (roles.get(each.rank, ""), each.nbytes, each.communication)) for each in usages]
    return tuple(
        RankGroup(role, rank_ranges(ranks), len(ranks), held, sum(each.bytes_sent for each in calls), calls)
        for ranks, (role, held, calls) in group_ranks(rows)
    )


def bars(usages: Sequence[RankUsage], roles: Mapping[int, str]) -> tuple[Bar, ...]:
    """A bar for ranks that hold the same; with more than ``BARS`` of these, a bar for the fullest of a block of
    neighbouring ranks."""
    found = group_ranks([(each.rank, (roles.get(each.rank, ""), each.nbytes)) for each in usages])
    if len(found) <= BARS:
        return tuple(Bar(_label(role, ranks), held) for ranks, (role, held) in found)
    made = []
    size = -(-len(usages) // BARS)
    for part in (usages[at : at + size] for at in range(0, len(usages), size)):
        most = max(part, key=_total)
        label = _label(roles.get(most.rank, ""), [each.rank for each in part])
        made.append(Bar(f"{label}, the fullest: {most.rank}", most.nbytes))
    return tuple(made)


def _label(role: str, ranks: list[int]) -> str:
    ranges = rank_ranges(ranks)
    parts = ranges.split(",")
    shown = ranges if len(parts) <= 4 else f"{','.join(parts[:3])},… ({len(ranks)})"
    return f"{role or 'rank'}{'s' * (len(ranks) > 1)} {shown}"


def _total(usage: RankUsage) -> int:
    return sum(usage.nbytes.by_kind.values())


def balance(usages: Sequence[RankUsage], roles: Mapping[int, str]) -> tuple[BalanceRow, ...]:
    """For each role and kind of bytes, the smallest, the mean and the largest; what is sent is a kind as well."""
    measures: dict[str, Callable[[RankUsage], int]] = {
        "parameters": lambda each: each.nbytes.parameters,
        "optimizer_states": lambda each: each.nbytes.optimizer_states,
        "gradients": lambda each: each.nbytes.gradients,
        "sent": lambda each: each.bytes_sent,
    }
    rows = []
    for role in dict.fromkeys(roles.get(each.rank, "") for each in usages):
        mine = [each for each in usages if roles.get(each.rank, "") == role]
        for kind, measure in measures.items():
            most = max(mine, key=measure)
            mean, largest = fmean(map(measure, mine)), measure(most)
            ratio = round(largest / mean, 6) if mean else 1.0
            rows.append(BalanceRow(role, kind, min(map(measure, mine)), mean, largest, most.rank, ratio))
    return tuple(rows)


def traffic(usages: Sequence[RankUsage]) -> tuple[GroupTraffic, ...]:
    """The calls of each group by their operator."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for usage in usages:
        for call in usage.communication:
            found.setdefault((call.group, call.op), []).append((call.calls, call.bytes_sent))
    return tuple(
        GroupTraffic(
            group, op, len(rows), fmean(calls for calls, _ in rows), fmean(sent for _, sent in rows),
            max(sent for _, sent in rows),
        )
        for (group, op), rows in found.items()
    )  # fmt: skip


def fullest(usages: Sequence[RankUsage]) -> RankUsage | None:
    """The first rank that holds the most; None without ranks."""
    return max(usages, key=_total, default=None)
