"""Result of a verification: differences, doubts, and the outcome."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gopt.artifact.report_record import ProofEntry
from gopt.documents.records import to_document
from gopt.text.notebook import HtmlTable
from gopt.text.sanitize import and_more, listed
from gopt.verification.engine_check import EngineCheck
from gopt.verification.gradient_check import GradientCheck, Verdict
from gopt.verification.gradient_sample import GradientSample
from gopt.verification.large_batch import LargeBatchCheck


class Outcome(str, Enum):
    """Outcome of a verification."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNCONFIRMED = "unconfirmed"


EXIT_CODES = {Outcome.EQUAL: 0, Outcome.DIFFERENT: 1, Outcome.UNCONFIRMED: 4}


@dataclass(frozen=True, slots=True)
class Difference:
    """Error of a value, in multiples of its tolerance.

    ``error_over_tolerance``: the distance over the allowance, a number without a unit; above 1 is a failure. Times
    ``Verification.tolerance`` the number is the relative error of the value's change since the first step."""

    variant: str
    step: int
    rank: int
    name: str
    kind: str
    error_over_tolerance: float

    @property
    def fails(self) -> bool:
        return not self.error_over_tolerance <= 1

    def to_json(self) -> dict[str, Any]:
        return {
            "variant": self.variant, "step": self.step, "rank": self.rank, "name": self.name, "kind": self.kind,
            "error_over_tolerance": self.error_over_tolerance,
        }  # fmt: skip


@dataclass(slots=True)
class VerifyFailure:
    """A value out of tolerance: the worst comparison, and the number of failed comparisons."""

    worst: Difference
    comparisons: int = 1

    def add(self, difference: Difference) -> None:
        self.comparisons += 1
        if _size(difference.error_over_tolerance) > _size(self.worst.error_over_tolerance):
            self.worst = difference

    def to_json(self) -> dict[str, Any]:
        return self.worst.to_json() | {"comparisons": self.comparisons}


@dataclass(frozen=True, slots=True)
class Doubt:
    """A state or value shown neither equal nor different, and why."""

    name: str
    why: str

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "why": self.why}


