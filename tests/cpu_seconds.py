"""A plugin of pytest: the CPU seconds of each test and its children, as lines of a file.

``PYTHONPATH=tests pytest -p cpu_seconds tests/cli`` writes ``cpu_seconds.tsv``, or what ``CPU_SECONDS`` names. Fixtures
of a module count for the test that first asks for them.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

FILE = os.environ.get("CPU_SECONDS", "cpu_seconds.tsv")


def spent() -> float:
    """CPU seconds of this process and of its children that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


def _write(seconds: float, what: str) -> None:
    with open(FILE, "a", encoding="utf-8") as file:
        file.write(f"{seconds:.3f}\t{what}\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    begin = spent()
    done = yield
    _write(spent() - begin, item.nodeid)
    return done


def pytest_collection_finish() -> None:
    _write(spent(), "collection")
