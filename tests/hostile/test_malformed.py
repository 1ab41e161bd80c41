"""Whatever onnx's checker refuses, gopt refuses with 3 and one line that names the node or the value."""

from __future__ import annotations

import random
import re
from pathlib import Path

import onnx
import pytest
from fuzz.models import mutated
from helpers import FIXTURES, Builder, perceptron, sgd
from onnx import AttributeProto, ModelProto, helper
from products import spread

from gopt.errors import GoptError, InputError
from gopt.ir.load import load

SMALL = (
    "mlp_sgd",
    "mlp_adamw",
    "mlp_ort_adamw",
    "cnn_sgd",
    "emb_adamw",
    "mlp_muon",
    "mlp_lamb",
    "mlp_adamw_fp16_scaler",
)


def step() -> ModelProto:
    b = Builder()
    sgd(b, perceptron(b, (3, 2)))
    return b.model()


def refused(tmp_path: Path, model: ModelProto, pattern: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match=pattern) as caught:
        load(path)
    assert caught.value.message.isprintable()


def node(model: ModelProto, op_type: str) -> onnx.NodeProto:
    return next(each for each in model.graph.node if each.op_type == op_type)


def twice(model: ModelProto) -> None:
    found = node(model, "Transpose")
    found.attribute.append(AttributeProto(name="perm", type=AttributeProto.INTS, ints=[1, 0]))


def wrong_type(model: ModelProto) -> None:
    node(model, "Transpose").attribute[0].CopyFrom(helper.make_attribute("perm", "01"))


def unknown(model: ModelProto) -> None:
    node(model, "Transpose").op_type = "Transposed"


def no_else(model: ModelProto) -> None:
    found = node(model, "Transpose")
    name = found.output[0]
    body = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["z"])], "b", [], [helper.make_tensor_value_info("z", 1, None)]
    )
    found.CopyFrom(helper.make_node("If", ["x"], [name], name="branch", then_branch=body))


def misfit(model: ModelProto) -> None:
    node(model, "Transpose").attribute[0].ints[:] = [0, 1]


def lying_output(model: ModelProto) -> None:
    next(each for each in model.graph.output if each.name == "w0_out").type.tensor_type.shape.dim[0].dim_value = 7


def lying_type(model: ModelProto) -> None:
    next(each for each in model.graph.output if each.name == "w0_out").type.tensor_type.elem_type = 7


def two_fields(model: ModelProto) -> None:
    model.graph.initializer[0].float_data.append(1.0)


def reference(model: ModelProto) -> None:
    node(model, "Transpose").attribute[0].ref_attr_name = "perm"


def no_name(model: ModelProto) -> None:
    node(model, "Transpose").output[0] = ""


def own(model: ModelProto) -> None:
    found = node(model, "Transpose")
    found.domain, found.op_type = "gopt.spmd", "LocalSlice"
    model.opset_import.add(domain="gopt.spmd", version=1)


def own_in_a_function(model: ModelProto) -> None:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("gopt.spmd", 1)]
    inner = helper.make_node("LocalConcat", ["a"], ["z"], domain="gopt.spmd", name="inside")
    model.functions.append(helper.make_function("user", "F", ["a"], ["z"], [inner], opsets))


def shapeless(model: ModelProto) -> None:
    model.graph.output[0].type.tensor_type.ClearField("shape")


def lying_value(model: ModelProto) -> None:
    name = model.graph.initializer[-1].name
    model.graph.value_info.append(helper.make_tensor_value_info(name, 7, [5]))


@pytest.mark.parametrize(
    ("edit", "pattern"),
    [
        (twice, "Transpose 'n[0-9]+': Attribute 'perm' appeared multiple times"),
        (wrong_type, "Transpose 'n[0-9]+': Mismatched attribute type|n[0-9]+.*perm"),
        (unknown, "Transposed 'n[0-9]+': No Op registered for Transposed"),
        (lambda model: model.opset_import[0].__setattr__("version", 999), "operator set 999 of domain 'ai.onnx'"),
        (lambda model: model.__setattr__("ir_version", 999), "ir_version 999"),
        (no_else, "If 'branch': Required attribute 'else_branch' is missing"),
        (misfit, "node name: n[0-9]+.*(Incompatible dimensions|differ)"),
        (lying_output, "node name: n[0-9]+.*differ in dimension 0"),
        (lying_type, "node name: n[0-9]+.*elem type"),
        (two_fields, "initializer 'w0' holds data in more than one field: float_data and raw_data"),
        (reference, "attribute 'perm' of node 'n[0-9]+' refers to 'perm'"),
        (no_name, "is undefined: node 'n[0-9]+'"),
        (own, r"node 'n[0-9]+': the domain gopt\.spmd is gopt's own"),
        (own_in_a_function, r"node 'inside': the domain gopt\.spmd is gopt's own"),
        (shapeless, "value 'loss': Field 'shape'"),
        (lying_value, "value 'c[0-9]+'"),
    ],
)  # fmt: skip
def test_a_fault_of_each_class_is_refused_by_name(tmp_path, edit, pattern):
    model = step()
    edit(model)
    refused(tmp_path, model, pattern)


def test_nodes_without_a_name_are_named_by_what_they_make(tmp_path):
    model = step()
    twice(model)
    for each in model.graph.node:
        each.ClearField("name")
    refused(tmp_path, model, "Transpose 'v[0-9_]+': Attribute")


def test_large_values_take_no_part_in_the_check_and_their_faults_are_found(tmp_path):
    b = Builder()
    sgd(b, perceptron(b, (300, 200)))
    model = b.model()
    load(b.save(tmp_path / "good.onnx"))
    model.graph.initializer[0].int32_data.append(1)
    refused(tmp_path, model, "initializer 'w0' holds data in more than one field")
    del model.graph.initializer[0].int32_data[:]
    twice(model)
    refused(tmp_path, model, "Attribute 'perm' appeared multiple times")


@pytest.mark.parametrize(("name", "seed"), spread(SMALL, range(4), keep=2))
def test_what_the_checker_refuses_gopt_refuses(tmp_path, name, seed):
    """Mutations of a fixture: never accepted, never another exit code, never without a name."""
    dice = random.Random(f"{name} {seed}")
    base = (FIXTURES / f"{name}.onnx").read_bytes()
    path = tmp_path / "m.onnx"
    for _ in range(12):
        path.write_bytes(mutated(base, dice))
        try:
            load(path)
            said = None
        except GoptError as error:
            said = error
        if isinstance(said, InputError):
            assert _names(said.message, path), said.message
            continue
        onnx.checker.check_model(str(path), full_check=True)


def _names(message: str, path: Path) -> bool:
    """Whether a message names something in quotes, or a node as the checker does, or what concerns the whole file."""
    whole = (
        "ir_version|perator set|pset import|IR version|not an ONNX|truncated|holds no graph|no nodes|names no|text file"
    )
    whole += "|topologically|in initializer|without a name"
    return (
        re.search(rf"'[^']*'|node name: \S|Node ?\(\S+\)|{whole}|topologically", message.removeprefix(str(path)))
        is not None
    )
