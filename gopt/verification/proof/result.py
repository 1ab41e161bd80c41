"""Result of a proof: a claim for each state, loss and metric, and the verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from gopt.text.notebook import HtmlTable


class ProofVerdict(str, Enum):
    """The verdict on a value, the best first."""

    PROVEN = "proven"
    UNPROVEN = "unproven"
    DIFFERENT = "different"


EXIT_CODES = {ProofVerdict.PROVEN: 0, ProofVerdict.UNPROVEN: 4, ProofVerdict.DIFFERENT: 1}


@dataclass(frozen=True, slots=True)
class CounterExample:
    """An element of a value, for numbers drawn from a seed: ``element`` counts in row-major order."""

    element: int
    actual: float
    expected: float


@dataclass(frozen=True, slots=True)
class ClaimMismatch:
    """Where a rank's value leaves the source's step: ``actual`` and ``expected`` in words of the source.

    ``node``: the first unexpected value of the rank's files, or None. ``ranks``: the number of ranks with another value
    than expected."""

    rank: int
    ranks: int
    node: str | None
    actual: str
    expected: str
    example: CounterExample | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A value of the step: a new state, a loss or a metric. ``kind``: of the state, ``loss`` or ``metric``."""

    name: str
    kind: str
    verdict: ProofVerdict
    mismatch: ClaimMismatch | None = None


@dataclass(slots=True)
class RankProof(HtmlTable):
    """Result of a proof: ``claims``, states first. ``expressions``: the number of different expressions.

    ``roundings``: node -> number of rounded sums of widened halves for a half of the source; ranks with the same
    operands count once."""

    ranks: int
    claims: list[Claim] = field(default_factory=list)
    expressions: int = 0
    roundings: dict[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        counts = Counter(claim.verdict.value for claim in self.claims)
        return f"<RankProof {self.verdict.value}: {', '.join(f'{n} {word}' for word, n in counts.items())}>"

    @property
    def verdict(self) -> ProofVerdict:
        """The worst verdict of any value; a proof without claims has proven nothing."""
        order = list(ProofVerdict)
        return max((claim.verdict for claim in self.claims), key=order.index, default=ProofVerdict.UNPROVEN)

    @property
    def proven(self) -> bool:
        return self.verdict is ProofVerdict.PROVEN

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def open(self) -> list[Claim]:
        """The claims without a proof: different values first, and of these the values with a named node."""
        order = list(ProofVerdict)
        claims = [claim for claim in self.claims if claim.verdict is not ProofVerdict.PROVEN]
        return sorted(
            claims, key=lambda claim: (-order.index(claim.verdict), not (claim.mismatch and claim.mismatch.node))
        )

    def reason(self) -> str:
        """In a line, the first value without a proof; '' for a complete proof."""
        return next((f"{claim.kind} {claim.name!r} is {claim.verdict.value}" for claim in self.open()), "")

    def to_json(self) -> dict[str, Any]:
        claims = [asdict(claim) | {"verdict": claim.verdict.value} for claim in self.claims]
        return {
            "format": "gopt-proof/1", "proven": self.proven, "verdict": self.verdict.value, "ranks": self.ranks,
            "expressions": self.expressions, "roundings": self.roundings, "claims": claims,
        }  # fmt: skip
