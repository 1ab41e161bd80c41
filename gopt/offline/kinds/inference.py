"""A model without a training step: the inputs and outputs, the weights, and the way to a step.

Any valid ONNX file is described: with weights or without, with functions, with states carried from call to call, and
with values that are no tensors. Only a file that looks like a step is refused, with the reason for open roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

import onnx

from gopt.analysis.coupling.marks import Relation
from gopt.analysis.coupling.propagate import propagate, start
from gopt.analysis.roles import carried_states, trained_outputs
from gopt.documents.records import to_document
from gopt.errors import GoptError, InputError, UnsupportedError
from gopt.ir.functions import inline_functions
from gopt.ir.graph import Graph
from gopt.ir.load import graph_of, load, outline
from gopt.ir.node_kinds import record_of
from gopt.ir.types import TensorType, dtype_name
from gopt.offline.inspect import NamedValue
from gopt.offline.kinds.candidate import FileCandidate
from gopt.offline.text import operators, opsets
from gopt.system.files import digest_of
from gopt.text.notebook import HtmlTable

SIZE = 8
"""A size that a hint gives to a dimension that has a name."""
NO_STEP = "no output is a loss of values that other outputs replace"
"""Why a model is no step, where the analysis of a step would have asked for roles."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Stored values that are not inputs, Constant nodes included: ``elements`` and ``bytes`` of all, ``dtypes``: the
    number of each."""

    tensors: int
    elements: int
    bytes: int
    dtypes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class InferenceInspection(HtmlTable):
    """A model without training. ``refusal``: why the model is no training step; ``next``: the way to a step;
    ``functions``: the model's own; ``carried``: states handed from call to call, with new values."""

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
    functions: tuple[str, ...] = ()
    carried: Mapping[str, str] = field(default_factory=dict)
    next: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"format": "gopt-inspection/1", "what": "inference_model"} | to_document(self)


def inspect_inference(path: Path, refusal: GoptError) -> InferenceInspection:
    """Describe a model that ``refusal`` found not to be a training step.

    Raises ``refusal`` for a damaged file, and for a graph with a loss and with outputs that look like new parameters.
    """
    try:
        graph = load(path)
        pairs = _carried(_written_out(path, graph), refusal)
    except (InputError, UnsupportedError) as error:
        if error is refusal:
            raise
        graph, pairs = outline(path, error), {}
    stored = _stored(graph)
    return InferenceInspection(
        file=path.name,
        sha256=digest_of(path).hex(),
        file_bytes=path.stat().st_size,
        producer=f"{graph.header.producer_name} {graph.header.producer_version}".strip(),
        opsets=opsets(graph),
        nodes=len(graph.nodes),
        operators=operators(graph),
        inputs=_named(graph, graph.inputs),
        outputs=_named(graph, graph.outputs),
        weights=Weights(
            len(stored), sum(type.elements for type in stored), sum(type.nbytes for type in stored),
            dict(Counter(type.dtype for type in stored).most_common()),
        ),
        refusal=refusal.message if isinstance(refusal, InputError) and graph.nodes else NO_STEP,
        notes=_notes(graph),
        functions=tuple(function.name for function in graph.header.functions),
        carried={name: output for output, name in pairs.items()},
        next=how_to_train(path, graph),
    )  # fmt: skip


def how_to_train(path: Path, graph: Graph) -> str:
    """The way from a model without a training step to a step; each named dimension gets a size."""
    fed = [graph.type_of(name) for name in graph.inputs if name not in graph.initializers]
    named = {str(dim) for type in fed for dim in type.shape or () if isinstance(dim, str) and dim}
    sizes = "".join(f" --dim {quote(f'{name}={SIZE}')}" for name in sorted(named))
    return (
        f"to train it: gopt derive {quote(str(path))} --loss cross-entropy --optimizer adamw{sizes} -o step.onnx"
        f"{'; choose the sizes' if sizes else ''}; then gopt shard"
    )


def _written_out(path: Path, graph: Graph) -> Graph:
    """The graph without calls of the model's own functions."""
    model = FileCandidate(path).model if graph.header.functions else None
    return graph if model is None else graph_of(inline_functions(model), path)


def _carried(graph: Graph, refusal: GoptError) -> dict[str, str]:
    """Output -> the replaced input; empty if open. Raises ``refusal`` for a model that looks like a step."""
    pairs = None
    with suppress(UnsupportedError):
        pairs = carried_states(graph)
    trained = trained_outputs(graph, pairs)
    if trained and not _of_samples(graph, pairs or {}).issuperset(trained):
        raise refusal
    return pairs or {}


def _of_samples(graph: Graph, pairs: Mapping[str, str]) -> set[str]:
    """Outputs with a row for every sample, such as the cache of a decoder: a new parameter has none."""
    fed = [name for name in graph.inputs if name not in graph.initializers and name not in pairs.values()]
    batch = [name for name in fed if graph.inputs[name].shape]
    if not batch:
        return set()
    context = start(graph, batch)
    sizes = {shape[0] for name in batch if (shape := graph.inputs[name].shape)}
    propagate(context, graph.nodes)
    names = set()
    for name, type in graph.outputs.items():
        mark = context.marks.get(name)
        unknown = mark is not None and mark.kind is Relation.UNKNOWN
        if (unknown and type.shape and type.shape[0] in sizes) or context.samples(name) is not None:
            names.add(name)
    return names


def _named(graph: Graph, values: Mapping[str, Any]) -> tuple[NamedValue, ...]:
    types = {name: graph.type_of(name) for name in values}
    return tuple(NamedValue(n, t.dtype, t.shape, t.nbytes if t.static else 0) for n, t in types.items())


def _stored(graph: Graph) -> list[TensorType]:
    """The types of stored values that are no inputs, and of Constant nodes."""
    stored = [tensor.type for name, tensor in graph.initializers.items() if name not in graph.inputs]
    for node in graph.nodes:
        value = node.attributes.get("value") if not node.reads else None
        if isinstance(value, onnx.TensorProto):
            stored.append(TensorType(dtype_name(value.data_type), tuple(value.dims)))
    return stored


def _notes(graph: Graph) -> tuple[str, ...]:
    """Return remarks for a user who wants to train this graph."""
    notes = []
    quantized = sum(
        node.op_type.startswith(("QLinear", "Quantize", "Dequantize", "DynamicQuantize")) for node in graph.nodes
    )
    if quantized:
        notes.append(f"{quantized} quantized operators: export from the model before quantization")
    norms = sum(record_of(node).running != () and not node.attributes.get("training_mode") for node in graph.nodes)
    if norms:
        notes.append(f"{norms} BatchNormalization in inference mode: export in training mode, or statistics stay")
    if any(tensor.external for tensor in graph.initializers.values()):
        notes.append("values in external data")
    if not _stored(graph):
        notes.append("no stored values: parameters may be among the inputs")
    return tuple(notes)
