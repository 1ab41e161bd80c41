"""Products of several axes that are too large to be run each time: a part of which every pair of values is in."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def spread(*axes: Iterable[Any], keep: int = 1) -> list[Any]:
    """All rows of a product, for ``parametrize``; all but a part of them ``slow``.

    The part: for every choice of values on the axes before the last, ``keep`` values of the last, which go round with
    the choice. So all pairs of values on the axes before are in it, and each value with every one of the last axis as
    far as there are rows enough (``test_every_pair_meets``). The longest axes are to stand first.
    """
    lists: list[Sequence[Any]] = [list(axis) for axis in axes]
    count = len(lists[-1])
    rows = []
    for places in itertools.product(*(range(len(values)) for values in lists)):
        row = [values[place] for values, place in zip(lists, places)]
        kept = (places[-1] - sum(places[:-1])) % count < keep
        rows.append(pytest.param(*row, marks=() if kept else pytest.mark.slow))
    return rows


def part(cases: Iterable[Any], keep: int, first: int = 0) -> list[Any]:
    """All cases, for ``parametrize``; all but ``keep`` of them, evenly spread, ``slow``. Marks of cases stay."""
    rows = list(cases)
    kept = {place + (first if keep < len(rows) else 0) for place in _spread_evenly(len(rows), keep)}
    return [row if place in kept else _slow(row) for place, row in enumerate(rows)]


def fewer(rows: Iterable[Any], keep: int) -> list[Any]:
    """The rows of a product, of which all but ``keep`` of those that would run each time are ``slow`` as well."""
    listed = list(rows)
    left = [place for place, row in enumerate(listed) if not row.marks]
    kept = {left[place] for place in _spread_evenly(len(left), keep)}
    return [_slow(row) if place in left and place not in kept else row for place, row in enumerate(listed)]


CASES = 2
"""Cases of a test that are run where only some are."""


def some_cases(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Of every test some cases, evenly spread, and none that has the mark ``rest``."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("rest") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [cases[place] for cases in tests.values() for place in _spread_evenly(len(cases), CASES)]


def _spread_evenly(count: int, keep: int) -> list[int]:
    keep = min(keep, count)
    return [place * count // keep for place in range(keep)]


def _slow(case: Any) -> Any:
    given = case if hasattr(case, "marks") else pytest.param(*(case if isinstance(case, tuple) else (case,)))
    return pytest.param(*given.values, marks=(*given.marks, pytest.mark.slow), id=given.id)


def kept_rows(rows: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Those that run each time."""
    return [tuple(row.values) for row in rows if not row.marks]
