"""One rank's file of an output folder, by itself: calls, states, and operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gopt.documents.records import to_document
from gopt.ir.graph import COMM
from gopt.ir.load import load
from gopt.offline.inspect import NamedValue
from gopt.offline.kinds.candidate import FileCandidate
from gopt.offline.text import operators
from gopt.text.notebook import HtmlTable

RANK, MESH, FORMAT = "gopt.rank", "gopt.mesh", "gopt.format"


@dataclass(frozen=True, slots=True)
class RankFileInspection(HtmlTable):
    """A rank's file. ``calls``: the number of each collective over each group; ``made_by``: pass -> the number of added
    nodes; ``stored``: inputs with an initial value, in bytes."""

    file: str
    rank: str
    mesh: str
    file_bytes: int
    nodes: int
    operators: Mapping[str, int]
    calls: Mapping[str, int]
    made_by: Mapping[str, int]
    inputs: tuple[NamedValue, ...]
    outputs: tuple[NamedValue, ...]
    stored: Mapping[str, int]
    next: str

    def to_json(self) -> dict[str, Any]:
        return {"format": "gopt-inspection/1", "what": "rank_file"} | to_document(self)


def is_rank_file(candidate: FileCandidate) -> bool:
    return RANK in candidate.metadata


def inspect_rank_file(candidate: FileCandidate) -> RankFileInspection:
    """Describe the program of one rank; raises InputError for a damaged file."""
    path = candidate.path
    graph = load(path, own=True)
    calls = Counter(
        f"{node.op_type} {node.attributes.get('group', '')}".strip() for node in graph.nodes if node.domain == COMM
    )
    passes = Counter(node.made_by for node in graph.nodes if node.made_by)
    home = path.parent
    whole = (home / "manifest.json").is_file()
    hint = f"gopt inspect {home} shows all ranks" if whole else "the manifest.json of all ranks is not beside it"
    return RankFileInspection(
        file=path.name,
        rank=graph.metadata[RANK],
        mesh=graph.metadata.get(MESH, ""),
        file_bytes=candidate.size,
        nodes=len(graph.nodes),
        operators=operators(graph),
        calls=dict(calls.most_common()),
        made_by=dict(passes.most_common()),
        inputs=tuple(NamedValue(n, t.dtype, t.shape, t.nbytes if t.static else 0) for n, t in graph.inputs.items()),
        outputs=tuple(NamedValue(n, t.dtype, t.shape, t.nbytes if t.static else 0) for n, t in graph.outputs.items()),
        stored={name: graph.inputs[name].nbytes for name in graph.inputs if name in graph.initializers},
        next=hint,
    )
