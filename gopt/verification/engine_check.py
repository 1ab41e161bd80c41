"""The result of a second engine on a step: the engine, and the differences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineDifference:
    """``value``, of ``node``, differs by ``error`` of the value's size, by ``engine``. ``rewritten``: the node alone
    does not differ, but with the nodes in front; so a rewrite of ONNX Runtime is wrong."""

    node: str
    value: str
    error: float
    rewritten: bool
    engine: str = "onnx's evaluator"

    def reason(self) -> str:
        whose = "a rewrite of ONNX Runtime changes" if self.rewritten else f"ONNX Runtime and {self.engine} differ on"
        return f"{whose} {self.node}: {self.value!r} is {self.error:.1g} of its size off"


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """The comparison with a second engine. ``engine``: '' if none ran, and ``why``; ``values``: compared results;
    ``unexplained``: results that differ although no node does alone."""

    engine: str
    values: int = 0
    why: str = ""
    difference: EngineDifference | None = None
    unexplained: tuple[str, ...] = ()

    def doubts(self) -> Iterator[tuple[str, str]]:
        """A name left unconfirmed by the check, and the reason."""
        if self.difference is not None:
            yield self.difference.value, self.difference.reason()
        for name in self.unexplained:
            more = f": {self.why}" if self.why else ""
            yield name, f"{self.engine} computes it otherwise, by more than rounding{more}"

    def to_json(self) -> dict[str, Any]:
        difference = self.difference
        return {
            "engine": self.engine, "values": self.values, "why": self.why, "unexplained": list(self.unexplained),
            "difference": None if difference is None else {
                "node": difference.node, "value": difference.value, "error": difference.error,
                "rewritten": difference.rewritten,
            },
        }  # fmt: skip
