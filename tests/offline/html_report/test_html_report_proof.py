"""What ``gopt verify --json`` said, on the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gopt.errors import InputError
from gopt.offline.html_report.proof import DOUBTS, read_proof


def result(path: Path, **changes: Any) -> Path:
    record = {
        "format": "gopt-verification/1", "equal": True, "outcome": "equal", "tolerance": 1e-4, "steps": 3, "ranks": 2,
        "compared": 40, "noise": [], "notes": ["a note"], "unconfirmed": [],
        "worst": {"gradients × 64": {"step": 1, "rank": 0, "name": "w", "kind": "parameter",
                                     "error_over_tolerance": 0.5}},
        "gradients": [{"parameter": "w", "gradient": "g", "holds": True, "verdict": "confirmed", "why": ""}],
    }  # fmt: skip
    path.write_text(json.dumps(record | changes))
    return path


def test_errors_are_relative_and_gradients_counted(tmp_path):
    proof = read_proof(result(tmp_path / "p.json"), 2)
    assert proof.worst[0].error == pytest.approx(5e-5) and proof.worst[0].variant == "gradients × 64"
    assert (proof.gradients, proof.confirmed, proof.unconfirmed, proof.outcome) == (1, 1, 0, "equal")


def test_the_comparison_with_one_large_batch_is_a_note(tmp_path):
    for found, notes in (
        ({"outcome": "equal", "line": "one large batch: equal"}, ("one large batch: equal", "a note")),
        (None, ("a note",)),
    ):
        assert read_proof(result(tmp_path / "p.json", large_batch=found), 2).notes == notes


def test_an_error_that_is_not_finite_stays_so(tmp_path):
    worst = {"as they are": {"name": "w", "kind": "loss", "rank": None, "step": 2, "error_over_tolerance": None}}
    assert read_proof(result(tmp_path / "p.json", worst=worst), 2).worst[0].error is None


def test_doubts_are_counted_and_the_first_are_named(tmp_path):
    open_values = [{"name": f"v{number}", "why": "no reason"} for number in range(DOUBTS + 7)]
    refuted = [{"parameter": "w", "gradient": "g", "holds": False, "verdict": "refuted"}]
    proof = read_proof(result(tmp_path / "p.json", unconfirmed=open_values, gradients=refuted, outcome="different"), 2)
    assert proof.unconfirmed == DOUBTS + 8 and len(proof.doubts) == DOUBTS
    assert (proof.doubts[0].name, proof.doubts[0].why) == ("w", "g is not its gradient")


def test_what_is_of_another_folder_or_format_is_refused(tmp_path):
    path = result(tmp_path / "p.json")
    with pytest.raises(InputError, match="of another folder: it is of 2 ranks, the folder has 4"):
        read_proof(path, 4)
    with pytest.raises(InputError, match="outcome"):
        read_proof(result(path, outcome="<b>"), 2)
    with pytest.raises(InputError, match="format"):
        read_proof(result(path, format="gopt-report/2"), 2)
