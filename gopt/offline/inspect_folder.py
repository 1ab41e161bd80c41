"""Describes an output folder by manifest and report: mesh, states, passes, and each rank's state and traffic."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gopt.artifact.manifest import Manifest
from gopt.artifact.report_groups import total
from gopt.artifact.report_record import BeforeAfter, RankUsage, Report, SourceEntry
from gopt.artifact.states_file import STATES_FILE
from gopt.documents.draws import Draw
from gopt.documents.records import OPTIONAL, to_document
from gopt.offline.folder_contents import folder_records
from gopt.offline.inspect_split import SplitInspection, inspect_split
from gopt.records.checks import Check
from gopt.records.host_values import HostValues
from gopt.records.pass_facts import PassRecord
from gopt.text.notebook import HtmlTable


@dataclass(frozen=True, slots=True)
class RankInspection:
    """States of one rank, and the calls in a step."""

    rank: int
    parameters: int
    optimizer_states: int
    gradients: int
    calls: Mapping[str, int]
    bytes_sent: int
    file: str
    file_bytes: int


@dataclass(frozen=True, slots=True)
class FolderInspection(HtmlTable):
    """Description of an output folder, from manifest and report."""

    folder: str
    mesh: tuple[tuple[str, int], ...]
    ranks: int
    source: SourceEntry
    loss: str
    states: Mapping[str, int]
    """Kind -> how many of the source's states."""
    sharded: int
    """States of the source that no rank holds whole."""
    replicated: int
    pipeline: tuple[PassRecord, ...]
    before_after: BeforeAfter | None
    per_rank: tuple[RankInspection, ...]
    balance: Mapping[str, float]
    removed_ops: int
    added_ops: int
    checks: tuple[Check, ...]
    values_bytes: int
    notes: tuple[str, ...]
    more_losses: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    draws: Mapping[str, Draw] | None = field(default=None, metadata=OPTIONAL)
    """Input of random numbers -> what a run draws it from; None without such inputs."""
    host: HostValues = field(default=HostValues(), metadata=OPTIONAL)
    """The values in the memory of the host."""

    def __repr__(self) -> str:
        return f"<FolderInspection {self.folder}: {self.ranks} ranks, {sum(self.states.values())} states>"

    def to_json(self) -> dict[str, Any]:
        return {"format": "gopt-inspection/1", "what": "folder"} | to_document(self)


def inspect_folder(path: str | os.PathLike[str]) -> FolderInspection | SplitInspection:
    """Describe an output folder; raises InputError for a missing or broken manifest or report."""
    folder = Path(path)
    manifest, report = folder_records(folder)
    if manifest.parameter_server is not None:
        return inspect_split(manifest, manifest.parameter_server, report)
    return _inspect(folder, manifest, report)


def _inspect(folder: Path, manifest: Manifest, report: Report) -> FolderInspection:
    common = {piece.tensor for state in manifest.common.state for piece in state.pieces}
    files = {entry.rank: list(entry.files.values()) for entry in manifest.ranks}
    return FolderInspection(
        folder=folder.name,
        mesh=manifest.mesh.axes,
        ranks=manifest.mesh.ranks,
        source=report.source,
        loss=manifest.loss,
        more_losses=manifest.more_losses,
        draws=manifest.draws or None,
        host=manifest.host,
        states=Counter(state.kind.value for state in manifest.states),
        sharded=len(manifest.states) - len(common),
        replicated=len(common),
        pipeline=report.pipeline,
        before_after=report.before_after,
        per_rank=tuple(_rank(folder, usage, files[usage.rank]) for usage in report.ranks),
        balance=report.balance,
        removed_ops=total(report.removed_ops),
        added_ops=total(report.added_ops),
        checks=report.checks,
        values_bytes=_size(folder / STATES_FILE),
        notes=report.notes,
    )


def _rank(folder: Path, usage: RankUsage, files: list[str]) -> RankInspection:
    return RankInspection(
        rank=usage.rank,
        **usage.nbytes.by_kind,
        calls={f"{call.op} {call.group}": call.calls for call in usage.communication},
        bytes_sent=usage.bytes_sent,
        file=", ".join(files),
        file_bytes=sum(_size(folder / name) for name in files),
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
