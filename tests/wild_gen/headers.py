"""Versions, operator sets, metadata: what stands around the graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import ModelProto, helper

from wild_gen.form import Form, refused
from wild_gen.rewriting import opset, replace_nodes, store


def _ir(version: int) -> Callable[[ModelProto, Path], None]:
    def edit(model: ModelProto, folder: Path) -> None:
        model.ir_version = version

    return edit


def old_ir(model: ModelProto, folder: Path) -> None:
    """IR 3: every initializer is an input too."""
    declared = {each.name for each in model.graph.input}
    for each in model.graph.initializer:
        if each.name not in declared:
            model.graph.input.append(helper.make_tensor_value_info(each.name, each.data_type, list(each.dims)))
    model.ir_version = 3


def constants_are_inputs(model: ModelProto, folder: Path) -> None:
    version = model.ir_version
    old_ir(model, folder)
    model.ir_version = version


def at_opset(version: int) -> Callable[[ModelProto, Path], None]:
    """Another operator set. Reductions got their axes as an input in 13 (ReduceSum) and 18 (others)."""

    def edit(model: ModelProto, folder: Path) -> None:
        old = opset(model)
        nodes = []
        for node in model.graph.node:
            inner = onnx.NodeProto.FromString(node.SerializeToString())
            _moved(model, inner, old, version)
            nodes.append(inner)
        replace_nodes(model.graph, nodes)
        for each in model.opset_import:
            if each.domain == "":
                each.version = version

    return edit


REDUCTIONS = ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2", "ReduceL1", "ReduceSumSquare")


def _moved(model: ModelProto, node: onnx.NodeProto, old: int, new: int) -> None:
    if node.op_type in REDUCTIONS and new < 18 <= old and len(node.input) > 1:
        held = {each.name: each for each in model.graph.initializer}
        axes = onnx.numpy_helper.to_array(held[node.input[1]]).tolist()
        del node.input[1:]
        node.attribute.append(helper.make_attribute("axes", axes))
    if node.op_type in REDUCTIONS and new < 18:
        kept = [each for each in node.attribute if each.name != "noop_with_empty_axes" or each.i]
        del node.attribute[:]
        node.attribute.extend(kept)


def domains(*pairs: tuple[str, int]) -> Callable[[ModelProto, Path], None]:
    """Add operator sets; (\"\", 0) takes the default one out."""

    def edit(model: ModelProto, folder: Path) -> None:
        version = opset(model)
        for domain, number in pairs:
            if number == 0:
                kept = [each for each in model.opset_import if each.domain != domain]
                del model.opset_import[:]
                model.opset_import.extend(kept)
            else:
                model.opset_import.append(helper.make_opsetid(domain, number if number > 0 else version))

    return edit


def spelt_import(model: ModelProto, folder: Path) -> None:
    """``ai.onnx`` for the default domain in the import."""
    model.opset_import[0].domain = "ai.onnx"


def spelt_nodes(model: ModelProto, folder: Path) -> None:
    """``ai.onnx`` for the default domain in every other node, which onnx's checker refuses."""
    for node in model.graph.node[::2]:
        node.domain = "ai.onnx"


def metadata(model: ModelProto, folder: Path) -> None:
    for each in (model, model.graph, *model.graph.node, *model.graph.initializer, *model.graph.input):
        if hasattr(each, "metadata_props"):
            entry = each.metadata_props.add()
            entry.key, entry.value = "a key: \u00e4\u6f22", "line\nline\ttab \U0001f600"
        each.doc_string = "a\nb"
    model.producer_name, model.producer_version, model.domain, model.model_version = "someone", "1\u00b2", "x.y", 2**62


def annotated(model: ModelProto, folder: Path) -> None:
    """A quantization annotation, which says nothing of a float graph."""
    entry = model.graph.quantization_annotation.add()
    entry.tensor_name = model.graph.node[0].output[0]
    pair = entry.quant_parameter_tensor_names.add()
    pair.key, pair.value = "SCALE_TENSOR", store(model, "wild.scale", 1.0)


def nameless(model: ModelProto, folder: Path) -> None:
    """No node has a name, and the graph has an odd one."""
    model.graph.name = "g \u00e9/\u202e"
    for node in model.graph.node:
        node.name = ""


def one_node_name(model: ModelProto, folder: Path) -> None:
    for node in model.graph.node:
        node.name = "n"


OLD = ("momentum",)
"""Steps of operators that are the same since operator set 13; those of the others since 16."""
_EITHER = "a state plus a constant that is an input: the data flow does not say which of them is the state"
EITHER = {
    **dict.fromkeys(("mlp_adamw", "emb_adamw", "mlp_mom_clip_sched", "mlp_adamw_fp16_scaler"), _EITHER),
    "cnn_mom_fp16": "constants that are inputs hide the gradient of a convolution: --params settles it",
}
FORMS = [
    Form("as it is", lambda model, folder: None),
    *(Form(f"ir {version}", _ir(version)) for version in (4, 6, 8, 11, 13, 14)),
    Form("ir 99", _ir(99), refused(3, "99")),
    Form("ir 3", old_ir, gaps=EITHER),
    Form("constants are inputs", constants_are_inputs, gaps=EITHER),
    *(Form(f"opset {version}", at_opset(version), only=() if version > 15 else OLD) for version in range(13, 27)),
    *(Form(f"opset {version}", at_opset(version), verified=False) for version in (27, 28)),
    Form("opset 99", at_opset(99), refused(3, "operator set 99")),
    Form("unused domains", domains(("com.microsoft", 1), ("not.known", 7), ("ai.onnx.ml", 3))),
    Form("default domain missing", domains(("ai.onnx.ml", 3), ("", 0)), refused(3, "n0", "domain")),
    Form("default domain twice", domains(("", -1))),
    Form("default domain twice, spelt out", domains(("ai.onnx", -1))),
    Form("default domain at two versions", domains(("", 13)), refused(3, "ai.onnx", "20 and 13")),
    Form("ai.onnx imported", spelt_import),
    Form("ai.onnx at nodes", spelt_nodes, refused(3, "ai.onnx")),
    Form("metadata", metadata),
    Form("quantization annotation", annotated),
    Form("nodes without names", nameless),
    Form("one name for all nodes", one_node_name),
]
