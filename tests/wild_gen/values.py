"""Values of a step: where they are stored, and of which types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from onnx import ModelProto, NodeProto, SparseTensorProto, TensorProto, helper, numpy_helper

from wild_gen.form import Form, refused
from wild_gen.functions import products
from wild_gen.rewriting import FLOATS, batch, copy_of, infos, replace_nodes, rewrite, store
from wild_gen.steps import NAMES


def _constants(model: ModelProto) -> list[TensorProto]:
    declared = {each.name for each in model.graph.input}
    return [each for each in model.graph.initializer if each.name not in declared]


def _take(model: ModelProto, gone: list[TensorProto]) -> list[TensorProto]:
    """Copies of initializers, which the model loses."""
    names = {each.name for each in gone}
    copies = [TensorProto.FromString(each.SerializeToString()) for each in gone]
    kept = [TensorProto.FromString(e.SerializeToString()) for e in model.graph.initializer if e.name not in names]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return copies


def as_nodes(model: ModelProto, folder: Path) -> None:
    """Every stored constant as a Constant node, in each of the operator's ways."""
    made = []
    for each in _take(model, _constants(model)):
        array = numpy_helper.to_array(each)
        made.append(helper.make_node("Constant", [], [each.name], name=f"k_{each.name}", **_way(array, each)))
    replace_nodes(model.graph, [*made, *model.graph.node])


def _way(array: np.ndarray, tensor: TensorProto) -> dict[str, object]:
    whole, single = array.dtype == np.int64, array.dtype == np.float32
    if array.shape == () and (whole or single):
        return {"value_int": int(array)} if whole else {"value_float": float(array)}
    if array.ndim == 1 and (whole or single) and array.size:
        return {"value_ints": array.tolist()} if whole else {"value_floats": array.tolist()}
    return {"value": tensor}


def as_initializers(model: ModelProto, folder: Path) -> None:
    """Every Constant node as a stored constant."""
    kept = []
    for node in model.graph.node:
        if node.op_type != "Constant":
            kept.append(node)
            continue
        (attribute,) = node.attribute
        value = helper.get_attribute_value(attribute)
        dtype = {"value_int": np.int64, "value_ints": np.int64}.get(attribute.name, np.float32)
        array = numpy_helper.to_array(value) if attribute.name == "value" else np.asarray(value, dtype)
        model.graph.initializer.append(numpy_helper.from_array(array, node.output[0]))
    replace_nodes(model.graph, kept)


def filled(model: ModelProto, folder: Path) -> None:
    """Constants of one number through ConstantOfShape."""
    made = []
    for each in _take(model, [each for each in _constants(model) if each.data_type in FLOATS and not each.dims]):
        shape = store(model, f"{each.name}.shape", [], np.int64)
        value = helper.make_tensor("v", each.data_type, [1], [float(numpy_helper.to_array(each))])
        made.append(helper.make_node("ConstantOfShape", [shape], [each.name], value=value))
    replace_nodes(model.graph, [*made, *model.graph.node])


def typed_fields(model: ModelProto, folder: Path) -> None:
    """Values in the typed fields of a tensor, not as raw bytes."""
    for each in model.graph.initializer:
        array = numpy_helper.to_array(each)
        made = helper.make_tensor(each.name, each.data_type, array.shape, array.reshape(-1).tolist())
        each.CopyFrom(made)


# --- external data --------------------------------------------------------------------------------------------------