@dataclass(slots=True)
class Verification(HtmlTable):
    """Result of a verification.

    ``tolerance``: the largest relative error, e.g. 1e-4. ``worst``: of each variant the value furthest off, in
    tolerances: see ``Difference``. ``failures``: every value out of tolerance, by kind and name. ``sample``: the
    checked gradients, None for all. ``doubts``: unconfirmed values. ``noise``: states with gradients of rounding noise,
    judged by the gradients that the ranks really had. ``engines``: a second engine's results on one step of the source.
    ``large_batch``: the comparison of the ranks' first step with the source's on all their samples at once; None where
    one batch is all, and with trainers and servers."""

    tolerance: float
    steps: int
    ranks: int
    compared: int = 0
    worst: dict[str, Difference] = field(default_factory=dict)
    gradients: list[GradientCheck] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)
    noise: list[str] = field(default_factory=list)
    failures: dict[tuple[str, str], VerifyFailure] = field(default_factory=dict)
    sample: GradientSample | None = None
    engines: list[EngineCheck] = field(default_factory=list)
    large_batch: LargeBatchCheck | None = None
    proof: ProofEntry | None = None
    """The proof of the ranks when they were written, which the digests of the files still fit."""

    def __repr__(self) -> str:
        words = {Outcome.EQUAL: "equal", Outcome.DIFFERENT: "NOT equal", Outcome.UNCONFIRMED: "NOT confirmed"}
        over = f"{self.compared} comparisons on {self.ranks} ranks over {self.steps} steps"
        return f"<Verification {words[self.outcome]}: {over}, tolerance {self.tolerance:g}>"

    @property
    def outcome(self) -> Outcome:
        """A difference outweighs a doubt."""
        rewritten = any(engine.difference is not None and engine.difference.rewritten for engine in self.engines)
        apart = self.large_batch is not None and self.large_batch.unnoted
        if any(difference.fails for difference in self.worst.values()) or self.refuted() or rewritten or apart:
            return Outcome.DIFFERENT
        return Outcome.UNCONFIRMED if any(self.open()) else Outcome.EQUAL

    @property
    def equal(self) -> bool:
        """Whether everything is within tolerance, and everything is confirmed."""
        return self.outcome is Outcome.EQUAL

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    def reason(self) -> str:
        """In one line, the unequal or unconfirmed value; empty without such a value."""
        for difference in self.worst.values():
            if difference.fails:
                return f"{difference.kind} {difference.name!r} differs"
        for refuted in self.refuted():
            return f"the gradient of {refuted.parameter!r} is refuted"
        if self.large_batch is not None and self.large_batch.unnoted:
            return self.large_batch.reason()
        return next((f"{doubt.name!r} is not confirmed: {doubt.why}" for doubt in self.open()), "")

    def open(self) -> Iterator[Doubt]:
        """All unconfirmed values, gradients included.

        A gradient of rounding noise alone cannot be confirmed by value, and need not be: see ``noise``."""
        yield from self.doubts
        named = {doubt.name for doubt in self.doubts} | set(self.noise)
        for gradient in self.gradients:
            if gradient.verdict is Verdict.UNCONFIRMED and gradient.parameter not in named:
                yield Doubt(gradient.parameter, f"its gradient {gradient.gradient} is not confirmed: {gradient.why}")

    def note(self, difference: Difference) -> None:
        self.compared += 1
        if difference.fails:
            key = difference.kind, difference.name
            if key in self.failures:
                self.failures[key].add(difference)
            else:
                self.failures[key] = VerifyFailure(difference)
        worst = self.worst.get(difference.variant)
        if worst is None or _size(difference.error_over_tolerance) > _size(worst.error_over_tolerance):
            self.worst[difference.variant] = difference

    def failing(self) -> list[VerifyFailure]:
        """Every value out of tolerance, furthest off first."""
        return sorted(self.failures.values(), key=lambda failure: -_size(failure.worst.error_over_tolerance))

    def refuted(self) -> list[GradientCheck]:
        """Values used as gradients, and shown to be none."""
        return [gradient for gradient in self.gradients if gradient.verdict is Verdict.REFUTED]

    def doubt(self, name: str, why: str) -> None:
        """Add a doubt, once a name."""
        if all(doubt.name != name for doubt in self.doubts):
            self.doubts.append(Doubt(name, why))

    def hold_engines(self, checks: Sequence[EngineCheck]) -> None:
        """Add a second engine's results on the source."""
        self.engines += checks
        for check in checks:
            for name, why in check.doubts():
                self.doubt(name, why)
            if not check.engine:
                self.say(f"one step is not confirmed by a second engine: {check.why}")

    def say_stops(self) -> None:
        """Note gradients that are not the whole derivative: the backward takes values for constants."""
        alike: dict[tuple[str, ...], list[str]] = {}
        for gradient in self.gradients:
            if gradient.stops:
                alike.setdefault(gradient.stops, []).append(gradient.parameter)
        for stops, names in alike.items():
            self.say(
                f"the gradient of {names[0]}{and_more(len(names) - 1)} is not the whole "
                f"derivative of the loss: the backward takes for a constant {listed(stops, 1)}"
            )

    def say(self, note: str) -> None:
        """Add a note, once."""
        if note not in self.notes:
            self.notes.append(note)

    def html_rows(self) -> Iterable[tuple[str, object]]:
        """Return the rows of a notebook: how many values failed, and the worst of each variant."""
        worst = {
            name: f"{difference.name}: {difference.error_over_tolerance:.2g} of the tolerance"
            for name, difference in self.worst.items()
        }
        return [
            ("outcome", self.outcome.value), ("tolerance", self.tolerance), ("steps", self.steps),
            ("ranks", self.ranks), ("compared", self.compared), ("failing values", len(self.failures)),
            *((f"worst, {name}", text) for name, text in worst.items()),
            *([("large batch", self.large_batch.line())] if self.large_batch is not None else []),
            ("gradients checked", len(self.gradients)), ("unconfirmed", len(list(self.open()))),
            *(("note", note) for note in self.notes),
        ]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {
            "equal": self.equal, "outcome": self.outcome.value, "tolerance": self.tolerance, "steps": self.steps,
            "ranks": self.ranks, "compared": self.compared,
            "failing": {
                "values": len(self.failures),
                "comparisons": sum(failure.comparisons for failure in self.failures.values()),
                "worst_first": [failure.to_json() for failure in self.failing()],
            },
            "worst": {name: difference.to_json() for name, difference in self.worst.items()},
            "gradients": [gradient.to_json() for gradient in self.gradients],
            "sample": None if self.sample is None else self.sample.to_json(),
            "engines": [engine.to_json() for engine in self.engines],
            "large_batch": None if self.large_batch is None else self.large_batch.to_json(),
            "unconfirmed": [doubt.to_json() for doubt in self.open()], "noise": self.noise, "notes": self.notes,
            "proof": None if self.proof is None else to_document(self.proof),
        }  # fmt: skip


def _size(error: float) -> float:
    """For sorting: NaN is as far off as possible."""
    return error if error == error else float("inf")
