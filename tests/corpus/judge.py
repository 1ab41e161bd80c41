"""What each check says of a planted folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

import gopt
from corpus.plants import Plant
from gopt.artifact.graph_check import check_rank
from gopt.artifact.manifest_check import read_manifest
from gopt.ir.load import load


@dataclass(frozen=True)
class Judgement:
    """What each check says: ``load`` of the files alone, ``calls`` of calls that a group makes together. ``named``: how
    the node that the proof names stands to the edit."""

    load: str
    calls: str
    prove: str
    named: str
    verify: str


def judge(plant: Plant, folder: Path) -> Judgement:
    """Plant an error in a folder, and ask all checks."""
    before = {path: _nodes(path) for path in plant.files(folder)}
    plant.plant(folder)
    for path in before:
        onnx.checker.check_model(str(path))
    try:
        _load(folder)
    except gopt.InputError:
        return Judgement("refused", "", "refused", "", "refused")
    calls = named = ""
    try:
        proof = gopt.prove(folder)
        verdict, named = proof.verdict.value, _named(proof, before)
        calls = "differ" if proof.claims[0].kind == "call" else "agree"
    except gopt.UnsupportedError:
        verdict = "unproven"
    try:
        outcome = gopt.verify(folder, steps=2, confirm=False).outcome.value
    except gopt.GoptError:
        outcome = "refused"
    return Judgement("accepted", calls, verdict, named, outcome)


def _load(folder: Path) -> None:
    """Raise InputError where the files of a folder contradict its manifest."""
    manifest, _ = read_manifest(folder)
    for entry in manifest.ranks:
        graphs = {phase: load(folder / file, own=True) for phase, file in entry.files.items()}
        check_rank(manifest, entry, graphs, folder)


def _nodes(path: Path) -> list[onnx.NodeProto]:
    return list(onnx.load(path, load_external_data=False).graph.node)


def _named(proof: Any, before: dict[Path, list[onnx.NodeProto]]) -> str:
    """Whether the first claim names what was edited, what is behind it, or what is before it; '' if it names none."""
    mismatch = proof.open()[0].mismatch if proof.open() else None
    if mismatch is None or mismatch.node is None:
        return ""
    edited, moved = set(), set()
    for path, nodes in before.items():
        texts = {node.SerializeToString() for node in nodes}
        for node in _nodes(path):
            if node.SerializeToString() not in texts:
                edited.update(node.output)
            elif not moved.union(edited).isdisjoint(node.input):
                moved.update(node.output)
    return "the edit" if mismatch.node in edited else "behind it" if mismatch.node in moved else "before it"
