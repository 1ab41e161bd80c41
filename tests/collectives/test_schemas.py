"""The schemas: what the checker and shape inference say agrees with the records."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from gopt.collectives import schemas
from gopt.collectives.messages import MESSAGES
from gopt.collectives.spec import DOMAIN
from gopt.collectives.table import COLLECTIVES
from gopt.errors import GoptError, InputError

F = TensorProto.FLOAT
BUCKET = [("float32", (4, 3)), ("float32", ())]
CASES: list[tuple[str, dict[str, Any], list[list[Any]], list[Any]]] = [
    # operator, attributes, inputs of each member, shapes inferred without knowing the member
    ("AllReduce", {}, [BUCKET] * 2, [(4, 3), ()]),
    ("Reduce", {"root": 1}, [BUCKET] * 2, [(4, 3), ()]),
    ("Broadcast", {"root": 1, "dtype": "float32", "shapes": ["4,3", ""]}, [[], BUCKET], [(4, 3), ()]),
    ("ReduceScatter", {"cuts": [0, 5, 13]}, [BUCKET] * 2, [(None,)]),
    ("ReduceScatter", {"cuts": [0, 6, 12]}, [BUCKET[:1]] * 2, [(6,)]),
    ("ReduceScatter", {"axis": 0, "sizes": [1, 3]}, [BUCKET[:1]] * 2, [(None, 3)]),
    ("AllGather", {"cuts": [0, 5, 13], "shapes": ["4,3", ""]},
     [[("float32", (5,))], [("float32", (8,))]], [(4, 3), ()]),
    ("AllGather", {"axis": 0, "sizes": [4, 1]}, [BUCKET[:1], [("float32", (1, 3))]], [(5, 3)]),
    ("AllToAll", {"split_axis": 1, "concat_axis": 0, "split_sizes": [2, 1], "concat_sizes": [4, 1]},
     [BUCKET[:1], [("float32", (1, 3))]], [(5, None)]),
    ("Send", {"peer": 1, "tag": 0}, [BUCKET], []),
    ("Recv", {"peer": 0, "tag": 0, "dtype": "float32", "shapes": ["4,3", ""]}, [[]], [(4, 3), ()]),
]  # fmt: skip


def model(op: str, attributes: dict[str, Any], inputs: list[Any], outputs: int, code: int = F) -> onnx.ModelProto:
    names = [f"x{place}" for place in range(len(inputs))]
    results = [f"y{place}" for place in range(outputs)]
    node = helper.make_node(op, names, results, domain=DOMAIN, **attributes)
    values = [helper.make_tensor_value_info(n, code, shape) for n, (_, shape) in zip(names, inputs, strict=True)]
    graph = helper.make_graph([node], "g", values, [])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def dimension(size: Any) -> int | str | None:
    """onnx makes up a symbol where a rule leaves a dimension open."""
    if size.HasField("dim_value"):
        return int(size.dim_value)
    return None if size.dim_param.startswith("unk__") else str(size.dim_param)


def inferred(proto: onnx.ModelProto) -> list[tuple[Any, ...]]:
    schemas.register()
    found = {}
    for info in onnx.shape_inference.infer_shapes(proto, strict_mode=True).graph.value_info:
        tensor = info.type.tensor_type
        assert tensor.elem_type == F
        found[info.name] = tuple(dimension(size) for size in tensor.shape.dim)
    return [found[name] for name in sorted(found)]


def test_every_record_is_registered_once() -> None:
    schemas.register()
    schemas.register()
    found = {schema.name: schema for schema in onnx.defs.get_all_schemas() if schema.domain == DOMAIN}
    assert set(found) == {*COLLECTIVES, *MESSAGES}
    for name, schema in found.items():
        record = COLLECTIVES.get(name) or MESSAGES[name]
        assert set(schema.attributes) == {attribute.name for attribute in record.attributes}
        required = {key for key, attribute in schema.attributes.items() if attribute.required}
        assert required == {attribute.name for attribute in record.attributes if attribute.required}
        if name in COLLECTIVES:
            assert schema.min_input == record.min_inputs and schema.min_output == record.min_outputs


@pytest.mark.parametrize("op, attributes, members, shapes", CASES)
def test_inference_agrees_with_the_record(op: str, attributes: Any, members: Any, shapes: list[Any]) -> None:
    attributes = {"group": "shard", **attributes}
    for index, inputs in enumerate(members):
        proto = model(op, attributes, inputs, len(shapes))
        assert inferred(proto) == shapes
        onnx.checker.check_model(proto)
        concrete = COLLECTIVES[op].outputs(attributes, inputs, 2, index)
        for shape, (_, exact) in zip(shapes, concrete, strict=True):
            assert len(shape) == len(exact) and all(a in (None, b) for a, b in zip(shape, exact, strict=True))


def test_symbols_and_unknown_shapes_pass_through() -> None:
    group = {"group": "shard"}
    assert inferred(model("AllReduce", group, [(0, ("batch", 3))], 1)) == [("batch", 3)]
    assert inferred(model("ReduceScatter", group | {"cuts": [0, 8, 16]}, [(0, ("batch", 3))], 1)) == [(8,)]
    assert inferred(model("AllGather", group | {"axis": 0, "sizes": [1, 2]}, [(0, (None, "h"))], 1)) == [(3, "h")]
    assert inferred(model("AllGather", group | {"cuts": [0, 1, 6], "shapes": ["2,3"]}, [(0, None)], 1)) == [(2, 3)]
    assert inferred(model("ReduceScatter", group | {"cuts": [0, 8, 16]}, [(0, None)], 1)) == [(8,)]


def test_the_checker_refuses_what_the_schema_does() -> None:
    schemas.register()
    for attributes in ({}, {"group": "shard", "colour": 1}):
        with pytest.raises(onnx.checker.ValidationError):
            onnx.checker.check_model(model("AllReduce", attributes, BUCKET, 2))


@pytest.mark.parametrize("op, attributes, inputs, outputs", [
    ("ReduceScatter", {"cuts": [0, 9, 5]}, BUCKET, 1),
    ("ReduceScatter", {"cuts": [0, 5]}, BUCKET, 1),
    ("AllReduce", {}, BUCKET, 1),
    ("AllGather", {"axis": 7, "sizes": [1]}, BUCKET[:1], 1),
])  # fmt: skip
def test_inference_refuses_as_the_record_does(op: str, attributes: Any, inputs: Any, outputs: int) -> None:
    with pytest.raises(InputError):
        inferred(model(op, {"group": "shard", **attributes}, inputs, outputs))


def test_every_type_of_a_schema_is_one_that_the_record_takes() -> None:
    schemas.register()
    for name, attributes in (("AllReduce", {}), ("AllGather", {"axis": 0, "sizes": [1, 1]})):
        for text in onnx.defs.get_schema(name, DOMAIN).type_constraints[0].allowed_type_strs:
            word = text.removeprefix("tensor(").removesuffix(")")
            dtype = {"float": "float32", "double": "float64"}.get(word, word)
            code = TensorProto.DataType.Value(word.upper())
            try:
                COLLECTIVES[name].outputs({"group": "tp", **attributes}, [(dtype, (1,))], 2, 0)
            except GoptError:
                assert dtype == "bool"  # takes max and min alone
                continue
            proto = model(name, {"group": "tp", **attributes}, [(dtype, (1,))], 1, code)
            made = onnx.shape_inference.infer_shapes(proto, strict_mode=True).graph.value_info[0]
            assert made.type.tensor_type.elem_type == code
