"""Values that the forward of a micro-batch leaves for its backward, on a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(slots=True)
class _Saved:
    """A value, and the number of phases that are still to read the value."""

    value: Any
    reads: int


class ActivationStore:
    """The saved values of a rank, each in memory until its last reader has run; ``inputs``: of each phase."""

    def __init__(self, names: Iterable[str], inputs: Collection[Container[str]]) -> None:
        self._readers = {name: sum(name in reads for reads in inputs) for name in names}
        self._saved: dict[tuple[int, str], _Saved] = {}

    def take(self, turn: int, inputs: Container[str]) -> dict[str, Any]:
        """The values of micro-step ``turn`` that a phase with these inputs reads; the last reader takes a value out."""
        taken: dict[str, Any] = {}
        for key, saved in [(key, self._saved[key]) for key in self._keys(turn, inputs) if key in self._saved]:
            taken[key[1]] = saved.value
            saved.reads -= 1
            if not saved.reads:
                del self._saved[key]
        return taken

    def keep(self, turn: int, results: dict[str, Any]) -> None:
        """Move saved values out of the results of a phase; arrays are copied, since the next run writes over them."""
        for key in self._keys(turn, results):
            value = results.pop(key[1])
            self._saved[key] = _Saved(value.copy() if isinstance(value, np.ndarray) else value, self._readers[key[1]])

    def _keys(self, turn: int, names: Container[str]) -> list[tuple[int, str]]:
        return [(turn, name) for name in self._readers if name in names]