def external(
    place: Callable[[int], str], *, gap: int = 0, length: bool = True, extra: bool = False
) -> Callable[[ModelProto, Path], None]:
    """All values that inputs have in data files."""

    def edit(model: ModelProto, folder: Path) -> None:
        ends: dict[str, int] = {}
        for k, each in enumerate(model.graph.initializer):
            if helper.tensor_dtype_to_np_dtype(each.data_type).name.endswith(("int4", "float4_e2m1fn")):
                raise ValueError("two elements of a byte, which to_array takes apart")
            raw = numpy_helper.to_array(each).tobytes()
            location = place(k)
            at = ends.get(location, 0) + gap if gap else ends.get(location, 0)
            path = folder / location
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.seek(at)
                file.write(raw)
            ends[location] = at + len(raw)
            pairs = {"location": location, "offset": str(at)}
            if length:
                pairs["length"] = str(len(raw))
            if extra:
                pairs |= {"checksum": "0" * 40, "basepath": "elsewhere", "own key": "x"}
            made = TensorProto(name=each.name, data_type=each.data_type, dims=each.dims)
            made.data_location = TensorProto.EXTERNAL
            for key, value in pairs.items():
                made.external_data.add(key=key, value=value)
            each.CopyFrom(made)

    return edit


def one_place(model: ModelProto, folder: Path) -> None:
    """Two values that are the same bytes of a file."""
    arrays = [each for each in model.graph.initializer if each.data_type in FLOATS]
    whole = max(arrays, key=lambda each: int(np.prod(each.dims)))
    (folder / "shared.bin").write_bytes(numpy_helper.to_array(whole).tobytes())
    for name in (whole.name, "wild.same"):
        made = TensorProto(name=name, data_type=whole.data_type, dims=whole.dims)
        made.data_location = TensorProto.EXTERNAL
        made.external_data.add(key="location", value="shared.bin")
        if name == whole.name:
            kept = made
        else:
            model.graph.initializer.append(made)
    whole.CopyFrom(kept)


def bodies_external(model: ModelProto, folder: Path) -> None:
    """A value in external data that a Constant node holds."""
    (folder / "c.bin").write_bytes(np.ones(1, np.float32).tobytes())
    held = TensorProto(name="v", data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)
    held.external_data.add(key="location", value="c.bin")
    nodes = [helper.make_node("Constant", [], ["wild.external"], name="wild.node", value=held), *model.graph.node]
    replace_nodes(model.graph, nodes)


# --- types ----------------------------------------------------------------------------------------------------------


def sparse(model: ModelProto, folder: Path) -> None:
    values = numpy_helper.from_array(np.array([1, 2], np.float32), "wild.sparse")
    places = numpy_helper.from_array(np.array([0, 3], np.int64), "wild.places")
    model.graph.sparse_initializer.append(SparseTensorProto(values=values, indices=places, dims=[4]))


def sparse_constant(model: ModelProto, folder: Path) -> None:
    values = numpy_helper.from_array(np.array([1, 2], np.float32), "v")
    places = numpy_helper.from_array(np.array([0, 3], np.int64), "i")
    held = SparseTensorProto(values=values, indices=places, dims=[4])
    node = helper.make_node("Constant", [], ["wild.sparse"], name="wild.node", sparse_value=held)
    replace_nodes(model.graph, [node, *model.graph.node])


def texts(model: ModelProto, folder: Path) -> None:
    """A table of strings, and an output that shows it."""
    model.graph.initializer.append(
        helper.make_tensor("wild.text", TensorProto.STRING, [2], [b"a", "\u00e9\n".encode()])
    )
    model.graph.node.append(helper.make_node("Identity", ["wild.text"], ["wild.shown"], name="wild.n"))
    model.graph.output.append(helper.make_tensor_value_info("wild.shown", TensorProto.STRING, [2]))


def text_input(model: ModelProto, folder: Path) -> None:
    """An input of strings, whose number is an output."""
    model.graph.input.append(helper.make_tensor_value_info("wild.words", TensorProto.STRING, [3]))
    model.graph.node.append(helper.make_node("Shape", ["wild.words"], ["wild.count"], name="wild.n"))
    model.graph.output.append(helper.make_tensor_value_info("wild.count", TensorProto.INT64, [1]))


