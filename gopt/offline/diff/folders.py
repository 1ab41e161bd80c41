"""Two output folders: manifest, report, source, and every rank's graph with values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gopt.artifact.integrity import check_files
from gopt.artifact.manifest import MANIFEST_FILE, Manifest
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.report_check import read_report
from gopt.artifact.report_record import REPORT_FILE, Report
from gopt.ir.load import load
from gopt.offline.diff.json_records import diff_json
from gopt.offline.diff.models import diff_graphs
from gopt.offline.diff.result import Diff, FileDifference
from gopt.offline.diff.review import review_sections
from gopt.offline.diff.sections import Section, kind_sections
from gopt.offline.diff.splits import diff_splits
from gopt.offline.diff.values import EXACT, Tolerance
from gopt.text.amounts import rank_ranges


@dataclass(slots=True)
class _Folders:
    a: Path
    b: Path
    tolerance: Tolerance
    lines: list[FileDifference] = field(default_factory=list)
    renamed: int = 0
    notes: list[str] = field(default_factory=list)


def review_folders(a: Path, b: Path, tolerance: Tolerance = EXACT) -> Diff:
    """Compare manifests and reports, and for equal records the graphs of ranks, node by node.

    With unequal records no graph of a rank is read; the source's graph is read where sources differ."""
    manifests, reports = _records(a, b)
    sections = review_sections(manifests, reports)
    if not sections or any(manifest.parameter_server is not None for manifest in manifests):
        return diff_folders(a, b, tolerance)
    folders = _Folders(a, b, tolerance)
    if reports[0].source.sha256 != reports[1].source.sha256:
        _file_lines(folders, "source.onnx", _same_bytes(a / "states.bin", b / "states.bin"), states=False)
    rows = [
        FileDifference("record", ": ".join(filter(None, row)), section.title)
        for section in sections
        for row in section.rows
    ]
    source = kind_sections((line.kind, "", line.text) for line in folders.lines)
    review = (
        *sections[:-1],
        *(replace(section, title=f"Source: {section.title}") for section in source),
        *sections[-1:],
    )
    note = "graphs of ranks are not compared node by node: --full does"
    return Diff(str(a), str(b), (*rows, *folders.lines), folders.renamed, (*folders.notes, note), review)


def _records(a: Path, b: Path) -> tuple[list[Manifest], list[Report]]:
    # Values and reports are compared themselves, and values within a tolerance.
    complete = [read_manifest(folder)[0] for folder in (a, b)]
    for folder, manifest in zip((a, b), complete):
        check_files(folder, manifest.files)
    manifests = [manifest.bare for manifest in complete]
    return manifests, [read_report(folder, manifest) for folder, manifest in zip((a, b), manifests)]


def diff_folders(a: Path, b: Path, tolerance: Tolerance = EXACT) -> Diff:
    """Compare two output folders: manifest, report, source and each rank's graph with values."""
    folders = _Folders(a, b, tolerance)
    manifests, reports = _records(a, b)
    review: tuple[Section, ...] = ()
    if all(manifest.parameter_server is not None for manifest in manifests):
        moved = diff_splits(a, b, manifests, reports)
        if moved is not None:
            return moved
    else:
        review = review_sections(manifests, reports)
    lists: dict[str, Sequence[Manifest | Report]] = {MANIFEST_FILE: manifests, REPORT_FILE: reports}
    for file, records in lists.items():
        texts = diff_json(records[0].to_json(), records[1].to_json())
        folders.lines += [FileDifference("record", text, file) for text in texts]
    same_values = _same_bytes(a / "states.bin", b / "states.bin")
    if (a / "source.onnx").is_file() and (b / "source.onnx").is_file():
        _file_lines(folders, "source.onnx", same_values)
    files = [_files(manifest) for manifest in manifests]
    ranks_of: dict[tuple[str, str, str], list[int]] = {}
    for rank, phase in sorted({*files[0], *files[1]}):
        names = files[0].get((rank, phase)), files[1].get((rank, phase))
        if names[0] is None or names[1] is None:
            continue  # the manifests' lines say so
        if same_values and names[0] == names[1] and _same_bytes(a / names[0], b / names[1]):
            continue
        result = diff_graphs("", load(a / names[0], own=True), "", load(b / names[1], own=True), states=False)
        folders.renamed += result.renamed
        for line in result.lines:
            where = "" if phase == "step" else f", {phase}"
            ranks_of.setdefault((line.kind, line.text, where), []).append(rank)
    folders.lines += [
        FileDifference(kind, text, f"rank {rank_ranges(ranks)}{where}")
        for (kind, text, where), ranks in ranks_of.items()
    ]
    return Diff(str(a), str(b), tuple(folders.lines), folders.renamed, tuple(folders.notes), review)


def _files(manifest: Manifest) -> dict[tuple[int, str], str]:
    """The file of every rank and phase."""
    return {(rank.rank, phase): name for rank in manifest.ranks for phase, name in rank.files.items()}


def _file_lines(folders: _Folders, name: str, same_values: bool, *, states: bool = True) -> None:
    if same_values and _same_bytes(folders.a / name, folders.b / name):
        return
    old, new = folders.a / name, folders.b / name
    graphs = [load(path, own=True) for path in (old, new)]
    result = diff_graphs(str(old), graphs[0], str(new), graphs[1], states=states, tolerance=folders.tolerance)
    folders.lines += [FileDifference(line.kind, line.text, name) for line in result.lines]
    folders.renamed += result.renamed
    folders.notes += result.notes


def _same_bytes(a: Path, b: Path) -> bool:
    if not a.is_file() or not b.is_file():
        return a.is_file() == b.is_file()
    if a.stat().st_size != b.stat().st_size:
        return False
    with a.open("rb") as old, b.open("rb") as new:
        while True:
            pieces = old.read(1 << 22), new.read(1 << 22)
            if pieces[0] != pieces[1]:
                return False
            if not pieces[0]:
                return True
