"""The result of ``gopt verify --json`` for a folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gopt import documents
from gopt.errors import InputError
from gopt.offline.html_report.record import Doubt, Proof, WorstError

DOUBTS = 100
"""Values that are not confirmed and are named."""


def read_proof(verification: Path | Mapping[str, Any], ranks: int) -> Proof:
    """The proof that a file or a record holds.

    Raises InputError where the file holds none, or where the proof is of another number of ranks.
    """
    record: Mapping[str, Any]
    if isinstance(verification, Path):
        record, name = documents.read_json(verification, documents.VERIFICATION), verification.name
    else:
        record, name = verification, "the verification"
    if record["ranks"] != ranks:
        raise InputError(
            f"{name} is of another folder: it is of {record['ranks']} ranks, the folder has {ranks}",
            "verify this folder: gopt verify DIR --json > proof.json",
        )
    gradients = record["gradients"]
    open_values = [Doubt(each["name"], each["why"]) for each in record["unconfirmed"]]
    refuted = [
        Doubt(each["parameter"], f"{each['gradient']} is not its gradient")
        for each in gradients
        if not each["holds"] and each.get("verdict", "refuted") == "refuted"
    ]
    return Proof(
        outcome=record["outcome"],
        tolerance=record["tolerance"],
        steps=record["steps"],
        ranks=record["ranks"],
        compared=record["compared"],
        worst=tuple(_worst(name, each, record["tolerance"]) for name, each in record["worst"].items()),
        gradients=len(gradients),
        confirmed=sum(each["holds"] for each in gradients),
        unconfirmed=len(open_values) + len(refuted),
        doubts=tuple([*refuted, *open_values][:DOUBTS]),
        notes=tuple(record["notes"]),
    )


def _worst(variant: str, each: Mapping[str, Any], tolerance: float) -> WorstError:
    """In ``--json`` an error counts in tolerances; null stands for one that is not finite."""
    error = each.get("error_over_tolerance")
    relative = error * tolerance if isinstance(error, int | float) and math.isfinite(error) else None
    return WorstError(variant, each["name"], each.get("kind", ""), each.get("rank"), each.get("step"), relative)