def behind_products(make: Callable[[ModelProto, str, str, int], list[NodeProto]]) -> Callable[[ModelProto, Path], None]:
    """Nodes between each product of the forward and what reads it, which change nothing."""

    def edit(model: ModelProto, folder: Path) -> None:
        known = infos(model)

        def behind(node: NodeProto) -> list[NodeProto]:
            own, out = copy_of(node), node.output[0]
            own.output[0] = f"{out}.first"
            return [own, *make(model, f"{out}.first", out, known[out].type.tensor_type.elem_type)]

        rewrite(model, products(model), behind)

    return edit


def stored_as(code: int, array: np.ndarray) -> Callable[[ModelProto, str, str, int], list[NodeProto]]:
    """A stored one of a narrow type, cast to the product's type, times the product."""

    def make(model: ModelProto, old: str, new: str, kind: int) -> list[NodeProto]:
        _at_least(model, 23)
        if all(each.name != "wild.narrow" for each in model.graph.initializer):
            model.graph.initializer.append(numpy_helper.from_array(array, "wild.narrow"))
            assert model.graph.initializer[-1].data_type == code
        return [
            helper.make_node("Cast", ["wild.narrow"], [f"{new}.wide"], to=kind),
            helper.make_node("Mul", [old, f"{new}.wide"], [new]),
        ]

    return make


def _at_least(model: ModelProto, version: int) -> None:
    """An operator set that has the narrow types."""
    for each in model.opset_import:
        if each.domain == "":
            each.version = max(each.version, version)


def dequantized(code: int, dtype: object) -> Callable[[ModelProto, str, str, int], list[NodeProto]]:
    """A frozen one of integers with scale and zero point, times the product."""

    def make(model: ModelProto, old: str, new: str, kind: int) -> list[NodeProto]:
        _at_least(model, 23)
        if all(each.name != "wild.q" for each in model.graph.initializer):
            for name, value in (("wild.q", 3), ("wild.point", 1)):
                model.graph.initializer.append(numpy_helper.from_array(np.asarray([value], dtype), name))
            store(model, "wild.scale", [0.5])
        nodes = [
            helper.make_node("DequantizeLinear", ["wild.q", "wild.scale", "wild.point"], [f"{new}.f"], axis=0),
            helper.make_node("Cast", [f"{new}.f"], [f"{new}.wide"], to=kind),
        ]
        return [*nodes, helper.make_node("Mul", [old, f"{new}.wide"], [new])]

    return make


def through_sequence(model: ModelProto, old: str, new: str, kind: int) -> list[NodeProto]:
    if all(each.name != "wild.at" for each in model.graph.initializer):
        store(model, "wild.at", 1, np.int64)
    return [
        helper.make_node("Neg", [old], [f"{new}.other"]),
        helper.make_node("SequenceConstruct", [f"{new}.other", old], [f"{new}.list"]),
        helper.make_node("SequenceAt", [f"{new}.list", "wild.at"], [new]),
    ]


def through_optional(model: ModelProto, old: str, new: str, kind: int) -> list[NodeProto]:
    return [
        helper.make_node("Optional", [old], [f"{new}.maybe"]),
        helper.make_node("OptionalGetElement", [f"{new}.maybe"], [new]),
    ]


def split_and_joined(model: ModelProto, old: str, new: str, kind: int) -> list[NodeProto]:
    return [
        helper.make_node("SplitToSequence", [old], [f"{new}.list"], axis=0),
        helper.make_node("ConcatFromSequence", [f"{new}.list"], [new], axis=0),
    ]


def sequence_input(model: ModelProto, folder: Path) -> None:
    model.graph.input.append(helper.make_tensor_sequence_value_info("wild.list", TensorProto.FLOAT, None))


def optional_output(model: ModelProto, folder: Path) -> None:
    model.graph.node.append(helper.make_node("Optional", [batch(model)], ["wild.maybe"], name="wild.n"))
    kind = infos(model)[batch(model)].type
    model.graph.output.append(helper.make_value_info("wild.maybe", helper.make_optional_type_proto(kind)))


