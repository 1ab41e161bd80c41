"""Prints the result of ``gopt split``, and of ``gopt inspect`` for the folders. Every line and table fits in 80
columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from gopt.spmd.pass_records import format_bytes, rank_ranges
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


def render_split(found: SplitInspection, output: Path | None, *, written: bool = True) -> None:
    """A split. ``output``: its folder, None where nothing was written; ``written``: it was made just now."""
    out = console()
    source, counts, given = found.source, found.source.counts, found.settings
    rest = (
        f"  {counts.get('nodes', 0)} nodes, {counts.get('parameter', 0)} parameters, "
        f"{counts.get('optimizer_state', 0)} optimizer states, {format_bytes(source.nbytes)}"
    )
    out.print(Text.assemble((source.file, "bold"), rest))
    for line in _settings(found):
        out.print(line)
    render_roles(out, found.facts.sizes)
    rows = [
        (each.server, each.pieces, *map(format_bytes, (each.parameters, each.optimizer_states, each.gradients,
                                                       each.pushed, each.pulled)))
        for each in few(found.per_server)
    ]  # fmt: skip
    out.print(table("Servers; pushed and pulled by one trainer in a step", _COLUMNS, rows, range(len(_COLUMNS))))
    print_left(out, len(found.per_server) - len(rows))
    times = "" if given.accumulate == 1 else f" after {given.accumulate} micro-steps"
    out.print(
        f"each trainer pushes {format_bytes(found.pushed)} in {_count(found.messages, 'message')}{times} and pulls "
        f"{format_bytes(found.pulled)} a step"
    )
    idle = f"; idle: {rank_ranges(found.idle)}" if found.idle else ""
    out.print(f"balance: {found.balance:.3f} = the fullest server over the mean{idle}")
    out.print(f"nodes: {found.removed_ops} of the source removed from a role, {found.added_ops} added")
    for note in found.notes:
        out.print(Text(f"note: {note}"))
    if output is None:
        out.print("nothing written (--dry-run)")
    elif written:
        out.print(f"{found.checks} checks of pieces, messages and graphs passed; written to {output}")


def render_role(found: RoleInspection) -> None:
    """A file of a trainer or a server."""
    out = console()
    whose = "all trainers" if found.role == "trainer" else f"server {found.number}"
    operators = ", ".join(f"{count} {name}" for name, count in list(found.operators.items())[:6])
    out.print(Text.assemble((found.file, "bold"), f"  the step of {whose}, {_count(found.nodes, 'node')}"))
    out.print(Text(f"most frequent: {operators}"))
    for title, names in (("fed", found.batch), ("gives", found.outputs)):
        if names:
            out.print(f"{title}: {listed(names, 8)}")
    held = sum(found.states.values())
    out.print(f"carries {_count(len(found.states), 'value')} of {format_bytes(held)}")
    rows = [
        (each.op, "" if each.server is None else each.server, "" if each.bucket is None else each.bucket,
         format_bytes(each.nbytes), listed(each.keys, 2))
        for each in few(found.messages)
    ]  # fmt: skip
    out.print(table("Messages, in order", ("message", "server", "bucket", "bytes", "keys"), rows, (1, 2, 3)))
    print_left(out, len(found.messages) - len(rows))
    if found.collectives:
        calls = ", ".join(f"{count} {name}" for name, count in found.collectives.items())
        out.print(Text(f"calls among servers: {calls}"))


def render_choices(rows: Sequence[RankedSplit], memory: int | None) -> None:
    """Print the choices of ``gopt plan --servers``, best first, each with the reason for its rank."""
    out = console()
    first = rows[0].choice
    lines = []
    for number, row in enumerate(few(rows), 1):
        each, given = row.choice, row.choice.options
        sizes = map(format_bytes, (max(each.held), each.busiest))
        lines.append(
            (number, given.servers, given.slicing.value, given.placement.value, sum(each.pieces), *sizes,
             f"{each.balance:.2f}", each.messages)
        )  # fmt: skip
    title = f"Ways to place parameters for {_count(first.options.trainers, 'trainer')}, best first"
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
    held = [
        (server, pieces, *map(format_bytes, sizes))
        for server, (pieces, *sizes) in enumerate(zip(first.pieces, first.parameters, first.optimizer_states,
                                                      first.pushed, first.pulled))
    ]  # fmt: skip
    heads = ("server", "pieces", "parameters", "states", "pushed", "pulled")
    out.print(table("The first; pushed and pulled by one trainer in a step", heads, few(held), range(6)))
    print_left(out, len(held) - len(few(held)))
    if not rows[0].fits and memory is not None:
        out.print(f"nothing fits in {format_bytes(memory)}: more servers")
        return
    given = first.options
    if memory is not None:
        out.print(f"it fits in {format_bytes(memory)} on each server")
    out.print(
        f"best: gopt split MODEL --trainers {given.trainers} --servers {given.servers} --slicing {given.slicing.value} "
        f"--placement {given.placement.value} ({rows[0].why})",
    )


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
        f"{_count(facts.parameters, 'parameter')} in {_count(facts.pieces, 'piece')} and {_count(facts.keys, 'key')}"
    )
    yield f"slicing {given.slicing}{least}, placement {given.placement}"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
