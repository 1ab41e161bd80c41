"""The terms of a gradient that pipeline stages sum over micro-batches, each stage its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gopt.analysis.training import TrainingGraph
from gopt.artifact.manifest import Manifest
from gopt.operators.kinds import MOVES
from gopt.records.mesh import PIPELINE
from gopt.verification.rank_programs import load_rank


def terms_of_stages(
    folder: Path, manifest: Manifest, source: TrainingGraph, terms: Mapping[str, str]
) -> dict[str, str]:  # fmt: skip
    """Value of a rank -> the gradient, for ``terms`` of gradients without a rank for the whole sum; of a sum of terms
    that a rank makes, the sum alone. A stage may receive a term in front of a transpose."""
    mesh = manifest.mesh.mesh()
    if manifest.accumulate == 1 or not terms or PIPELINE not in dict(mesh.axes):
        return {}
    stages = {mesh.coordinates(record.rank)[PIPELINE]: record for record in manifest.ranks}
    graphs = (load_rank(folder, record, list(manifest.schedule)) for record in stages.values())
    nodes = (node for files in graphs for graph in files.values() for node in graph.nodes)
    present = {name for node in nodes for name in node.outputs}
    producers, readers, result = source.graph.producers(), source.graph.users(), dict[str, str]()
    inside = set[str]()
    for term, gradient in terms.items():
        total = readers[term][0].outputs[0]
        if total != gradient and (total in present or total in inside):
            inside.add(term)
            continue
        while term not in present and producers[term].is_in(MOVES) and len(readers[producers[term].inputs[0]]) == 1:
            term = producers[term].inputs[0]
        if gradient not in present:
            result[term] = gradient
    return result
