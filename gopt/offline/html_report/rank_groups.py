"""Equal ranks as one, and figures over all ranks: the page's view of 1,024 ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from gopt.artifact.report_record import RankUsage
from gopt.offline.html_report.record import BalanceRow, Bar, GroupTraffic, RankGroup
from gopt.text.amounts import group_ranks, rank_ranges

BARS = 32
"""Bars of the chart of memory at most, the source aside."""


def alike(usages: Sequence[RankUsage], roles: Mapping[int, str]) -> tuple[RankGroup, ...]:
    """Ranks with the same role, bytes and calls, in the order of first ranks."""
    rows = [(usage.rank, (roles.get(usage.rank, ""), usage.nbytes, usage.communication)) for usage in usages]
    return tuple(
        RankGroup(role, rank_ranges(ranks), len(ranks), nbytes, sum(call.bytes_sent for call in calls), calls)
        for ranks, (role, nbytes, calls) in group_ranks(rows)
    )


def bars(usages: Sequence[RankUsage], roles: Mapping[int, str]) -> tuple[Bar, ...]:
    """A bar for ranks with equal bytes; with more than ``BARS`` of these, a bar for the fullest of a block of
    neighbouring ranks."""
    groups = group_ranks([(usage.rank, (roles.get(usage.rank, ""), usage.nbytes)) for usage in usages])
    if len(groups) <= BARS:
        return tuple(Bar(_label(role, ranks), nbytes) for ranks, (role, nbytes) in groups)
    chart = []
    size = -(-len(usages) // BARS)
    for part in (usages[at : at + size] for at in range(0, len(usages), size)):
        most = max(part, key=_total)
        label = _label(roles.get(most.rank, ""), [usage.rank for usage in part])
        chart.append(Bar(f"{label}, the fullest: {most.rank}", most.nbytes))
    return tuple(chart)


def _label(role: str, ranks: list[int]) -> str:
    ranges = rank_ranges(ranks)
    parts = ranges.split(",")
    shown = ranges if len(parts) <= 4 else f"{','.join(parts[:3])},… ({len(ranks)})"
    return f"{role or 'rank'}{'s' * (len(ranks) > 1)} {shown}"


def _total(usage: RankUsage) -> int:
    return sum(usage.nbytes.by_kind.values())


def balance(usages: Sequence[RankUsage], roles: Mapping[int, str]) -> tuple[BalanceRow, ...]:
    """For each role and kind of bytes, the smallest, the mean and the largest; sent bytes are a kind as well."""
    measures: dict[str, Callable[[RankUsage], int]] = {
        "parameters": lambda usage: usage.nbytes.parameters,
        "optimizer_states": lambda usage: usage.nbytes.optimizer_states,
        "gradients": lambda usage: usage.nbytes.gradients,
        "sent": lambda usage: usage.bytes_sent,
    }
    rows = []
    for role in dict.fromkeys(roles.get(usage.rank, "") for usage in usages):
        mine = [usage for usage in usages if roles.get(usage.rank, "") == role]
        for kind, measure in measures.items():
            most = max(mine, key=measure)
            mean, largest = fmean(map(measure, mine)), measure(most)
            ratio = round(largest / mean, 6) if mean else 1.0
            rows.append(BalanceRow(role, kind, min(map(measure, mine)), mean, largest, most.rank, ratio))
    return tuple(rows)


def traffic(usages: Sequence[RankUsage]) -> tuple[GroupTraffic, ...]:
    """The calls of each group by operator."""
    rows_of: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for usage in usages:
        for call in usage.communication:
            rows_of.setdefault((call.group, call.op), []).append((call.calls, call.bytes_sent))
    return tuple(
        GroupTraffic(
            group, op, len(rows), fmean(calls for calls, _ in rows), fmean(sent for _, sent in rows),
            max(sent for _, sent in rows),
        )
        for (group, op), rows in rows_of.items()
    )  # fmt: skip


def fullest(usages: Sequence[RankUsage]) -> RankUsage | None:
    """The first of the fullest ranks; None without ranks."""
    return max(usages, key=_total, default=None)
