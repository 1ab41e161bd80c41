"""Prints the result of ``gopt split``, and of ``gopt inspect`` for the folders. Every line and table fits in 80
columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from gopt.text.amounts import format_bytes, rank_ranges
from gopt.text.sanitize import listed

from .render import console, few, print_left, table
from .render_before_after import render_roles

if TYPE_CHECKING:
    from gopt.artifact.manifest import Manifest
    from gopt.artifact.report_record import Report
    from gopt.offline.inspect_role import RoleInspection
    from gopt.offline.inspect_split import SplitInspection
    from gopt.offline.plan_split import RankedSplit

_COLUMNS = ("server", "pieces", "parameters", "states", "gradients", "pushed", "pulled")


def print_split(manifest: Manifest, report: Report, output: Path | None) -> None:
    """Print a new split; ``output`` is None where nothing was written."""
    from gopt.offline.inspect_split import inspect_split

    assert manifest.parameter_server is not None
    render_split(inspect_split(manifest, manifest.parameter_server, report), output)


def render_split(info: SplitInspection, output: Path | None, *, written: bool = True) -> None:
    """A split. ``output``: the folder, None if nothing was written; ``written``: whether made just now."""
    out = console()
    source, counts, settings = info.source, info.source.counts, info.settings
    rest = (
        f"  {counts.get('nodes', 0)} nodes, {counts.get('parameter', 0)} parameters, "
        f"{counts.get('optimizer_state', 0)} optimizer states, {format_bytes(source.nbytes)}"
    )
    out.print(Text.assemble((source.file, "bold"), rest))
    for line in _settings(info):
        out.print(line)
    render_roles(out, info.facts.sizes)
    rows = [
        (server.server, server.pieces, *map(format_bytes, (server.parameters, server.optimizer_states, server.gradients,
                                                       server.pushed, server.pulled)))
        for server in few(info.per_server)
    ]  # fmt: skip
    out.print(table("Servers; pushed and pulled by one trainer in a step", _COLUMNS, rows, range(len(_COLUMNS))))
    print_left(out, len(info.per_server) - len(rows))
    times = "" if settings.accumulate == 1 else f" after {settings.accumulate} micro-steps"
    out.print(
        f"each trainer pushes {format_bytes(info.pushed)} in {_count(info.messages, 'message')}{times} and pulls "
        f"{format_bytes(info.pulled)} a step"
    )
    idle = f"; idle: {rank_ranges(info.idle)}" if info.idle else ""
    out.print(f"balance: {info.balance:.3f} = the fullest server over the mean{idle}")
    out.print(f"nodes: {info.removed_ops} of the source removed from a role, {info.added_ops} added")
    for note in info.notes:
        out.print(Text(f"note: {note}"))
    if output is None:
        out.print("nothing written (--dry-run)")
    elif written:
        out.print(f"{info.checks} checks of pieces, messages and graphs passed; written to {output}")


def render_role(info: RoleInspection) -> None:
    """A file of a trainer or a server."""
    out = console()
    whose = "all trainers" if info.role == "trainer" else f"server {info.number}"
    operators = ", ".join(f"{count} {name}" for name, count in list(info.operators.items())[:6])
    out.print(Text.assemble((info.file, "bold"), f"  the step of {whose}, {_count(info.nodes, 'node')}"))
    out.print(Text(f"most frequent: {operators}"))
    for title, names in (("fed", info.batch), ("gives", info.outputs)):
        if names:
            out.print(f"{title}: {listed(names, 8)}")
    nbytes = sum(info.states.values())
    out.print(f"carries {_count(len(info.states), 'value')} of {format_bytes(nbytes)}")
    rows = [
        (message.op, "" if message.server is None else message.server, "" if message.bucket is None else message.bucket,
         format_bytes(message.nbytes), listed(message.keys, 2))
        for message in few(info.messages)
    ]  # fmt: skip
    out.print(table("Messages, in order", ("message", "server", "bucket", "bytes", "keys"), rows, (1, 2, 3)))
    print_left(out, len(info.messages) - len(rows))
    if info.collectives:
        calls = ", ".join(f"{count} {name}" for name, count in info.collectives.items())
        out.print(Text(f"calls among servers: {calls}"))


def render_choices(rows: Sequence[RankedSplit], memory: int | None) -> None:
    """Print the choices of ``gopt plan --servers``, best first, each with the reason for its rank."""
    out = console()
    choice = rows[0].choice
    lines = []
    for number, row in enumerate(few(rows), 1):
        placed, split = row.choice, row.choice.options
        sizes = map(format_bytes, (max(placed.held), placed.busiest))
        lines.append(
            (number, split.servers, split.slicing.value, split.placement.value, sum(placed.pieces), *sizes,
             f"{placed.balance:.2f}", placed.messages)
        )  # fmt: skip
    title = f"Ways to place parameters for {_count(choice.options.trainers, 'trainer')}, best first"
    columns = ("", "servers", "slicing", "placement", "pieces", "fullest", "busiest", "balance", "messages")
    out.print(table(title, columns, lines, (0, 1, 4, 5, 6, 7, 8)))
    for number, row in enumerate(few(rows), 1):
        out.print(f"{number:2} {row.why}")
    print_left(out, len(rows) - len(lines))
    out.print(
        "fullest: parameters and states of the fullest server; busiest: what travels in a step between all trainers "
        "and the server with most of it, rows of tables estimated; balance: fullest over mean; messages: what a "
        "trainer pushes in a step",
    )
    per_server = [
        (server, pieces, *map(format_bytes, sizes))
        for server, (pieces, *sizes) in enumerate(zip(choice.pieces, choice.parameters, choice.optimizer_states,
                                                      choice.pushed, choice.pulled))
    ]  # fmt: skip
    heads = ("server", "pieces", "parameters", "states", "pushed", "pulled")
    out.print(table("The first; pushed and pulled by one trainer in a step", heads, few(per_server), range(6)))
    print_left(out, len(per_server) - len(few(per_server)))
    if not rows[0].fits and memory is not None:
        out.print(f"nothing fits in {format_bytes(memory)}: more servers")
        return
    split = choice.options
    if memory is not None:
        out.print(f"it fits in {format_bytes(memory)} on each server")
    out.print(
        f"best: gopt split MODEL --trainers {split.trainers} --servers {split.servers} --slicing {split.slicing.value} "
        f"--placement {split.placement.value} ({rows[0].why})",
    )


def _settings(info: SplitInspection) -> Iterator[str]:
    settings, facts = info.settings, info.facts
    extra = [f"wire {settings.wire}"] if settings.wire else []
    extra += [f"delay compensation {settings.compensation:g}"] if settings.compensation is not None else []
    extra += [f"push every {_count(settings.every, 'step')}"] if settings.mode == "geo" else []
    yield ", ".join(
        [
            f"{_count(settings.trainers, 'trainer')} and {_count(settings.servers, 'server')}: mode {settings.mode}",
            f"pull at {settings.pull}",
            *extra,
        ]
    )
    if info.roles:
        yield f"ranks: {info.roles}"
    least = "" if settings.slicing == "off" else f" from {settings.minimum} elements"
    yield (
        f"{_count(facts.parameters, 'parameter')} in {_count(facts.pieces, 'piece')} and {_count(facts.keys, 'key')}"
    )
    yield f"slicing {settings.slicing}{least}, placement {settings.placement}"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
