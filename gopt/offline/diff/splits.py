"""Two folders of trainers and servers: settings, piece positions, bytes on servers, traffic, and values.

Graphs of roles follow from these. The graphs are compared only where all of these are equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from gopt.artifact.manifest import Manifest
from gopt.artifact.report_record import Report
from gopt.artifact.server_entries import ServerPlanEntry
from gopt.documents.records import to_document
from gopt.offline.diff.models import diff_graphs
from gopt.offline.diff.result import Diff, FileDifference
from gopt.offline.folder_contents import read_folder
from gopt.offline.inspect_split import SplitInspection, inspect_split
from gopt.text.amounts import format_bytes, rank_ranges

Placed = list[tuple[int, int, int]]
"""Pieces of a parameter: start, stop and server, in order; -1: every server."""


def diff_splits(a: Path, b: Path, manifests: Sequence[Manifest], reports: Sequence[Report]) -> Diff | None:
    """Compare two splits; None where only the graphs of roles may differ."""
    entries = [entry for manifest in manifests if (entry := manifest.parameter_server) is not None]
    splits = [inspect_split(manifest, entry, report) for manifest, entry, report in zip(manifests, entries, reports)]
    lines = [FileDifference("record", text) for text in _settings(*splits)]
    lines += [FileDifference("record", text) for text in _moved(entries[0], entries[1])]
    lines += [FileDifference("bytes", text) for text in _sizes(*splits)]
    if not lines:
        return None
    old, new = read_folder(a), read_folder(b)
    result = diff_graphs(str(a), old.graph, str(b), new.graph, states=True, roles=(old.roles, new.roles))
    lines += [FileDifference(line.kind, line.text, "source") for line in result.lines]
    return Diff(str(a), str(b), tuple(lines), result.renamed, result.notes)


def _settings(a: SplitInspection, b: SplitInspection) -> Iterator[str]:
    before, after = to_document(a.settings), to_document(b.settings)
    for name, value in before.items():
        if after[name] != value:
            yield f"{name.replace('_', ' ')}: {_shown(value)} -> {_shown(after[name])}"
    if a.roles != b.roles:
        yield f"roles: {a.roles or 'trainers first'} -> {b.roles or 'trainers first'}"


def _shown(value: object) -> str:
    return "none" if value in ("", None, {}) else str(value)


def _placed(entry: ServerPlanEntry) -> dict[str, Placed]:
    pieces_of: dict[str, Placed] = {}
    for key in entry.keys:
        for piece in key.pieces:
            server = -1 if key.server is None else key.server
            pieces_of.setdefault(piece.tensor, []).append((piece.start, piece.stop, server))
    return {tensor: sorted(pieces) for tensor, pieces in pieces_of.items()}


def _moved(a: ServerPlanEntry, b: ServerPlanEntry) -> Iterator[str]:
    """Parameters with pieces elsewhere, or with other pieces."""
    before, after = _placed(a), _placed(b)
    for tensor in {**before, **after}:
        old, new = before.get(tensor, []), after.get(tensor, [])
        if [piece[:2] for piece in old] == [piece[:2] for piece in new]:
            for (start, stop, server), (_, _, new_server) in zip(old, new):
                if server != new_server:
                    what = tensor if len(old) == 1 else f"{tensor}[{start}:{stop}]"
                    yield f"{what}: {_server(server)} -> {_server(new_server)}"
        else:
            yield f"{tensor}: {_pieces(old)} -> {_pieces(new)}"
    if len(a.keys) != len(b.keys):
        yield f"keys: {len(a.keys)} -> {len(b.keys)}"


def _server(server: int) -> str:
    return "every server" if server < 0 else f"server {server}"


def _pieces(pieces: Placed) -> str:
    if not pieces:
        return "on no server"
    on = sorted({server for _, _, server in pieces})
    where = "every server" if on[0] < 0 else f"server{'s' * (len(on) > 1)} {rank_ranges(on)}"
    return f"{len(pieces)} piece{'s' * (len(pieces) > 1)} on {where}"


def _sizes(a: SplitInspection, b: SplitInspection) -> Iterator[str]:
    kinds = ("parameters", "optimizer_states")
    for number in range(max(len(a.per_server), len(b.per_server))):
        sides = [
            inspection.per_server[number] if number < len(inspection.per_server) else None for inspection in (a, b)
        ]
        sizes = [None if side is None else sum(getattr(side, kind) for kind in kinds) for side in sides]
        if sizes[0] != sizes[1]:
            before, after = ("absent" if size is None else format_bytes(size) for size in sizes)
            yield f"server {number}: {before} -> {after}"
    for what, before_, after_ in (("pushes", a.pushed, b.pushed), ("pulls", a.pulled, b.pulled)):
        if before_ != after_:
            yield f"each trainer {what} {format_bytes(before_)} -> {format_bytes(after_)} a step"
