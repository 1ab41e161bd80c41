"""``gopt golden``: short texts of what gopt makes of models, for review and CI."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gopt.errors import OptionError
from gopt.garbage import gc_paused

from .terminal import print_text

if TYPE_CHECKING:
    from gopt.offline.goldens.golden_files import GoldenCase

_REFUSED = ("output", "dry_run", "force", "as_json", "explain", "print_after", "print_dir", "auto", "only_ranks")
"""Options that say where and how much to write, or whose result is no text that stays the same."""


@click.group("golden")
def command() -> None:
    """Keep what gopt makes of models as short texts, so that changes are reviewed.

    \b
    Example:
      gopt golden update goldens
      gopt golden check goldens
    """


@command.command("update")
@click.argument("folder", metavar="DIR", type=click.Path())
def update(folder: str) -> int:
    """Write the goldens that DIR/gopt-golden.toml names into DIR/golden: all of them in one step, or none."""
    from gopt.offline.goldens.golden_files import update_goldens

    texts = _texts(Path(folder))
    print_text("\n".join(update_goldens(Path(folder), texts) or ["nothing changed"]))
    return 0


@command.command("check")
@click.argument("folder", metavar="DIR", type=click.Path())
def check(folder: str) -> int:
    """Compare the goldens in DIR/golden with what gopt makes now. Exit code 1, with the diff, where they differ."""
    from gopt.offline.goldens.golden_files import check_goldens

    from .render_golden import render_check

    found = check_goldens(Path(folder), _texts(Path(folder)))
    render_check(found, folder)
    return found.exit_code


def _texts(folder: Path) -> dict[str, str]:
    """Case -> golden. Nothing is written."""
    from gopt.offline.goldens.golden_files import read_cases

    with gc_paused():
        return {case.name: _text(case) for case in read_cases(folder)}


def _text(case: GoldenCase) -> str:
    from gopt.offline.goldens.golden_text import golden_text

    from . import shard, split

    of = {"shard": shard.command, "split": split.command}[case.asked.command]
    context = of.make_context(case.asked.command, [str(case.model), *case.asked.options])
    given: dict[str, Any] = dict(context.params)
    model = given.pop("model")
    for name in _REFUSED:
        if given.get(name):
            option = name.replace("_", "-").replace("as-", "")
            raise OptionError(f"case {case.name}: --{option} means nothing in a golden", "leave it out")
    if case.asked.command == "shard":
        made = shard.sharded(model, given)
        graphs = {"all ranks": made.program.graph}
        return golden_text(case.asked, made.source.training, made.manifest(), made.report(), graphs, case.keep)
    parted = split.split_step(model, given)
    step = parted.step
    graphs = {"trainers": step.trainer.graph, "servers": step.servers.graph}
    if step.sync is not None:
        graphs["sync of trainers"] = step.sync.graph
    return golden_text(case.asked, parted.source.training, parted.manifest(), parted.report(), graphs, case.keep)
