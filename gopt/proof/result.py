"""Result of a proof: a claim for each state, loss and metric, and the verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from gopt.text.notebook import HtmlTable


class Verdict(str, Enum):
    """What a proof says of one value, the best first."""

    PROVEN = "proven"
    UNPROVEN = "unproven"
    DIFFERENT = "different"


EXIT_CODES = {Verdict.PROVEN: 0, Verdict.UNPROVEN: 4, Verdict.DIFFERENT: 1}


@dataclass(frozen=True, slots=True)
class CounterExample:
    """One element of a value, for numbers drawn from a seed: ``element`` counts in row-major order."""

    element: int
    found: float
    expected: float


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where a rank's value leaves the source's step: ``found`` and ``expected`` in words of the source.

    ``node``: the first node of the rank whose result is not as expected, None where no single node has it. ``ranks``:
    how many ranks have another value than expected."""

    rank: int
    ranks: int
    node: str | None
    found: str
    expected: str
    example: CounterExample | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """One value of the step: a new state, a loss or a metric. ``kind``: of the state, ``loss`` or ``metric``."""

    name: str
    kind: str
    verdict: Verdict
    mismatch: Mismatch | None = None


@dataclass(slots=True)
class Proof(HtmlTable):
    """Result of a proof: ``claims``, states first. ``expressions``: how many different ones the step has."""

    ranks: int
    claims: list[Claim] = field(default_factory=list)
    expressions: int = 0

    def __repr__(self) -> str:
        counts = Counter(claim.verdict.value for claim in self.claims)
        return f"<Proof {self.verdict.value}: {', '.join(f'{n} {word}' for word, n in counts.items())}>"

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of any value; a proof that compares nothing has proven nothing."""
        order = list(Verdict)
        return max((claim.verdict for claim in self.claims), key=order.index, default=Verdict.UNPROVEN)

    @property
    def proven(self) -> bool:
        return self.verdict is Verdict.PROVEN

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def open(self) -> list[Claim]:
        """The claims that are not proven, different values first."""
        order = list(Verdict)
        claims = [claim for claim in self.claims if claim.verdict is not Verdict.PROVEN]
        return sorted(claims, key=lambda claim: -order.index(claim.verdict))

    def reason(self) -> str:
        """In one line, the first value that is not proven; '' if there is none."""
        return next((f"{claim.kind} {claim.name!r} is {claim.verdict.value}" for claim in self.open()), "")

    def to_json(self) -> dict[str, Any]:
        claims = [asdict(claim) | {"verdict": claim.verdict.value} for claim in self.claims]
        return {
            "format": "gopt-proof/1", "proven": self.proven, "verdict": self.verdict.value, "ranks": self.ranks,
            "expressions": self.expressions, "claims": claims,
        }  # fmt: skip
