"""Cases drawn at random, one after the other: what the commands of the generators share.

Such a command prints the cases that went wrong, and at its end how many cases had which outcome, and why the others
were refused. It ends with 1 where one went wrong.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a case: in a word, such as ``equal`` or ``refused``, and why."""

    outcome: str
    why: str = ""

    @property
    def kind(self) -> str:
        """The reason without names and numbers: what is alike counts as one."""
        why = re.sub(r"'[^']*'", "'…'", self.why.split("\n")[0])
        return f"{self.outcome}: {re.sub(r'[0-9][0-9.e+-]*', '#', why)[:160]}"


@dataclass(frozen=True, slots=True)
class Case:
    """A case that was judged. ``name``: by which it is drawn again; ``told``: it in words; ``kind``: by what refusals
    are counted."""

    name: str
    told: str
    outcome: str
    why: str = ""
    kind: str = ""

    @classmethod
    def of(cls, seed: int, told: str, verdict: Verdict) -> Case:
        """The case of a seed."""
        return cls(f"seed {seed}", told, verdict.outcome, verdict.why, verdict.kind)


def parser(program: str, doc: str | None, seed: int = 0, minutes: float = 2.0) -> argparse.ArgumentParser:
    """The options that all of them have, with their defaults."""
    made = argparse.ArgumentParser(prog=program, description=doc)
    made.add_argument("--seed", type=int, default=seed, help="the first")
    made.add_argument("--minutes", type=float, default=minutes)
    made.add_argument("--count", type=int, help="no more cases than that")
    return made


def of_seeds(options: argparse.Namespace, one: Callable[[int], Case]) -> Iterator[Case]:
    """The cases of the seeds that the options ask for."""
    return map(one, islice(count(options.seed), options.count))


def run(
    cases: Iterable[Case],
    minutes: float,
    *,
    quiet: Collection[str],
    wrong: Callable[[str], bool] = ("WRONG", "CRASH").__contains__,
) -> int:
    """Judge cases until the time is over; return the exit code.

    ``quiet``: outcomes of which cases are counted alone; ``wrong``: whether the command fails for an outcome.
    """
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    examples: dict[str, str] = {}
    first = last = ""
    end = time.monotonic() + 60 * minutes
    for case in cases:
        counts[case.outcome] += 1
        first, last = first or case.name, case.name
        if case.outcome in ("refused", "unjust"):
            reasons[case.kind] += 1
            examples.setdefault(case.kind, case.name)
        if case.outcome not in quiet:
            print(f"{case.outcome} {case.told}\n    {case.why}", flush=True)
        if time.monotonic() >= end:
            break
    print(f"{counts.total()} cases, {first} to {last}: {dict(counts)}")
    for kind, number in reasons.most_common():
        print(f"{number:5} {kind} ({examples[kind]})")
    return 1 if any(map(wrong, counts)) else 0
