"""Files of gopt besides ranks: manifests, reports, and checkpoints with indices."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gopt import documents
from gopt.artifact import report_record
from gopt.artifact.checkpoint_index import FORMAT, INDEX_FILE, complete_steps, open_index, step_dir
from gopt.artifact.manifest import Manifest
from gopt.artifact.report_groups import total
from gopt.artifact.report_record import Report
from gopt.documents.records import from_document, to_document
from gopt.errors import InputError
from gopt.offline.kinds.candidate import FileCandidate
from gopt.text.notebook import HtmlTable

MANIFEST, REPORT, RECORD = "gopt-manifest/1", report_record.FORMAT, "gopt-record/1"


@dataclass(frozen=True, slots=True)
class ManifestInspection(HtmlTable):
    """A manifest by itself. ``states``: kind -> how many of the source's states; ``files``: of all ranks."""

    file: str
    mesh: tuple[tuple[str, int], ...]
    ranks: int
    roles: Mapping[str, int]
    loss: str
    states: Mapping[str, int]
    batch: tuple[str, ...]
    files: int
    present: int
    next: str

    def to_json(self) -> dict[str, Any]:
        return {"format": "gopt-inspection/1", "what": "manifest"} | to_document(self)


@dataclass(frozen=True, slots=True)
class ReportInspection(HtmlTable):
    """A report by itself: removed and added parts, by pass."""

    file: str
    source: str
    mesh: tuple[tuple[str, int], ...]
    passes: tuple[str, ...]
    removed_ops: int
    added_ops: int
    checks: int
    next: str

    def to_json(self) -> dict[str, Any]:
        return {"format": "gopt-inspection/1", "what": "report"} | to_document(self)


@dataclass(frozen=True, slots=True)
class CheckpointInspection(HtmlTable):
    """Checkpoints of a folder. ``steps``: the complete ones; the rest is of the newest. ``damaged``: files that are
    missing or have another size than in the index (digests are checked by readers)."""

    folder: str
    steps: tuple[int, ...]
    step: int
    files: int
    bytes: int
    manifest: str
    damaged: tuple[str, ...]
    next: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"format": "gopt-inspection/1", "what": "checkpoint"} | to_document(self)


@dataclass(frozen=True, slots=True)
class RecordInspection(HtmlTable):
    """The record of a run without rounds. ``received``: trainer or server -> the number of received messages."""

    file: str
    trainers: int
    servers: int
    steps: int
    data: str
    received: Mapping[str, int]
    states: int
    next: str

    def to_json(self) -> dict[str, Any]:
        return {"format": "gopt-inspection/1", "what": "record"} | to_document(self)


def stated_format(candidate: FileCandidate) -> str:
    """The ``format`` stated by a JSON document; '' for anything else."""
    if not candidate.head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return ""
    try:
        document = json.loads(documents.read_bytes(candidate.path, documents.MANIFEST.limit))
    except (ValueError, RecursionError, InputError):
        return ""
    stated = document.get("format") if isinstance(document, dict) else None
    return stated if isinstance(stated, str) else ""


def is_manifest(candidate: FileCandidate) -> bool:
    return stated_format(candidate) == MANIFEST


def is_report(candidate: FileCandidate) -> bool:
    return stated_format(candidate) == REPORT


def is_record(candidate: FileCandidate) -> bool:
    return stated_format(candidate) == RECORD


def is_checkpoint(candidate: FileCandidate) -> bool:
    """Return whether this is a step of a checkpoint, its index, or a folder with complete steps."""
    if candidate.is_folder:
        return (candidate.path / INDEX_FILE).is_file() or bool(complete_steps(candidate.path))
    return stated_format(candidate) == FORMAT


def inspect_manifest(candidate: FileCandidate) -> ManifestInspection:
    """Describe a manifest; raises InputError for a damaged file."""
    path = candidate.path
    manifest = from_document(Manifest, documents.read_json(path, documents.MANIFEST))
    files = {entry for rank in manifest.ranks for entry in rank.files.values()}
    present = sum((path.parent / name).is_file() for name in files)
    whole = present == len(files)
    return ManifestInspection(
        path.name, manifest.mesh.axes, manifest.mesh.ranks, Counter(rank.role for rank in manifest.ranks),
        ", ".join(manifest.losses), Counter(state.kind.value for state in manifest.states),
        tuple(name.name for name in manifest.common.inputs if name.kind == "batch"), len(files), present,
        f"gopt inspect {path.parent} shows the whole folder" if whole else "the files of its ranks are not beside it",
    )  # fmt: skip


def inspect_report(candidate: FileCandidate) -> ReportInspection:
    """Describe a report of a rewrite; raises InputError for a damaged file."""
    report = from_document(Report, documents.read_json(candidate.path, documents.REPORT))
    return ReportInspection(
        candidate.path.name, report.source.file, report.mesh.axes, tuple(step.name for step in report.pipeline),
        total(report.removed_ops), total(report.added_ops), sum(check.count for check in report.checks),
        f"gopt inspect {candidate.path.parent} shows the whole folder",
    )  # fmt: skip


def inspect_record(candidate: FileCandidate) -> RecordInspection:
    """Describe the record of a run; raises InputError for a damaged file."""
    record = documents.read_json(candidate.path, documents.RECORD)
    received = {name: len(messages) for name, messages in record["received"].items()}
    trainers, steps, data = (record["job"][name] for name in ("trainers", "steps", "data"))
    return RecordInspection(
        candidate.path.name, trainers, max(len(received) - trainers, 0), steps, data["name"], received,
        len(record["states"]),
        f"gopt verify DIR --replay {candidate.path} runs it again and compares it with the source",
    )  # fmt: skip


def inspect_checkpoint(candidate: FileCandidate) -> CheckpointInspection:
    """The complete steps of a checkpoint, and the newest; raises RunError for a damaged index."""
    folder = candidate.path if candidate.is_folder else candidate.path.parent
    steps = complete_steps(folder)
    newest = folder / step_dir(steps[-1]) if steps else folder
    index = open_index(newest)
    damaged = [name for name, entry in index.files.items() if _size(newest / name) != entry.nbytes]
    return CheckpointInspection(
        folder.name, tuple(steps) or (index.step,), index.step, len(index.files),
        sum(entry.nbytes for entry in index.files.values()), index.manifest, tuple(damaged),
        (
            f"gopt merge {newest} -o MODEL makes a model of it",
            f"gopt reshard {newest} --ranks N -o DIR makes ranks of it",
            f"gopt run DIR --data FILE --steps N --checkpoint {newest.parent} --resume continues from it",
        ),
    )  # fmt: skip


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
