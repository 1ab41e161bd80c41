"""Rows of a plan of a drawn step, as ranks: gopt takes every row, the figures are those of the ranks, and the ranks are
right."""

from __future__ import annotations

import random
import traceback
from dataclasses import dataclass
from pathlib import Path

from draws import Verdict

import gopt
from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.offline.device import device_of
from gopt.offline.plan import PlanChoice, costs_of
from gopt.records.topology import Topology
from option_gen.judge import of_ranks
from option_gen.make import Setting

LINK = "4x200GB/s:5us,25GB/s:10us"


@dataclass(frozen=True, slots=True)
class Row:
    """A step, what is planned for, and the share of the rows in front of the one that is taken. ``over``: a number of
    ranks, or a mesh."""

    step: Setting
    over: int | str
    device: str | None
    link: str | None
    memory: str | None
    share: float

    @classmethod
    def draw(cls, seed: int, step: str | None = None) -> Row:
        setting, r = Setting.draw(seed, step), random.Random(f"row {seed}")
        over = r.choice((2, 3, 4, 4, 6, 8)) if r.random() < 0.6 else setting.mesh
        device = r.choice((None, "h100", "cpu"))
        link = r.choice((None, LINK)) if device is None else LINK
        return cls(setting, over, device, link, r.choice((None, None, "1KB", "1MB")), r.random() ** 2)

    def told(self) -> str:
        """As a command line."""
        words = [f"{self.step.step}.onnx", "--mesh" if isinstance(self.over, str) else "--ranks", str(self.over)]
        for option in ("device", "link", "memory"):
            words += [f"--{option}", getattr(self, option)] if getattr(self, option) else []
        return " ".join(["plan", *words, f"row {self.share:.3f}"])


def judge(row: Row, folder: Path) -> Verdict:
    """As ``option_gen.judge``; ``WRONG`` also, where ``gopt shard`` refuses a row or has other figures."""
    try:
        return _judged(row, folder)
    except Exception:
        return Verdict("CRASH", traceback.format_exc(limit=-3))


def _judged(row: Row, folder: Path) -> Verdict:
    try:
        step = row.step.file(folder)
        plan = gopt.plan(step, row.over, device=row.device, link=row.link, memory=row.memory)
    except (InputError, OptionError, UnsupportedError) as error:
        return Verdict("refused", str(error))
    choice = plan.choices[int(row.share * len(plan.choices))].choice
    try:
        sharded = as_shard(choice, step, row.link)
        sharded.write(folder / "ranks")
    except (InputError, OptionError, UnsupportedError) as error:
        return Verdict("WRONG", f"{choice} is refused: {error}")
    weighed = weighed_again(choice, sharded, row.device, row.link)
    if weighed != choice:
        return Verdict("WRONG", f"{choice} is {weighed}: {choice.to_json()} and {weighed.to_json()}")
    found = of_ranks(folder)
    return Verdict(found.outcome, f"{choice.mesh} {choice.settings}: {found.why}")


def as_shard(choice: PlanChoice, step: gopt.Source | Path, link: str | None, **more: bool) -> gopt.Sharded:
    """The ranks of a choice."""
    axes = link if choice.mesh.splits_computation else None
    return gopt.shard(step, choice.mesh, choice.settings.applied(gopt.ShardOptions(link=axes)), **more)


def weighed_again(choice: PlanChoice, sharded: gopt.Sharded, device: str | None, link: str | None) -> PlanChoice:
    """The figures of a choice, of the ranks that ``gopt shard`` makes with its options."""
    topology = None if link is None else Topology.parse(link, choice.mesh)
    figures = None if device is None else device_of(device)
    return next(iter(costs_of(sharded.program, sharded.ran, [choice.settings], topology, figures)))
