"""The text of a golden: one fact a line, from the records of manifest and report."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gopt import __version__
from gopt.analysis.training import TrainingGraph
from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_entries import RankEntry, SourceState
from gopt.artifact.report_groups import OpGroup, type_counts
from gopt.artifact.report_record import Report
from gopt.ir.graph import Graph
from gopt.offline.goldens.digests import node_digests, phase_digests, scalar_uses, short_digest, values_digest
from gopt.offline.goldens.rank_names import RankNames
from gopt.text.amounts import group_ranks

FIRST_LINE = "gopt golden 1"
SECTIONS = ("source", "ranks", "calls", "states", "passes", "removed", "added", "graphs")
"""Sections that a golden may keep, in order."""
WIDTH = 80
FEW_STATES = 3
"""States of one class that are told by name; more are counted."""
FEW_KINDS = 3
"""Kinds of ranks whose operators of one type are listed; of more there is a digest."""
FEW_PIECES = 8
"""Pieces of a state that are listed; of more there is a digest."""


@dataclass(frozen=True, slots=True)
class CaseRequest:
    """The request of a case: the command, and the options as typed by a user."""

    command: str
    options: tuple[str, ...]


def golden_text(
    request: CaseRequest,
    training: TrainingGraph,
    manifest: Manifest,
    report: Report,
    graphs: Mapping[str, Graph],
    keep: Collection[str] = SECTIONS,
) -> str:
    """The golden of a case; ``graphs``: the sources of ranks, by name; ``keep``: sections beside ``asked``.

    The golden knows neither file names, the machine, the time, nor gopt's patch version. Lines are at most 80 columns
    wide, but for longer names."""
    names = RankNames([(rank.rank, rank.role) for rank in manifest.ranks])
    sections: dict[str, Callable[[], Iterable[str]]] = {
        "source": lambda: _source(training),
        "ranks": lambda: _ranks(report, names),
        "calls": lambda: _calls(report, names),
        "states": lambda: _states(manifest, names),
        "passes": lambda: (entry.name for entry in report.pipeline),
        "removed": lambda: _ops(report.removed_ops, names),
        "added": lambda: _ops(report.added_ops, names),
        "graphs": lambda: (f"{name}: {len(graph.nodes)} nodes #{_digest(graph)}" for name, graph in graphs.items()),
    }
    minor = ".".join(__version__.split(".")[:2])
    lines = [f"{FIRST_LINE} (gopt {minor})", "", "asked", f"  {request.command}"]
    lines += [f"  {line}" for line in _option_lines(request.options)]
    for name in SECTIONS:
        if name in keep:
            lines += ["", name, *(line for fact in sections[name]() for line in wrapped(fact))]
    return "\n".join(lines) + "\n"


def wrapped(fact: str) -> list[str]:
    """The fact on one line if short enough; else the parts after the first colon on further lines, unbroken."""
    if len(fact) + 2 <= WIDTH:
        return [f"  {fact}"]
    head, colon, rest = fact.partition(": ")
    return [*_filled(head + colon.rstrip(), "  "), *_filled(rest, "    ")]


def _filled(text: str, indent: str) -> list[str]:
    parts = "; ".join(part.replace(" ", "\0") for part in text.split("; ")) if "; " in text else text
    lines = textwrap.wrap(
        parts, WIDTH, initial_indent=indent, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\0", " ") for line in lines]


def _digest(graph: Graph) -> str:
    return short_digest(sorted(node_digests(graph)))


def _option_lines(options: Sequence[str]) -> Iterator[str]:
    """An option and the value on one line."""
    line = ""
    for option in options:
        if option.startswith("-") and line:
            yield line
            line = option
        else:
            line = f"{line} {option}".strip()
    if line:
        yield line


def _source(training: TrainingGraph) -> Iterator[str]:
    graph = training.graph
    phases = {id(node): node.phase.value for node in graph.nodes if node.phase}
    for phase, (count, hashed) in phase_digests(graph, phases).items():
        yield f"{phase}: {count} nodes #{hashed}"
    for (phase, text), count in sorted(scalar_uses(graph, phases).items()):
        yield f"{phase} constant {text}: read {count} times"
    yield f"  initial values #{values_digest(graph)}"


def _ranks(report: Report, names: RankNames) -> Iterator[str]:
    rows = [(rank.rank, tuple(rank.nbytes.by_kind.items())) for rank in report.ranks]
    for ranks, sizes in group_ranks(rows):
        yield f"{names.of(ranks)}: {', '.join(f'{kind} {count}' for kind, count in sizes)} bytes"


def _calls(report: Report, names: RankNames) -> Iterator[str]:
    rows = [
        (rank.rank, (call.op, call.group, call.calls, call.bytes_sent))
        for rank in report.ranks
        for call in rank.communication
    ]
    for ranks, (op, group, calls, sent) in group_ranks(rows):
        yield f"{names.of(ranks)}: {calls} {op} over {group}, {sent} bytes sent"


def _states(manifest: Manifest, names: RankNames) -> Iterator[str]:
    """States of one kind, type and parameter type in one line, with the ranks of their elements."""
    placed = _placed(manifest)
    classes: dict[tuple[str, str], list[SourceState]] = {}
    for state in manifest.states:
        classes.setdefault((state.kind.value, str(state.type)), []).append(state)
    for (kind, type), members in sorted(classes.items()):
        few = len(members) <= FEW_STATES
        what = ", ".join(sorted(member.tensor for member in members)) if few else f"{len(members)} states"
        layouts = {_layout(placed.get(member.tensor, ()), names) for member in members}
        if len(layouts) == 1:
            yield f"{kind} {type} {what}: {layouts.pop()}"
        elif few:
            for each in members:
                yield f"{kind} {type} {each.tensor}: {_layout(placed.get(each.tensor, ()), names)}"
        else:
            digest = short_digest(_whole_layout(placed.get(member.tensor, ()), names) for member in members)
            yield f"{kind} {type} {what}: {len(layouts)} layouts #{digest}"


def _placed(manifest: Manifest) -> dict[str, list[tuple[str, int]]]:
    """State -> the pieces with the rank of each, -1: all ranks."""
    pieces: dict[str, list[tuple[str, int]]] = {}
    common = RankEntry(-1, "", {}, manifest.common.state)
    for rank in (common, *manifest.ranks):
        for state in rank.state:
            for piece in state.pieces:
                box = "" if piece.box is None else f" of box {piece.box}"
                box += "" if piece.every is None else f" of rows {piece.every[0]}, {sum(piece.every)}, …"
                copy = " as a copy" if state.copy else ""
                pieces.setdefault(piece.tensor, []).append((f"[{piece.start}, {piece.stop}){box}{copy}", rank.rank))
    return pieces


def _grouped(placed: Sequence[tuple[str, int]], names: RankNames) -> list[str]:
    by_piece = group_ranks([(rank, piece) for piece, rank in placed])
    return [f"{piece} on {'all ranks' if ranks == [-1] else names.of(ranks)}" for ranks, piece in by_piece]


def _whole_layout(placed: Sequence[tuple[str, int]], names: RankNames) -> str:
    return "; ".join(_grouped(placed, names))


def _layout(placed: Sequence[tuple[str, int]], names: RankNames) -> str:
    pieces = _grouped(placed, names)
    if len(pieces) <= FEW_PIECES:
        return "; ".join(pieces) or "on no rank"
    return f"{len(pieces)} pieces #{short_digest(pieces)}"


def _ops(groups: Sequence[OpGroup], names: RankNames) -> Iterator[str]:
    """Operators counted by pass and type, with their ranks."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for group in groups:
        for op_type, count in type_counts(group).items():
            counts[group.pass_name, op_type, group.ranks] += count
    parts_of: dict[tuple[str, str], list[str]] = {}
    for (owner, op_type, ranks), count in sorted(counts.items()):
        parts_of.setdefault((owner, op_type), []).append(f"{count} on {names.of_ranges(ranks)}")
    for (owner, op_type), parts in parts_of.items():
        summary = ", ".join(parts) if len(parts) <= FEW_KINDS else f"{len(parts)} kinds of ranks #{short_digest(parts)}"
        yield f"{owner}: {op_type}: {summary}"