def sequence_output(model: ModelProto, folder: Path) -> None:
    model.graph.node.append(helper.make_node("SequenceConstruct", [batch(model)], ["wild.list"], name="wild.n"))
    model.graph.output.append(helper.make_tensor_sequence_value_info("wild.list", TensorProto.FLOAT, None))


def unused_of(code: int, count: int, held: int) -> Callable[[ModelProto, Path], None]:
    """A constant of ``count`` elements in ``held`` bytes that nothing reads."""

    def edit(model: ModelProto, folder: Path) -> None:
        model.graph.initializer.append(TensorProto(name="wild.odd", data_type=code, dims=[count], raw_data=bytes(held)))

    return edit


OF_FLOATS = tuple(name for name in NAMES if name != "emb_adamw")
"""Steps whose batch is of floats."""
ONE = np.asarray([1.0])
FORMS = [
    Form("constants as nodes", as_nodes),
    Form("constants as initializers", as_initializers),
    Form("constants filled", filled),
    Form("typed fields", typed_fields),
    Form("one data file", external(lambda k: "step.bin")),
    Form("several data files", external(lambda k: f"part{k % 3}.bin")),
    Form("data in a subfolder", external(lambda k: f"a/b {k % 2}/\u00e9.data")),
    Form("data at offsets", external(lambda k: "step.bin", gap=4096)),
    Form("data at odd offsets", external(lambda k: "step.bin", gap=3)),
    Form("data without lengths", external(lambda k: f"{k}.bin", length=False)),
    Form("data with other keys", external(lambda k: "./step.bin", extra=True)),
    Form("two values at one place", one_place),
    Form("data of a Constant node", bodies_external, refused(4, "wild.node", "external data")),
    Form("sparse initializer", sparse, refused(4, "wild.sparse", "dense")),
    Form("sparse Constant", sparse_constant, refused(4, "wild.node", "dense")),
    Form("texts", texts, refused(4, "'wild.shown'", "strings")),
    Form("input of texts", text_input, refused(4, "'wild.words'", "strings")),
    Form("bfloat16 constant", behind_products(stored_as(16, ONE.astype(ml_dtypes.bfloat16)))),
    Form("float8 e4m3fn constant", behind_products(stored_as(17, ONE.astype(ml_dtypes.float8_e4m3fn)))),
    Form("float8 e4m3fnuz constant", behind_products(stored_as(18, ONE.astype(ml_dtypes.float8_e4m3fnuz)))),
    Form("float8 e5m2 constant", behind_products(stored_as(19, ONE.astype(ml_dtypes.float8_e5m2)))),
    Form("float8 e5m2fnuz constant", behind_products(stored_as(20, ONE.astype(ml_dtypes.float8_e5m2fnuz)))),
    Form("float64 constant", behind_products(stored_as(11, ONE))),
    Form("int4 constant", behind_products(stored_as(22, ONE.astype(ml_dtypes.int4)))),
    Form("uint4 constant", behind_products(stored_as(21, ONE.astype(ml_dtypes.uint4)))),
    Form("quantised int8", behind_products(dequantized(3, np.int8))),
    Form("quantised uint8", behind_products(dequantized(2, np.uint8))),
    Form("quantised int4", behind_products(dequantized(22, ml_dtypes.int4))),
    *(
        Form(f"unused constant of type {code}", unused_of(code, 5, held))
        for code, held in ((14, 40), (15, 80), (23, 3), (24, 5))
    ),
    *(
        Form(f"unused constant of type {code}", unused_of(code, 5, 4), refused(4, "'wild.odd'", f"type {code}"))
        for code in (25, 26, 27, 28, 99)
    ),
    Form("sequences", behind_products(through_sequence)),
    Form("optionals", behind_products(through_optional)),
    Form("split and joined", behind_products(split_and_joined)),
    Form("sequence as input", sequence_input, refused(4, "'wild.list'", "sequence")),
    Form("sequence as output", sequence_output, refused(4, "'wild.list'", "sequence"), OF_FLOATS),
    Form("optional as output", optional_output, refused(4, "'wild.maybe'", "optional")),
]
