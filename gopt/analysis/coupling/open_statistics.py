"""Statistics without a known rule of combination over ranks, the rules that a user may state, and notes on both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gopt.analysis.coupling.marks import Coupling, CouplingKind
from gopt.analysis.statistic_points import StatisticReduction
from gopt.analysis.training import TrainingGraph

RULES = ("mean", "sum", "max", "min", "root", "local")
ROWS = ("local", "root")
"""Rules of a statistic that keeps rows of single samples."""
GATHERED = ("gather", *ROWS)
"""Rules of one whose rows ranks can gather."""
WHOLE = ("mean", "root", "local")
"""Rules that combine new values whole, whatever makes them."""
INTEGERS = ("sum", "max", "min", "root", "local")


@dataclass(frozen=True, slots=True)
class OpenStatistic:
    """Why nothing says how the ranks' values of a statistic are combined.

    ``rules``: those that the user may state. ``literal``: a constant that may be a number of samples.
    """

    reason: str
    rules: tuple[str, ...] = RULES
    literal: str = ""


class Unclear(Exception):
    """Raised where nothing says how the ranks' values of a statistic are combined; the text gives the reason."""

    def __init__(self, reason: str, rules: tuple[str, ...] = RULES, literal: str = "") -> None:
        super().__init__(reason)
        self.statistic = OpenStatistic(reason, rules, literal)


@dataclass(frozen=True, slots=True)
class StatisticRules:
    """How the statistics of a step are combined over ranks: those ``known``, as the user says or as they follow the
    batch; the others are ``unclear``, each with the reason. ``followed``: as they follow the batch, whatever the user
    says; none where that is not known."""

    known: dict[str, StatisticReduction] = field(default_factory=dict)
    unclear: dict[str, OpenStatistic] = field(default_factory=dict)
    followed: dict[str, StatisticReduction] = field(default_factory=dict)


_COMBINED = {"root": "ranks take the first rank's", "local": "each rank keeps its own"}


def statistic_couplings(
    training: TrainingGraph, rules: StatisticRules, statistics: Iterable[StatisticReduction]
) -> Iterator[Coupling]:  # fmt: skip
    """The statistics that ranks combine otherwise than they follow the samples, and states that may count samples."""
    states, producers = training.state_of(), {n: node.op_type for node in training.graph.nodes for n in node.outputs}
    for each in statistics:
        name, own = each.tensor, rules.followed.get(each.tensor)
        new, by_name = states[name].updated, name in training.reductions
        if own is None and by_name and each.rule not in _COMBINED:
            continue  # the user says what gopt cannot tell
        if own is not None and own.rule == each.rule and _reduced_at(own, new) == _reduced_at(each, new):
            continue
        how = "in a way that gopt cannot tell" if own is None else f"by {own.rule}"
        ranks = _COMBINED.get(each.rule, f"ranks combine {'it' if by_name else 'its new values'} by {each.rule}")
        exact = own.rule if own is not None else ""
        yield Coupling(
            CouplingKind.REDUCTION, new, producers.get(new, ""),
            f"the statistic {name!r} follows all samples {how}, and {ranks}, as --statistics says",
            f"--statistics {name}={exact} is exact" if exact in RULES else "",
        )  # fmt: skip
    for name, what in training.doubted.items():
        new = states[name].updated
        yield Coupling(
            CouplingKind.REDUCTION, new, producers.get(new, ""), what,
            f"--statistics {name}=sum lets ranks add it up",
        )  # fmt: skip


def _reduced_at(reduction: StatisticReduction, updated: str) -> set[str]:
    return {each.value for each in reduction.points} or {updated}
