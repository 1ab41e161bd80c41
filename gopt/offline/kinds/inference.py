"""A model without a training step: what it computes from what, its weights, and how to get a step of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gopt.analysis.role_map import RoleMap
from gopt.analysis.roles import shows_states
from gopt.disk.files import digest_of
from gopt.documents.records import to_document
from gopt.errors import GoptError
from gopt.ir.graph import Graph
from gopt.ir.load import load
from gopt.ir.types import FLOATS
from gopt.notebook import HtmlTable
from gopt.offline.inspect import NamedValue

HOW_TO_TRAIN = (
    "to train it: gopt derive MODEL --loss cross-entropy --optimizer adamw -o step.onnx (docs/derive.md); "
    "then gopt shard"
)
"""How to turn a model without a training step into one."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Stored values that are not inputs: ``elements`` and ``bytes`` of all, ``dtypes``: how many there are of each."""

    tensors: int
    elements: int
    bytes: int
    dtypes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class InferenceInspection(HtmlTable):
    """A model that trains nothing. ``refusal``: why it is not a training step; ``next``: how to get one."""

    file: str
    sha256: str
    file_bytes: int
    producer: str
    opsets: Mapping[str, int]
    nodes: int
    operators: Mapping[str, int]
    inputs: tuple[NamedValue, ...]
    outputs: tuple[NamedValue, ...]
    weights: Weights
    refusal: str
    notes: tuple[str, ...]
    next: str = HOW_TO_TRAIN

    def to_json(self) -> dict[str, Any]:
        return {"format": "gopt-inspection/1", "what": "inference_model"} | to_document(self)


def inspect_inference(path: Path, refusal: GoptError) -> InferenceInspection:
    """Describe a model which ``refusal`` found not to be a training step.

    Raises ``refusal`` for a damaged file, and for a graph that has states, or may have them inside of functions.
    """
    try:
        graph = load(path)
        stepless = not graph.header.functions and not shows_states(graph, RoleMap())
    except GoptError:
        raise refusal from None
    weights = {name: tensor for name, tensor in graph.initializers.items() if name not in graph.inputs}
    if not stepless or not any(tensor.type.dtype in FLOATS and tensor.type.shape for tensor in weights.values()):
        raise refusal
    operators = Counter(f"{node.domain}.{node.op_type}".lstrip(".") for node in graph.nodes)
    return InferenceInspection(
        file=path.name,
        sha256=digest_of(path).hex(),
        file_bytes=path.stat().st_size,
        producer=f"{graph.header.producer_name} {graph.header.producer_version}".strip(),
        opsets={entry.domain or "ai.onnx": entry.version for entry in graph.header.opset_import},
        nodes=len(graph.nodes),
        operators=dict(operators.most_common()),
        inputs=_named(graph, graph.inputs),
        outputs=_named(graph, graph.outputs),
        weights=Weights(
            len(weights), sum(tensor.type.elements for tensor in weights.values()),
            sum(tensor.nbytes for tensor in weights.values()),
            dict(Counter(tensor.type.dtype for tensor in weights.values()).most_common()),
        ),
        refusal=refusal.message,
        notes=_notes(graph),
    )  # fmt: skip


def _named(graph: Graph, values: Mapping[str, Any]) -> tuple[NamedValue, ...]:
    types = {name: graph.type_of(name) for name in values}
    return tuple(NamedValue(n, t.dtype, t.shape, t.nbytes if t.static else 0) for n, t in types.items())


def _notes(graph: Graph) -> tuple[str, ...]:
    """Return remarks for a user who wants to train this graph."""
    notes = []
    quantized = sum(
        node.op_type.startswith(("QLinear", "Quantize", "Dequantize", "DynamicQuantize")) for node in graph.nodes
    )
    if quantized:
        notes.append(f"{quantized} quantized operators: export from the model before quantization")
    norms = sum(node.is_a("BatchNormalization") and not node.attributes.get("training_mode") for node in graph.nodes)
    if norms:
        notes.append(f"{norms} BatchNormalization in inference mode: export in training mode, or statistics stay")
    if any(tensor.external for tensor in graph.initializers.values()):
        notes.append("values in external data")
    return tuple(notes)
