"""Ranks and bytes as short texts: ranges of ranks, groups of equal ranks, bytes in powers of 1024, seconds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def rank_ranges(ranks: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``0-2,5``."""
    if len(ranks) > 1 and tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    parts: list[str] = []
    start = 0
    for index in range(1, len(ranks) + 1):
        if index == len(ranks) or ranks[index] != ranks[index - 1] + 1:
            start_rank, last = ranks[start], ranks[index - 1]
            parts.append(str(start_rank) if start_rank == last else f"{start_rank}-{last}")
            start = index
    return ",".join(parts)


def group_ranks(rows: Sequence[tuple[int, T]]) -> list[tuple[list[int], T]]:
    """Return groups of ranks with equal values, in the order of the first rank."""
    groups: dict[T, list[int]] = {}
    for rank, value in rows:
        groups.setdefault(value, []).append(rank)
    return [(ranks, value) for value, ranks in groups.items()]


def balance(values: Sequence[int]) -> float:
    """Return the maximum over the mean; 1 for equal or zero values."""
    total = sum(values)
    return round(max(values) * len(values) / total, 6) if total else 1.0


def format_bytes(nbytes: float) -> str:
    """Bytes for people: powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """Three digits, for people: ``1.16 ms``."""
    if seconds == 0:
        return "0"
    unit, scale = next((item for item in (("s", 1.0), ("ms", 1e-3)) if abs(seconds) >= 0.9995 * item[1]), ("us", 1e-6))
    return f"{seconds / scale:#.3g}".rstrip(".") + f" {unit}"
