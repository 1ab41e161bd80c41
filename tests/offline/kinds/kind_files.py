"""Small files of every kind. ONNX Runtime's training package is frozen and not installed: its artifacts are written by
hand here, after the facts in its schemas and measured outputs; so is ``training_info``, which no exporter writes."""

from __future__ import annotations

from pathlib import Path

import flatbuffers
import numpy as np
import onnx
from flatbuffers import number_types
from onnx import TensorProto, helper, parser

HEAD = '<ir_version: 9, opset_import: ["" : 18]> '
INFERENCE = HEAD + "g (float[N,4] x) => (float[N,2] y) <float[4,2] w = {1,2,3,4,5,6,7,8}> { y = MatMul(x, w) }"


def inference(path: Path) -> Path:
    path.write_bytes(parser.parse_model(INFERENCE).SerializeToString())
    return path


def training_info(path: Path) -> Path:
    model = parser.parse_model(INFERENCE)
    info = model.training_info.add()
    info.algorithm.name = "step"
    info.algorithm.node.add(
        op_type="Gradient", domain="ai.onnx.preview.training", input=["x", "w"], output=["dw"]
    ).attribute.append(helper.make_attribute("xs", ["w"]))
    info.algorithm.node.add(op_type="Sub", input=["w", "dw"], output=["w_new"])
    info.update_binding.add(key="w", value="w_new")
    info.initialization_binding.add(key="w", value="w_first")
    path.write_bytes(model.SerializeToString())
    return path


def ort_training(path: Path) -> Path:
    """One layer: forward, backward and an accumulator, as ``onnxruntime.training.artifacts`` lays them out."""
    microsoft = "com.microsoft"
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("ReduceMean", ["y"], ["loss"], keepdims=0),
        helper.make_node("Scale", ["loss_seed"], ["y_grad"], domain=microsoft, doc_string="Backward pass"),
        helper.make_node("FusedMatMul", ["x", "y_grad"], ["w_grad"], domain=microsoft, doc_string="Backward pass"),
        helper.make_node(
            "InPlaceAccumulatorV2", ["w_grad.accumulation.buffer", "w_grad", "lazy_reset_grad"],
            ["w_grad.accumulation.out"], domain=microsoft,
        ),
    ]  # fmt: skip
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4]),
        helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 2]),
        helper.make_tensor_value_info("w_grad.accumulation.buffer", TensorProto.FLOAT, [4, 2]),
        helper.make_tensor_value_info("lazy_reset_grad", TensorProto.BOOL, [1]),
    ]
    outputs = [
        helper.make_tensor_value_info("loss", TensorProto.FLOAT, []),
        helper.make_tensor_value_info("w_grad.accumulation.out", TensorProto.BOOL, [1]),
    ]
    seed = helper.make_tensor("loss_seed", TensorProto.FLOAT, [], [1.0])
    graph = helper.make_graph(nodes, "training", inputs, outputs, [seed])
    path.write_bytes(_model(graph).SerializeToString())
    return path


def ort_optimizer(path: Path) -> Path:
    sequences = ["params", "gradients", "first_order_moments", "second_order_moments"]
    node = helper.make_node(
        "AdamWOptimizer", ["learning_rate", "step", "params", "clipped", *sequences[2:]], ["done"],
        domain="com.microsoft", alpha=0.9, beta=0.999, epsilon=1e-6, weight_decay=0.0,
    )  # fmt: skip
    clip = helper.make_node("InplaceClipGradNorm", ["gradients"], ["clipped"], domain="com.microsoft", max_norm=1.0)
    inputs = [
        helper.make_tensor_value_info("learning_rate", TensorProto.FLOAT, [1]),
        helper.make_tensor_value_info("step", TensorProto.INT64, [1]),
        *(helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None) for name in sequences),
    ]
    graph = helper.make_graph(
        [clip, node], "optimizer", inputs, [helper.make_tensor_value_info("done", TensorProto.BOOL, [1])]
    )
    path.write_bytes(_model(graph).SerializeToString())
    return path


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", 15), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def ort_checkpoint(path: Path, shape: tuple[int, ...] = (4, 2)) -> Path:
    """Parameter ``w`` with two moments in ``group0``, a frozen ``f``, and one property of each type."""
    b = flatbuffers.Builder(0)

    def table(*fields: tuple[int, str, object, object]) -> int:
        b.StartObject(8)
        for number, kind, value, default in fields:
            getattr(b, f"Prepend{kind}Slot")(number, value, default)
        return b.EndObject()

    def vector(items: list[int]) -> int:
        b.StartVector(4, len(items), 4)
        for item in reversed(items):
            b.PrependUOffsetTRelative(item)
        return b.EndVector()

    def tensor(name: str, dims: tuple[int, ...]) -> int:
        label, shape_of = b.CreateString(name), b.CreateNumpyVector(np.array(dims, np.int64))
        raw = b.CreateByteVector(bytes(4 * int(np.prod(dims))))
        return table(
            (0, "UOffsetTRelative", label, 0), (2, "UOffsetTRelative", shape_of, 0), (3, "Int32", 1, 0),
            (4, "UOffsetTRelative", raw, 0),
        )  # fmt: skip

    trained, frozen = vector([tensor("w", shape)]), vector([tensor("f", (3,))])
    module = table((0, "UOffsetTRelative", trained, 0), (1, "UOffsetTRelative", frozen, 0))
    moments = vector([tensor("momentum0", shape), tensor("momentum1", shape)])
    name = b.CreateString("w")
    states = vector([table((0, "UOffsetTRelative", name, 0), (1, "UOffsetTRelative", moments, 0))])
    label = b.CreateString("group0")
    group = table(
        (0, "UOffsetTRelative", label, 0), (1, "Int64", 7, 0), (2, "Float32", 0.5, 0.0),
        (3, "UOffsetTRelative", states, 0),
    )  # fmt: skip
    groups = vector([group])
    epoch = b.CreateString("epoch")
    integers = vector([table((0, "UOffsetTRelative", epoch, 0), (1, "Int64", 3, 0))])
    bag = table((0, "UOffsetTRelative", integers, 0))
    root = table(
        (0, "Int32", 1, 0), (1, "UOffsetTRelative", module, 0), (2, "UOffsetTRelative", groups, 0),
        (3, "UOffsetTRelative", bag, 0),
    )  # fmt: skip
    b.Finish(root, file_identifier=b"ODTC")
    assert number_types.UOffsetTFlags.bytewidth == 4
    path.write_bytes(bytes(b.Output()))
    return path


def ort_artifacts(folder: Path) -> Path:
    folder.mkdir()
    ort_training(folder / "training_model.onnx")
    ort_optimizer(folder / "optimizer_model.onnx")
    ort_checkpoint(folder / "checkpoint")
    inference(folder / "eval_model.onnx")
    return folder


def safetensors(path: Path) -> Path:
    header = b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    return path


def npz(path: Path) -> Path:
    with path.open("wb") as file:
        np.savez(file, w=np.zeros((2, 3), np.float32), n=np.array(3))
    return path
