"""A law: ranks of drawn models, in parts and edited, are proven only where their numbers are the model's."""

from __future__ import annotations

import random
from pathlib import Path

import onnx
import pytest
from products import part

import gopt
from corpus.drawn_ranks import SEEDS, Form, Ranks, drawn_model, fits
from gopt.verification.proof.result import ProofVerdict


def verdict(ranks: Ranks, shown: dict[str, tuple[str, Form]], folder: Path) -> ProofVerdict | None:
    """What the prover says; None where it refuses the files."""
    outputs = list(dict.fromkeys(value for value, _ in shown.values()))
    onnx.save(ranks.source.model(0, outputs), folder / "source.onnx")
    paths = [folder / f"rank_{rank}.onnx" for rank in range(ranks.members)]
    for rank, path in enumerate(paths):
        onnx.save(ranks.model(rank, shown), path)
    try:
        return gopt.prove(folder / "source.onnx", ranks=paths, relation=ranks.relation(shown)).verdict
    except gopt.GoptError:
        return None


@pytest.mark.parametrize("seed", part(range(3000), 12))
def test_what_is_proven_has_the_numbers_of_the_model(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    ranks = Ranks(drawn_model(draw), draw.choice([2, 3, 4]), draw)
    shown = ranks.shown()
    if not shown:
        return
    assert verdict(ranks, shown, tmp_path) is not ProofVerdict.DIFFERENT
    for _ in range(8):
        edited = ranks.edited(shown)
        if edited is None:
            continue
        right = all(
            fits(edited.arrays[name][seed], ranks.source.arrays[value][seed][0], form)
            for name, (value, form) in shown.items() for seed in SEEDS
        )  # fmt: skip
        if not right:
            assert verdict(edited, shown, tmp_path) is not ProofVerdict.PROVEN
