"""Reads the report of an output folder, and compares report and manifest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from gopt import documents, limits
from gopt.artifact.manifest import Manifest
from gopt.artifact.report_groups import Group
from gopt.artifact.report_record import REPORT_FILE, ProofEntry, Report
from gopt.documents.records import from_document
from gopt.errors import InputError


def digest_of_ranks(manifest: Manifest, text: str) -> str:
    """The SHA-256 of the names and digests of the files that a proof reads, and of what the manifest says of them;
    ``text``: of the bare manifest."""
    rows = [f"{name} {digest}\n" for name, digest in manifest.read_digests.items()]
    return hashlib.sha256("".join([*rows, text]).encode()).hexdigest()


def stored_proof(folder: str | os.PathLike[str], manifest: Manifest) -> ProofEntry | None:
    """The proof in a folder's report; None without one, and for files of ranks other than the proof read."""
    if not manifest.files or not Path(folder, REPORT_FILE).is_file():
        return None
    proof = from_document(Report, documents.read_json(Path(folder, REPORT_FILE), documents.REPORT)).proof
    return proof if proof is not None and proof.files == digest_of_ranks(manifest, manifest.bare.text()) else None


def read_report(folder: str | os.PathLike[str], manifest: Manifest) -> Report:
    """The report beside a manifest; raises InputError for a damaged report or another mesh."""
    path = Path(folder, REPORT_FILE)
    report = from_document(Report, documents.read_json(path, documents.REPORT))
    _check_groups(path, report)
    if manifest.parameter_server is not None:
        _check_split_report(path, report, manifest.parameter_server.servers)
        return report
    if report.mesh.axes != manifest.mesh.axes:  # kinds were not always written
        raise InputError(f"{path}: mesh: it differs from the mesh of the manifest")
    if [rank.rank for rank in report.ranks] != [rank.rank for rank in manifest.ranks]:
        raise InputError(f"{path}: ranks: they differ from the ranks of the manifest")
    return report


def _check_groups(path: Path, report: Report) -> None:
    """Refuse groups with rows unlike the columns, or with wrong counts."""
    lists: dict[str, Sequence[Group]] = {
        "removed_ops": report.removed_ops, "removed_vars": report.removed_vars,
        "added_ops": report.added_ops, "added_vars": report.added_vars,
    }  # fmt: skip
    for key, groups in lists.items():
        for index, group in enumerate(groups):
            if (wrong := group.fault()) is not None:
                raise InputError(f"{path}: {key}[{index}]: {wrong}")


def _check_split_report(path: Path, report: Report, servers: int) -> None:
    """Refuse a report of other servers; a run may have had another number of trainers."""
    trainers = report.mesh.ranks
    if [rank.rank for rank in report.ranks] != list(range(min(trainers, limits.RANKS) + servers)):
        raise InputError(f"{path}: ranks: they are not {trainers} trainers and the {servers} servers of the manifest")
