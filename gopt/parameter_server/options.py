"""The options of a split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gopt import limits
from gopt.analysis.loss_reduction import LossReduction, LossRule
from gopt.artifact.server_entries import Mode, PullAt
from gopt.errors import OptionError
from gopt.options.records import check_least, check_types, spelled
from gopt.parameter_server.placement import Placement
from gopt.parameter_server.slicing import Slicing
from gopt.records.roles import Roles

COUNTS = ("round", "push", "chief")
WIRES = ("", "float16", "bfloat16")
WIDE = ("float32", "float64")
"""Types that ``wire`` replaces."""


@spelled
@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOptions:
    """The options of ``gopt split``. Raises OptionError for a bad value, and for options that do not compose.

    ``given``: the user's server map, piece or pattern -> server. ``cap``: most bytes of a message with several keys.
    ``wire``: the type in which gradients and parameters travel, '' for their own. ``tables``: parameter or pattern ->
    layout of a table (``plan_tables``); ``tables_off``: every parameter is pulled whole; ``table_memory``: bytes that a
    server has for tables. ``rows``: parameter or pattern -> ``dense``, where each update of a table runs on all rows,
    or ``lazy``, on the pushed ones; the first matching entry counts. ``init``: parameter, state or pattern -> its
    initializer (``RowInit``). ``roles``: the ranks of a launcher, None for trainers first. The others are as in
    ``ServerPlanEntry``.
    """

    trainers: int
    servers: int
    mode: Mode = Mode.SYNC
    pull: PullAt | None = None
    slicing: Slicing = Slicing.BALANCED
    minimum: int = 8192
    placement: Placement = Placement.BYTES
    given: Mapping[str, int] = field(default_factory=dict)
    loss_reduction: LossReduction = field(default_factory=LossReduction)
    accumulate: int = 1
    fixed_trainers: bool = False
    every: int = 1
    compensation: float | None = None
    count: str = "round"
    wire: str = ""
    cap: int = 4 << 20
    tables: Mapping[str, str] = field(default_factory=dict)
    tables_off: bool = False
    table_memory: int | None = None
    rows: Mapping[str, str] = field(default_factory=dict)
    init: Mapping[str, str] = field(default_factory=dict)
    roles: Roles | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_least(self, table_memory=1)
        for what, count in (("--trainers", self.trainers), ("--servers", self.servers)):
            if count > limits.RANKS:
                raise OptionError(
                    f"{what} cannot be {count}: gopt makes at most {limits.RANKS} ranks (RANKS)",
                    limits.hint("RANKS", count),
                )
            if count < 1:
                raise OptionError(f"{what} cannot be {count}", f"it is 1 to {limits.RANKS}")
        for what, count in (("--accumulate", self.accumulate), ("--minimum", self.minimum), ("--every", self.every)):
            if count < 1:
                raise OptionError(f"{what} cannot be {count}", "it is at least 1")
        if self.cap < 1:
            raise OptionError(f"--bucket-mb cannot be {self.cap / 2**20:g}", "give a size in MiB above 0, e.g. 4")
        if self.count not in COUNTS:
            raise OptionError(f"--count cannot be {self.count!r}", f"it is {', '.join(COUNTS)}")
        if self.wire not in WIRES:
            raise OptionError(f"--wire cannot be {self.wire!r}", "it is float16 or bfloat16")
        if self.roles is not None:
            self.roles.check_counts(self.trainers, self.servers)
        self._check_together()

    def _check_together(self) -> None:
        waits = self.mode.rounds
        if self.tables and self.tables_off:
            raise OptionError("--table cannot be combined with --no-tables", "leave one of them out")
        for name, texts in (("table", self.tables), ("rows", self.rows), ("init", self.init)):
            if texts and self.mode is Mode.GEO:
                raise OptionError(
                    f"--{name} cannot be combined with --mode geo: each trainer updates the whole of a table",
                    "leave one of them out",
                )
            if texts and self.accumulate > 1:
                raise OptionError(
                    f"--{name} cannot be combined with --accumulate: micro-steps sum gradients of a whole table, and "
                    "each looks up other rows",
                    f"leave one of them out: without --{name} the whole parameter is sent",
                )
            if texts and self.compensation is not None:
                raise OptionError(
                    f"--{name} cannot be combined with --delay-compensation: servers would keep old rows for each "
                    "trainer",
                    "leave one of them out",
                )
        if self.compensation is not None and self.mode not in (Mode.ASYNC, Mode.HALF_ASYNC):
            raise OptionError("--delay-compensation needs --mode async", f"in mode {self.mode} no gradient is late")
        if self.compensation is not None and not 0 <= self.compensation < float("inf"):
            raise OptionError(f"--delay-compensation cannot be {self.compensation}", "it is a number from 0")
        if self.every > 1 and self.mode is not Mode.GEO:
            raise OptionError(f"--every {self.every} needs --mode geo", "see --accumulate for sums of gradients")
        if self.count != "round" and (waits or self.mode is Mode.GEO):
            raise OptionError(
                f"--count {self.count} needs --mode async or half-async", f"in mode {self.mode} a round is a step"
            )
        if self.loss_reduction.rule is not LossRule.MEAN and not waits:
            raise OptionError(
                f"--loss-reduction {self.loss_reduction} needs --mode sync", "elsewhere nothing is merged on servers"
            )
        if self.loss_reduction.summed:
            raise OptionError(
                f"--loss-reduction {self.loss_reduction}: servers combine all gradients by one rule",
                "say mean, sum or weighted:VALUE",
            )
        if self.accumulate > 1 and self.mode is Mode.GEO:
            raise OptionError("--accumulate cannot be combined with --mode geo", "--every says how often trainers push")
        if self.accumulate > 1 and self.pull is PullAt.START:
            raise OptionError(
                "--pull start cannot be combined with --accumulate", "micro-steps share what was pulled once"
            )

    @property
    def pulls(self) -> PullAt:
        """Return when trainers pull."""
        if self.pull is not None:
            return self.pull
        return PullAt.END if self.accumulate > 1 or self.mode is Mode.GEO else PullAt.START

    def travels(self, dtype: str) -> str:
        """Return the type in which gradients and parameters of a type travel."""
        return self.wire if self.wire and dtype in WIDE else dtype
