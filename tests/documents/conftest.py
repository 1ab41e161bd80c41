"""Files are damaged on purpose, and readers are to notice it themselves: digests would refuse all of them alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import gopt


@pytest.fixture(autouse=True)
def files_are_not_compared() -> Iterator[None]:
    with gopt.unchecked():
        yield
