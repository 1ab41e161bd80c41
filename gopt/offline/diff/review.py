"""Two output folders for a reviewer, from manifests and reports alone: the cause first, then the consequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_entries import RankEntry
from gopt.artifact.report_groups import OpGroup, expand_ops
from gopt.artifact.report_record import RankUsage, Report
from gopt.documents.records import to_document
from gopt.offline.diff.json_records import diff_json
from gopt.offline.diff.sections import Section
from gopt.text.amounts import format_bytes, group_ranks, rank_ranges

FEW = 3
"""Names, or types, that are told in a row; more are counted."""
REST = ("notes", "couplings", "balance", "figures", "before_after", "checks", "choice")
"""Keys of a report that follow from the others."""
Row = tuple[str, ...]
_WORDS = frozenset({"what"})
"""The column of tables that say in gopt's words what differs."""


def review_sections(manifests: Sequence[Manifest], reports: Sequence[Report]) -> tuple[Section, ...]:
    """Why two folders differ, and where: empty for equal records. Linear in the records."""
    sections = (
        Section("Cause", ("what", "before", "after"), tuple(_causes(manifests, reports))),
        Section("Ranks", ("ranks", "what", "before", "after", "change"), tuple(_ranks(*reports)), prose=_WORDS),
        Section("States", ("kind", "what", "states", "which"), tuple(_states(*manifests)), prose=_WORDS),
        Section("Operators", ("", "pass", "role", "before", "after", "types", "of"), tuple(_operators(*reports))),
        Section("Interface", ("what",), tuple((text,) for text in _interface(*manifests))),
        Section("Figures", ("what",), tuple((text,) for text in _rest(*reports))),
    )
    filled = tuple(section for section in sections if section.rows)
    if filled and filled[0].title != "Cause":
        text = "options, mesh and source are equal: another version of gopt made one, or it was changed"
        return (Section("Cause", ("what",), ((text,),), prose=_WORDS), *filled)
    return filled


# --- the cause ------------------------------------------------------------------------------------------------------


def _causes(manifests: Sequence[Manifest], reports: Sequence[Report]) -> Iterator[Row]:
    sides = [_asked(manifest, report) for manifest, report in zip(manifests, reports)]
    for name in dict.fromkeys((*sides[0], *sides[1])):
        before, after = (side.get(name, "unset") for side in sides)
        if before != after:
            yield name, before, after


def _asked(manifest: Manifest, report: Report) -> dict[str, str]:
    """Return the source and the options of a folder, by name."""
    settings = {
        "source": f"#{report.source.sha256[:12]}",
        "source file": report.source.file,
        **{f"source {name}": str(count) for name, count in report.source.counts.items()},
        "mesh": str(manifest.mesh.mesh()),
        "accumulate": str(manifest.accumulate),
        "loss reduction": manifest.loss_reduction,
        "statistics": manifest.statistics,
        "states on the host": _few(manifest.host.states) or "none",
        "activations on the host": _few(manifest.host.activations) or "none",
        "split": ", ".join(f"{axis}: {rule}" for axis, rule in (manifest.split or {}).items()) or "no axis",
        "passes": ", ".join(entry.name for entry in report.pipeline),
        "formats": f"{manifest.format}, {report.format}",
    }
    for step in report.pipeline:
        settings |= {f"{step.name}.{name}": _short(value) for name, value in step.options.items()}
    return settings


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- ranks ----------------------------------------------------------------------------------------------------------


def _ranks(a: Report, b: Report) -> Iterator[Row]:
    """Return rows of bytes held and sent by ranks, where unequal: equal changes are one row."""
    sides = [{rank.rank: _usage(rank) for rank in report.ranks} for report in (a, b)]
    for word, ranks in (("gone", sides[0].keys() - sides[1].keys()), ("new", sides[1].keys() - sides[0].keys())):
        if ranks:
            yield rank_ranges(sorted(ranks)), "the rank", *(("there", word) if word == "gone" else ("absent", word)), ""
    changed: dict[str, list[tuple[int, tuple[int, int]]]] = {}
    for rank in sorted({*sides[0], *sides[1]}):
        before, after = (side.get(rank, {}) for side in sides)
        for what in dict.fromkeys((*before, *after)):
            if before.get(what, 0) != after.get(what, 0):
                changed.setdefault(what, []).append((rank, (before.get(what, 0), after.get(what, 0))))
    for what, rows in changed.items():
        for members, (old, new) in group_ranks(rows):
            yield rank_ranges(members), what, *_change(what, old, new)


def _usage(usage: RankUsage) -> dict[str, int]:
    calls: Counter[str] = Counter()
    for call in usage.communication:
        calls[f"calls of {call.op} over {call.group}"] += call.calls
    nbytes = {kind.replace("_", " "): count for kind, count in usage.nbytes.by_kind.items()}
    return {**nbytes, "sent in a step": usage.bytes_sent, **calls}


