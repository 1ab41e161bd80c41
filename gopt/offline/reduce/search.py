"""Tries candidates: valid candidates with the same failure of the command are kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from onnx import ModelProto

from gopt.ir.onnx_checker import accepts
from gopt.offline.reduce.graph_view import GraphView
from gopt.offline.reproducer.failure import Failure

Fails = Callable[[bytes], Failure | None]
"""Runs the command on a model and says how it fails."""


class BudgetSpentError(Exception):
    """The tries or the time are used up; ``why`` tells the bound."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """The most runs of the command, and the seconds after which no further run begins."""

    tries: int = 2000
    seconds: float = 3600.0


class Search:
    """The smallest model so far (``view``), and the runs (``tries``), with ``kept`` smaller models."""

    def __init__(
        self, model: ModelProto, failure: Failure, fails: Fails, bounds: SearchBudget, tell: Callable[[str], None]
    ):
        self.view = GraphView(model)
        self.failure = failure
        self.tries = self.kept = 0
        self.nodes_before = len(model.graph.node)
        self._fails, self._bounds, self._tell = fails, bounds, tell
        self._end = time.monotonic() + bounds.seconds
        data = model.SerializeToString()
        self._full = accepts(data, full=True)
        self._checked = self._full or accepts(data, full=False)
        """Whether the checker accepts the model: one that it refuses may be the failure itself."""
        self._seen: set[int] = set()

    def attempt(self, step: str, model: ModelProto | None) -> bool:
        """Keep a candidate if valid, and if the command fails in the same way; raises BudgetSpentError."""
        if model is None:
            return False
        data = model.SerializeToString(deterministic=True)
        if hash(data) in self._seen:
            return False
        self._seen.add(hash(data))
        if self._checked and not accepts(data, full=self._full):
            return False
        self._check_bounds()
        self.tries += 1
        self._tell(
            f"{step}: {len(self.view.nodes)} of {self.nodes_before} nodes left, "
            f"{self.tries} of {self._bounds.tries} tries, {self.kept} kept"
        )
        fails = self._fails(data)
        if fails is None or not fails.same_as(self.failure):
            return False
        self.kept += 1
        self.view = GraphView(model)
        return True

    def _check_bounds(self) -> None:
        if self.tries >= self._bounds.tries:
            raise BudgetSpentError(f"{self._bounds.tries} tries")
        if time.monotonic() > self._end:
            raise BudgetSpentError(f"{self._bounds.seconds:g} seconds")
