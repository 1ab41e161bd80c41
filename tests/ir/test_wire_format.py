"""Parts of a file, counted and written as bytes."""

import pytest
from onnx import ModelProto, NodeProto, TensorProto

from gopt import limits
from gopt.errors import InputError
from gopt.ir.wire_format import check_parts, field, renamed


@pytest.mark.parametrize("size", [0, 1, 127, 128, 20_000])
def test_a_field_is_what_protobuf_reads(size):
    name = "n" * size
    model = ModelProto.FromString(field(2, name.encode()))  # producer_name
    assert model.producer_name == name


LONG = "n" * 300


@pytest.mark.parametrize("old", [["a", "", "b"], ["é", LONG], []])
@pytest.mark.parametrize("new", [["a", "", "b"], ["a", ""], ["a", "", "b", "c"], ["é"], [LONG, "a"], []])
def test_a_renamed_node_is_what_protobuf_writes(old, new):
    node = NodeProto(input=old, output=old, name="node", op_type="Sum", doc_string="kept", domain="own")
    data = node.SerializeToString(deterministic=True)
    del node.input[:], node.output[:]
    node.input.extend(new)
    node.output.extend(["z", *new])
    assert renamed(data, new, ["z", *new]) == node.SerializeToString(deterministic=True)


def test_a_node_that_has_the_names_is_the_same_object():
    data = NodeProto(input=["a"], output=["b"], op_type="Relu").SerializeToString(deterministic=True)
    assert renamed(data, ["a"], ["b"]) is data


def test_more_parts_than_the_limit_are_refused(monkeypatch):
    model = ModelProto()
    for _ in range(2000):
        model.graph.node.add()
    data = model.SerializeToString()
    check_parts(data)
    monkeypatch.setattr(limits, "PARTS", 1000)
    with pytest.raises(InputError, match=r"more than 1000 nodes.*\(PARTS\)"):
        check_parts(data)


@pytest.mark.parametrize("packed", [field(7, bytes(12_000)), field(8, bytes(3000))], ids=["floats", "ints"])
def test_long_packed_lists_of_an_attribute_are_refused(packed, monkeypatch):
    model = field(7, field(1, field(5, field(1, b"values") + packed)))
    attribute = ModelProto.FromString(model).graph.node[0].attribute[0]
    assert len(attribute.floats) + len(attribute.ints) == 3000
    check_parts(model)
    monkeypatch.setattr(limits, "LIST_ELEMENTS", 2999)
    with pytest.raises(InputError, match=r"a list of 3000 numbers; at most 2999"):
        check_parts(model)


def test_values_of_a_tensor_are_no_list_of_numbers(monkeypatch):
    model = ModelProto()
    model.graph.initializer.append(TensorProto(name="w", data_type=1, dims=[3000], raw_data=bytes(12_000)))
    monkeypatch.setattr(limits, "LIST_ELEMENTS", 10)
    check_parts(model.SerializeToString())


def test_damaged_bytes_are_left_to_protobuf(monkeypatch):
    monkeypatch.setattr(limits, "PARTS", 1)
    check_parts(b"\x3a\xff\xff\xff\xff")
