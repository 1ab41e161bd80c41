"""The result of ``gopt verify --json`` for a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gopt import documents
from gopt.documents.records import from_document
from gopt.errors import InputError
from gopt.offline.html_report.record import PageDoubt, Proof, WorstError
from gopt.offline.html_report.verification_record import FORMAT, VerificationRecord

DOUBTS = 100
"""Values that are not confirmed and are named."""


def read_proof(verification: Path | Mapping[str, Any], ranks: int) -> Proof:
    """The proof in a file or a document.

    Raises InputError for a file without a proof, or a proof of another number of ranks."""
    if isinstance(verification, Path):
        document, name = documents.read_json(verification, documents.VERIFICATION), verification.name
    else:
        document, name = {"format": FORMAT, **verification}, "the verification"
    record = from_document(VerificationRecord, document)
    if record.ranks != ranks:
        raise InputError(
            f"{name} is of another folder: it is of {record.ranks} ranks, the folder has {ranks}",
            "verify this folder: gopt verify DIR --json > proof.json",
        )
    refuted = [
        PageDoubt(gradient.parameter, f"{gradient.gradient} is not its gradient")
        for gradient in record.gradients
        if gradient.refuted
    ]
    doubts = [*refuted, *(PageDoubt(value.name, value.why) for value in record.unconfirmed)]
    return Proof(
        outcome=record.outcome,
        tolerance=record.tolerance,
        steps=record.steps,
        ranks=record.ranks,
        compared=record.compared,
        worst=tuple(
            WorstError(variant, value.name, value.kind, value.rank, value.step, value.relative_error(record.tolerance))
            for variant, value in record.worst.items()
        ),
        gradients=len(record.gradients),
        confirmed=sum(gradient.holds for gradient in record.gradients),
        unconfirmed=len(doubts),
        doubts=tuple(doubts[:DOUBTS]),
        notes=record.notes if record.large_batch is None else (record.large_batch.line, *record.notes),
    )