def _change(what: str, before: int, after: int) -> Row:
    change = f"{(after - before) / before:+.1%}" if before else "new"
    if what.startswith("calls"):
        return str(before), str(after), f"{after - before:+d}"
    texts = format_bytes(before), format_bytes(after)
    return (*(texts if texts[0] != texts[1] else (f"{before:,} B", f"{after:,} B")), change)


# --- states ---------------------------------------------------------------------------------------------------------


def _states(a: Manifest, b: Manifest) -> Iterator[Row]:
    sides = [{state.tensor: state for state in manifest.states} for manifest in (a, b)]
    placed = [_placed(a), _placed(b)]
    changes: dict[tuple[str, str], list[str]] = {}
    for tensor in dict.fromkeys((*sides[0], *sides[1])):
        before, after = (side.get(tensor) for side in sides)
        if before is None or after is None:
            one = before or after
            assert one is not None
            changes.setdefault((one.kind.value, "added" if before is None else "removed"), []).append(tensor)
        elif before != after:
            changes.setdefault((after.kind.value, "of another kind, type or output"), []).append(tensor)
        elif placed[0].get(tensor) != placed[1].get(tensor):
            changes.setdefault((after.kind.value, "held in other pieces, or on other ranks"), []).append(tensor)
    for (kind, what), names in changes.items():
        yield kind, what, str(len(names)), _few(names)


def _placed(manifest: Manifest) -> dict[str, list[object]]:
    """State -> the pieces with the rank of each; a piece on all ranks is of all."""
    every = len(manifest.ranks)
    pieces: dict[str, list[object]] = {}
    for rank in (RankEntry(-every, "", {}, manifest.common.state), *manifest.ranks):
        for state in rank.state:
            for piece in state.pieces:
                pieces.setdefault(piece.tensor, []).append(
                    (rank.rank if rank.rank >= 0 else "all", piece.start, piece.stop, piece.box, state.copy)
                )
    return pieces


def _few(names: Sequence[str]) -> str:
    more = len(names) - FEW
    return ", ".join(names[:FEW]) + (f" and {more} more" if more > 0 else "")


# --- operators ------------------------------------------------------------------------------------------------------

_Place = tuple[str, str, str]
"""Whether removed or added, by which pass, in which role."""


def _operators(a: Report, b: Report) -> Iterator[Row]:
    sides = [
        _counted({"removed": report.removed_ops, "added": report.added_ops}) for report in (a, b)
    ]  # fmt: skip
    for operator in dict.fromkeys((*sides[0], *sides[1])):
        before, after = (side.get(operator, Counter()) for side in sides)
        if before == after:
            continue
        types: Counter[str] = Counter()
        owners: dict[str, None] = {}
        for key in dict.fromkeys((*before, *after)):
            op_type, of, _ = key
            change = after[key] - before[key]
            if change:
                types[op_type] += change
                owners.setdefault(of)
        shown = [f"{change:+d} {op_type}" for op_type, change in sorted(types.items(), key=_largest) if change]
        verb, owner, role = operator
        yield (
            verb, owner, role, str(before.total()), str(after.total()), _few(shown) or "on other ranks or of others",
            _few([owner for owner in owners if owner]),
        )  # fmt: skip


def _largest(item: tuple[str, int]) -> tuple[int, str]:
    return -abs(item[1]), item[0]


def _counted(lists: Mapping[str, Iterable[OpGroup]]) -> dict[_Place, Counter[tuple[str, str, str]]]:
    counters: dict[_Place, Counter[tuple[str, str, str]]] = {}
    for verb, groups in lists.items():
        for fact in expand_ops(groups):
            counter = counters.setdefault((verb, fact.pass_name, fact.role), Counter())
            counter[fact.op_type, fact.of or "", fact.ranks] += 1
    return counters


# --- the rest -------------------------------------------------------------------------------------------------------


def _interface(a: Manifest, b: Manifest) -> Iterator[str]:
    """Inputs, outputs and phases of the ranks."""
    sides = [
        {
            "losses": entry.losses, "phases": entry.schedule,
            **{kind: to_document(entry.common)[kind] for kind in ("inputs", "outputs")},
            "synchronised": to_document(entry.synchronised),
        }
        for entry in (a, b)
    ]  # fmt: skip
    yield from diff_json(sides[0], sides[1])


def _rest(a: Report, b: Report) -> Iterator[str]:
    """Keys that follow from others, and the passes' figures."""
    sides = [report.to_json() for report in (a, b)]
    rest = [{key: side[key] for key in REST if key in side} for side in sides]
    yield from diff_json(rest[0], rest[1])
    facts = [
        {entry.name: {"facts": dict(entry.facts), "note": entry.note} for entry in report.pipeline} for report in (a, b)
    ]
    yield from (f"pass {text}" for text in diff_json(facts[0], facts[1]))
