"""What each check says of a planted folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx

import gopt
from corpus.plants import Plant
from gopt.artifact.graph_check import check_rank
from gopt.artifact.manifest_check import read_manifest
from gopt.ir.load import load
from gopt.proof.result import Proof


@dataclass(frozen=True)
class Judgement:
    """What ``gopt prove`` and ``gopt verify`` say; ``named``: how the node that the proof names stands to the edit."""

    prove: str
    named: str
    verify: str


def judge(plant: Plant, folder: Path) -> Judgement:
    """Plant an error in a folder, and ask both commands."""
    before = {path: _nodes(path) for path in plant.files(folder)}
    plant.plant(folder)
    try:
        proof = gopt.prove(folder)
        verdict, named = proof.verdict.value, _named(proof, before)
    except gopt.UnsupportedError:
        verdict, named = "unproven", ""
    return Judgement(verdict, named, gopt.verify(folder, steps=2, confirm=False).outcome.value)


def check_form(plant: Plant, folder: Path) -> None:
    """Raise an error where the files of a folder are not well formed."""
    manifest, _ = read_manifest(folder)
    for entry in manifest.ranks:
        graphs = {phase: load(folder / file, own=True) for phase, file in entry.files.items()}
        check_rank(manifest, entry, graphs, folder)
    for path in plant.files(folder):
        onnx.checker.check_model(str(path))


def _nodes(path: Path) -> list[onnx.NodeProto]:
    return list(onnx.load(path, load_external_data=False).graph.node)


def _named(proof: Proof, before: dict[Path, list[onnx.NodeProto]]) -> str:
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
