"""The result of a second engine on a step: which engine it was, and where it differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineDifference:
    """``value``, of ``node``, differs by ``error`` of its size. ``rewritten``: alone it does not, but with the nodes in
    front of it; so a rewrite of ONNX Runtime is wrong."""

    node: str
    value: str
    error: float
    rewritten: bool

    def reason(self) -> str:
        whose = "a rewrite of ONNX Runtime changes" if self.rewritten else "ONNX Runtime and onnx's evaluator differ on"
        return f"{whose} {self.node}: {self.value!r} is {self.error:.1g} of its size off"


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """The comparison with a second engine. ``engine``: '' where none ran, and ``why``; ``values``: results that were
    compared; ``unexplained``: those that differ although no node does alone."""

    engine: str
    values: int = 0
    why: str = ""
    difference: EngineDifference | None = None
    unexplained: tuple[str, ...] = ()

    def doubts(self) -> Iterator[tuple[str, str]]:
        """A name that is not confirmed because of it, and the reason."""
        if self.difference is not None:
            yield self.difference.value, self.difference.reason()
        for name in self.unexplained:
            more = f": {self.why}" if self.why else ""
            yield name, f"{self.engine} computes it otherwise, by more than rounding{more}"

    def to_json(self) -> dict[str, Any]:
        found = self.difference
        return {
            "engine": self.engine, "values": self.values, "why": self.why, "unexplained": list(self.unexplained),
            "difference": None if found is None else {
                "node": found.node, "value": found.value, "error": found.error, "rewritten": found.rewritten,
            },
        }  # fmt: skip
