"""Builds the page's record from an output folder: the manifest, the report, and the files of one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gopt.analysis.training import StateKind
from gopt.artifact.manifest import Manifest
from gopt.artifact.report_groups import Group
from gopt.artifact.report_record import BeforeAfter, RankUsage, Report
from gopt.offline.folder_contents import folder_records
from gopt.offline.html_report import rank_groups
from gopt.offline.html_report.proof import read_proof
from gopt.offline.html_report.record import Heading, PassEntry, ReportPage, RoleCounts, SizeRow, SizeTable, Timeline
from gopt.offline.html_report.schedule_picture import schedule_picture
from gopt.offline.html_report.step_timeline import step_timeline
from gopt.offline.html_report.trace_timeline import trace_timeline
from gopt.records.pass_facts import PassRecord

_SIZES = (
    ("nodes", "nodes", "count"), ("parameters", "parameters", "bytes"),
    ("optimizer states", "optimizer_states", "bytes"), ("gradients", "gradients", "bytes"),
    ("peak live values", "peak_live", "bytes"), ("initial values on disk", "initializers", "bytes"),
    ("calls in a step", "calls", "count"), ("sent in a step", "traffic", "bytes"),
)  # fmt: skip
_KINDS = {
    StateKind.PARAMETER: "parameters", StateKind.OPTIMIZER_STATE: "optimizer_states",
    StateKind.ACCUMULATOR: "optimizer_states",
}  # fmt: skip


def report_page(
    folder: Path, *, trace: Path | None = None, verification: Path | Mapping[str, Any] | None = None
) -> ReportPage:
    """Return the record of the page of an output folder.

    ``trace``: a file of ``gopt run --trace``; without a trace the timeline is the plan's. ``verification``:
    output of ``gopt verify --json``, or the record.

    Raises InputError for a broken or foreign folder or file, OptionError for a schedule that cannot run."""
    manifest, report = folder_records(folder)
    roles = _roles(manifest)
    usages = report.ranks
    return ReportPage(
        folder=folder.resolve().name,
        heading=_heading(manifest, report),
        before_after=_before_after(manifest, report, roles),
        ranks=rank_groups.alike(usages, roles),
        bars=rank_groups.bars(usages, roles),
        balance=rank_groups.balance(usages, roles),
        groups=rank_groups.traffic(usages),
        traffic=report.figures.traffic,
        figures={
            "calls": report.figures.calls.count,
            "packing_bound": report.figures.calls.packing_bound,
            "hidden_share": report.figures.overlap.hidden_share,
        },
        timeline=_timeline(folder, manifest, report, trace),
        schedule=schedule_picture(folder),
        roles=_role_counts(report),
        passes=tuple(_pass(entry) for entry in report.pipeline),
        notes=report.notes,
        checks=report.checks,
        proof=None if verification is None else read_proof(verification, manifest.mesh.ranks),
        removed_ops=report.removed_ops,
        added_ops=report.added_ops,
        removed_vars=report.removed_vars,
        added_vars=report.added_vars,
    )


def _roles(manifest: Manifest) -> dict[int, str]:
    """Rank -> ``trainer`` or ``server``; empty for ranks without such roles."""
    if manifest.parameter_server is None:
        return {}
    return {rank.rank: rank.role for rank in manifest.ranks}


def _heading(manifest: Manifest, report: Report) -> Heading:
    source, shard = report.source, report.ran("shard")
    options: Mapping[str, Any] = {} if shard is None else shard.options
    return Heading(
        file=source.file,
        sha256=source.sha256,
        nbytes=source.nbytes,
        nodes=source.counts.get("nodes", 0),
        mesh=str(manifest.mesh.mesh()),
        ranks=manifest.total_ranks,
        servers=manifest.total_ranks - manifest.mesh.ranks,
        stage=options.get("stage"),
        partition=options.get("partition"),
        accumulate=manifest.accumulate,
        loss=", ".join(manifest.losses),
    )


def _before_after(manifest: Manifest, report: Report, roles: Mapping[int, str]) -> SizeTable:
    """The source against the fullest rank; of a split, against the fullest trainer and the fullest server."""
    if report.before_after is not None:
        return _sizes(report.before_after)
    fullest = [
        (role, most)
        for role in dict.fromkeys(roles.get(rank.rank, "rank") for rank in report.ranks)
        if (most := rank_groups.fullest([rank for rank in report.ranks if roles.get(rank.rank, "rank") == role]))
    ]
    whole = Counter[str]()
    for state in manifest.states:
        if state.kind in _KINDS and state.type.static:
            whole[_KINDS[state.kind]] += state.type.nbytes
    usages = [most for _, most in fullest]
    calls = [sum(call.calls for call in usage.communication) for usage in usages]
    rows = (
        SizeRow("parameters", "bytes", (whole["parameters"], *(usage.nbytes.parameters for usage in usages))),
        SizeRow("optimizer states", "bytes", _row(whole["optimizer_states"], usages, "optimizer_states")),
        SizeRow("gradients", "bytes", _row(None, usages, "gradients")),
        SizeRow("calls in a step", "count", (0, *calls)),
        SizeRow("sent in a step", "bytes", (0, *(usage.bytes_sent for usage in usages))),
    )
    return SizeTable(("source", *(f"{role} {most.rank}" for role, most in fullest)), rows)


def _row(whole: int | None, usages: Iterable[RankUsage], kind: str) -> tuple[int | None, ...]:
    return (whole, *(usage.nbytes.by_kind[kind] for usage in usages))


def _sizes(sizes: BeforeAfter) -> SizeTable:
    rows = (
        SizeRow(what, unit, (getattr(sizes.source, name), getattr(sizes.largest, name))) for what, name, unit in _SIZES
    )
    away = (SizeRow("states on the host, of these", "bytes", (0, sizes.largest.host)),) if sizes.largest.host else ()
    return SizeTable(("source", f"rank {sizes.rank}"), (*rows, *away))


def _timeline(folder: Path, manifest: Manifest, report: Report, trace: Path | None) -> Timeline:
    roles = _roles(manifest)
    leaders = [group.ranks.replace("-", ",").split(",")[0] for group in rank_groups.alike(report.ranks, roles)]
    if trace is not None:
        return trace_timeline(trace, manifest.total_ranks, [int(leader) for leader in leaders])
    present = {rank.rank for rank in manifest.ranks}
    rank = report.before_after.rank if report.before_after is not None else min(present, default=0)
    return step_timeline(folder, manifest, report, rank if rank in present else min(present))


def _role_counts(report: Report) -> tuple[RoleCounts, ...]:
    counted: dict[tuple[str, str], list[int]] = {}
    lists: Sequence[Sequence[Group]] = (report.removed_ops, report.added_ops, report.removed_vars, report.added_vars)
    for column, groups in enumerate(lists):
        for group in groups:
            counted.setdefault((group.pass_name, group.role), [0] * len(lists))[column] += group.count
    return tuple(RoleCounts(*head, *counts) for head, counts in counted.items())


def _pass(record: PassRecord) -> PassEntry:
    options = [f"{name}={value}" for name, value in record.options.items() if value not in (None, "", {}, [], False)]
    return PassEntry(record.name, tuple(options), record.note)
