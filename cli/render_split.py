"""What ``gopt split`` shows, and ``gopt inspect`` of its folders. Every line and table fits in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from gopt.artifact.report import format_bytes, rank_ranges

from .render import console, few, table

if TYPE_CHECKING:
    from gopt.offline.inspect_split import SplitInspection

_COLUMNS = ("server", "pieces", "parameters", "states", "gradients", "pushed", "pulled")


def render_split(found: SplitInspection, output: Path | None, *, written: bool = True) -> None:
    """A split. ``output``: its folder, None where nothing was written; ``written``: it was made just now."""
    out = console()
    source, counts, given = found.source, found.source.counts, found.settings
    rest = (
        f"  {counts.get('nodes', 0)} nodes, {counts.get('parameter', 0)} parameters, "
        f"{counts.get('optimizer_state', 0)} optimizer states, {format_bytes(source.nbytes)}"
    )
    out.print(Text.assemble((source.file, "bold"), rest), soft_wrap=True)
    for line in _settings(found):
        out.print(line, soft_wrap=True)
    rows = [
        (each.server, each.pieces, *map(format_bytes, (each.parameters, each.optimizer_states, each.gradients,
                                                       each.pushed, each.pulled)))
        for each in few(found.per_server)
    ]  # fmt: skip
    out.print(table("Servers; pushed and pulled by one trainer in a step", _COLUMNS, rows, range(len(_COLUMNS))))
    if len(found.per_server) > len(rows):
        out.print(f"… and {len(found.per_server) - len(rows)} more: see --json")
    times = "" if given.accumulate == 1 else f" after {given.accumulate} micro-steps"
    out.print(
        f"each trainer pushes {format_bytes(found.pushed)} in {_count(found.messages, 'message')}{times} and pulls "
        f"{format_bytes(found.pulled)} a step",
        soft_wrap=True,
    )
    idle = f"; idle: {rank_ranges(found.idle)}" if found.idle else ""
    out.print(f"balance: {found.balance:.3f} = the fullest server over the mean{idle}", soft_wrap=True)
    out.print(f"nodes: {found.removed_ops} of the source removed from a role, {found.added_ops} added", soft_wrap=True)
    for note in found.notes:
        out.print(Text(f"note: {note}"), soft_wrap=True)
    if output is None:
        out.print("nothing written (--dry-run)")
    elif written:
        out.print(f"{found.checks} checks passed; written to {output}", soft_wrap=True)


def _settings(found: SplitInspection) -> Iterator[str]:
    given, facts = found.settings, found.facts
    extra = [f"wire {given.wire}"] if given.wire else []
    extra += [f"delay compensation {given.compensation:g}"] if given.compensation is not None else []
    extra += [f"push every {_count(given.every, 'step')}"] if given.mode == "geo" else []
    yield ", ".join(
        [
            f"{_count(given.trainers, 'trainer')} and {_count(given.servers, 'server')}: mode {given.mode}",
            f"pull at {given.pull}",
            *extra,
        ]
    )
    if found.roles:
        yield f"ranks: {found.roles}"
    least = "" if given.slicing == "off" else f" from {given.minimum} elements"
    yield (
        f"{_count(facts.parameters, 'parameter')} in {_count(facts.pieces, 'piece')} and {_count(facts.keys, 'key')}: "
        f"slicing {given.slicing}{least}, placement {given.placement}"
    )


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
