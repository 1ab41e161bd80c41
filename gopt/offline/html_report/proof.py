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
    """The proof that a file or a document holds.

    Raises InputError where the file holds none, or where the proof is of another number of ranks.
    """
    if isinstance(verification, Path):
        document, name = documents.read_json(verification, documents.VERIFICATION), verification.name
    else:
        document, name = {"format": FORMAT, **verification}, "the verification"
    found = from_document(VerificationRecord, document)
    if found.ranks != ranks:
        raise InputError(
            f"{name} is of another folder: it is of {found.ranks} ranks, the folder has {ranks}",
            "verify this folder: gopt verify DIR --json > proof.json",
        )
    refuted = [
        PageDoubt(each.parameter, f"{each.gradient} is not its gradient") for each in found.gradients if each.refuted
    ]
    doubts = [*refuted, *(PageDoubt(each.name, each.why) for each in found.unconfirmed)]
    return Proof(
        outcome=found.outcome,
        tolerance=found.tolerance,
        steps=found.steps,
        ranks=found.ranks,
        compared=found.compared,
        worst=tuple(
            WorstError(variant, each.name, each.kind, each.rank, each.step, each.relative_error(found.tolerance))
            for variant, each in found.worst.items()
        ),
        gradients=len(found.gradients),
        confirmed=sum(each.holds for each in found.gradients),
        unconfirmed=len(doubts),
        doubts=tuple(doubts[:DOUBTS]),
        notes=found.notes if found.large_batch is None else (found.large_batch.line, *found.notes),
    )
