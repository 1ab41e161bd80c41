"""Ranks of drawn forward models, in parts by their numbers, and edited: what is said of them beside the numbers."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from corpus.drawn_ranks import SEEDS, Form, Ranks, drawn_model, drawn_node, left_node, shows
from draws import Verdict

import gopt
from gopt.errors import GoptError
from gopt.verification.proof.result import RankProof

Shown = dict[str, tuple[str, Form]]


def proof_of(ranks: Ranks, shown: Shown, folder: Path, relation: Any = None) -> RankProof | Verdict:
    """What the prover says; a verdict where it refuses the files."""
    outputs = list(dict.fromkeys(value for value, _ in shown.values()))
    onnx.save(ranks.source.model(0, outputs), folder / "source.onnx")
    paths = [folder / f"rank_{rank}.onnx" for rank in range(ranks.members)]
    for rank, path in enumerate(paths):
        onnx.save(ranks.model(rank, shown), path)
    try:
        return gopt.prove(folder / "source.onnx", ranks=paths, relation=relation or ranks.relation(shown))
    except GoptError as error:
        return Verdict("refused", error.message)
    except Exception:
        return Verdict("CRASH", traceback.format_exc(limit=-4))


def wrong(ranks: Ranks, shown: Shown) -> list[str]:
    """The outputs whose numbers are not the model's."""
    return [
        name for name, (value, form) in shown.items()
        if not all(shows(ranks.arrays[name][seed], ranks.source.arrays[value][seed][0], form) for seed in SEEDS)
    ]  # fmt: skip


def again(ranks: Ranks, shown: Shown, seed: int) -> bool:
    try:
        return ranks.again(shown, seed)
    except Exception:  # an evaluator's exceptions have no common base
        return False


NODES = {"models": drawn_node, "left": left_node}
"""Kind of models -> what draws nodes."""


def judged(seed: int, edits: int, folder: Path, kind: str = "models") -> Iterator[tuple[str, Verdict]]:
    draw = random.Random(seed)
    ranks = Ranks(drawn_model(draw, NODES[kind]), draw.choice([2, 3, 4]), draw)
    shown = ranks.shown()
    relation = ranks.relation(shown)
    for number in range(edits + 1 if shown else 0):
        edited = ranks.edited(shown) if number else ranks
        if edited is None:
            continue
        proof = proof_of(edited, shown, folder, relation)
        if isinstance(proof, Verdict):
            yield f"edit {number}", proof
            if not number:
                return
            continue
        apart = wrong(edited, shown)
        verdict = proof.verdict.value
        if proof.proven and apart:
            verdict = "WRONG"
        if proof.proven and number and not apart and not all(again(edited, shown, more) for more in range(2)):
            verdict = "WRONG"
        if verdict == "different" and not apart and all(again(edited, shown, more) for more in range(20)):
            verdict = "ALIKE"
        told = [f"{claim.name} {claim.mismatch}" for claim in proof.open()]
        yield f"edit {number}", Verdict(verdict, f"{apart} {told[:2]}"[:700])
        if not number and not proof.proven:
            return
