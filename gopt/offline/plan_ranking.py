"""Choices of ``gopt plan``, best first, each with one sentence on the rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gopt.artifact.report_record import ChoiceEntry
from gopt.documents.records import from_document
from gopt.errors import OptionError
from gopt.offline.plan import PlanChoice
from gopt.offline.step_time import StepTime
from gopt.text.amounts import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class RankedChoice:
    """A choice with whether it fits, and one sentence on the rank."""

    choice: PlanChoice
    fits: bool
    why: str

    def to_json(self) -> dict[str, Any]:
        return {**self.choice.to_json(), "fits": self.fits, "why": self.why}

    def entry(self, weighed: int, memory: int | None, link: str | None, device: str | None = None) -> ChoiceEntry:
        """Return the report's entry of this choice, as the best of ``weighed`` choices under these limits."""
        limits = {"weighed": weighed, "memory": memory, "link": link, "device": device}
        return from_document(ChoiceEntry, {**limits, **self.to_json()})


def rank_choices(choices: Sequence[PlanChoice], memory: int | None) -> list[RankedChoice]:
    """Best first: choices within ``memory`` bytes; then least time, to three digits; least traffic; fewest bytes held;
    fewest calls; the most even."""

    def key(choice: PlanChoice) -> tuple[bool, float, float, int, int, float]:
        return (not fits(choice, memory), choice.seconds, *_ties(choice))

    ordered = sorted(choices, key=key)
    return [RankedChoice(choice, fits(choice, memory), _why(choice, ordered[0], memory)) for choice in ordered]


def best(choices: Sequence[PlanChoice], memory: int | None) -> RankedChoice:
    """The first of the ranked choices; raises OptionError when none fits."""
    top = rank_choices(choices, memory)[0]
    if not top.fits and memory is not None:
        least = min(choices, key=lambda choice: choice.held)
        raise OptionError(
            f"nothing fits in {format_bytes(memory)} a rank: {least.settings} needs {format_bytes(least.held)}",
            "take more ranks, a smaller batch, or another mesh: gopt plan MODEL --ranks N --memory SIZE weighs meshes",
        )
    return top


def held_first(choice: PlanChoice, memory: int | None) -> tuple[bool, float, float, float, int, int, float]:
    """The key of an order with choices beyond ``memory`` bytes behind others, by bytes held."""
    over = not fits(choice, memory)
    return (over, choice.held if over else 0, choice.seconds, *_ties(choice))


def fits(choice: PlanChoice, memory: int | None) -> bool:
    """Return whether a choice is within the memory of a rank."""
    return memory is None or choice.held <= memory


def _ties(choice: PlanChoice) -> tuple[float, int, int, float]:
    return choice.sent, choice.held, choice.costs.calls.count, choice.balance


def _why(choice: PlanChoice, top: PlanChoice, memory: int | None) -> str:
    """One sentence: why the choice ranks behind the first."""
    if memory is not None and not fits(choice, memory):
        return f"does not fit: {format_bytes(choice.held)} of {format_bytes(memory)}"
    if choice is top:
        return _praise(choice, memory)
    slower, mine, theirs = choice.seconds > top.seconds, choice.costs, top.costs
    if slower and top.seconds:
        per_batch = "" if choice.batches == top.batches else " for each batch"
        return f"{choice.seconds / top.seconds:.2f} times the time of the first{per_batch}: {_cause(choice, top)}"
    if slower:
        return f"the first adds no time: {_cause(choice, top)}"
    lead = "same time" if choice.times is not None else "same traffic"
    if choice.sent > top.sent:
        return f"{'same time, ' if choice.times else ''}{_times_the_bytes(choice, top)}"
    if choice.held > top.held:
        return f"{lead}, {format_bytes(choice.held - top.held)} more memory than the first"
    if mine.calls.count > theirs.calls.count:
        return f"{lead} and memory, {mine.calls.count - theirs.calls.count} calls more than the first"
    if choice.balance > top.balance:
        return f"{lead} and memory, less even: {choice.balance:.3f}"
    return "the same as row 1" if _ties(choice) == _ties(top) else f"{lead}, holds a little less"


def _times_the_bytes(choice: PlanChoice, top: PlanChoice) -> str:
    per_batch = "" if choice.batches == top.batches else " for each batch"
    if not top.sent:
        return f"sends {format_bytes(round(choice.sent))}{per_batch}, the first nothing"
    ratio = f"{choice.sent / top.sent:.2f}"
    return (
        f"sends {ratio} times the bytes{per_batch}"
        if ratio != "1.00"
        else f"sends a few bytes more{per_batch} than the first"
    )


def _praise(choice: PlanChoice, memory: int | None) -> str:
    among = "" if memory is None else " of those that fit"
    if choice.time is not None:
        return f"least time{among}: {choice.time.compute / choice.time.seconds:.0%} of the step is computation"
    if choice.times is None:
        return f"fewest bytes sent{among}, then least memory"
    return f"least time{among}: {choice.costs.overlap.hidden_share:.0%} of its bytes overlap with computation"


def _cause(choice: PlanChoice, top: PlanChoice) -> str:
    """Return why a choice is slower than the first: latency of its calls, or bytes that do not overlap."""
    mine, theirs = choice.costs, top.costs
    if choice.time is not None and top.time is not None:
        return _slower_part(choice, choice.time, top, top.time)
    if choice.times is not None and top.times is not None:
        starts = choice.times.latency / choice.batches - top.times.latency / top.batches
        if starts > (choice.times.exposed / choice.batches - top.times.exposed / top.batches) - starts:
            if choice.batches < top.batches:
                return f"its {mine.calls.count} calls are for {_count(choice)}, {theirs.calls.count} for {_count(top)}"
            return f"its calls take longer to start ({mine.calls.count}, the first {theirs.calls.count})"
        if choice.balance > top.balance and _a_byte(choice) > 1.05 * _a_byte(top):
            return f"the ring waits for the largest share (balance {choice.balance:.3f})"
    if mine.overlap.hidden_share < theirs.overlap.hidden_share:
        return f"overlaps {mine.overlap.hidden_share:.0%} of its bytes, the first {theirs.overlap.hidden_share:.0%}"
    if choice.sent > top.sent:
        return _times_the_bytes(choice, top)
    return f"its bytes take longer (balance {choice.balance:.3f})"


_PARTS = {
    "compute": "its operators take", "recompute": "what runs a second time takes", "exposed": "calls keep it waiting",
    "bubble": "stages wait for one another", "fixed": "its runs of files take",
}  # fmt: skip


def _slower_part(choice: PlanChoice, mine: StepTime, top: PlanChoice, theirs: StepTime) -> str:
    """The part of a step's time with the largest growth over the first choice, for each batch."""

    def more(part: str) -> float:
        return float(getattr(mine, part) / choice.batches - getattr(theirs, part) / top.batches)

    part = max(_PARTS, key=more)
    per_batch = "" if choice.batches == top.batches else " for each batch"
    return f"{_PARTS[part]} {format_seconds(more(part))} longer{per_batch}"


def _count(choice: PlanChoice) -> str:
    return f"{choice.batches} batch{'es' if choice.batches > 1 else ''}"


def _a_byte(choice: PlanChoice) -> float:
    """Seconds on the link for each byte sent, starts left out."""
    return (choice.times.total - choice.times.latency) / max(choice.costs.traffic.sent, 1) if choice.times else 0.0
