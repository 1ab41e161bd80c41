"""Ranks whose operands have shapes that their operators do not take run nowhere, and are not proven."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import FIXTURES, edit_ranks
from onnx import ModelProto, NodeProto, helper, numpy_helper
from onnx.shape_inference import infer_shapes

import gopt
from gopt.collectives.messages import MESSAGES
from gopt.collectives.spec import VERSION
from gopt.collectives.table import COLLECTIVES
from gopt.errors import InputError
from gopt.ir.graph import COMM
from gopt.verification.proof import operators

OPERANDS = {"ReduceSum": 1, "Slice": 1}
"""Operator -> the operand that has one dimension more."""


def viewed(op_type: str, place: int):
    """Give an operand one dimension more."""

    def edit(model: ModelProto) -> None:
        model.CopyFrom(infer_shapes(model))  # types of all values behind it
        graph = model.graph
        types = {each.name: each.type.tensor_type for each in (*graph.input, *graph.value_info)}
        dims = {name: [each.dim_value for each in type.shape.dim] for name, type in types.items()}
        dims |= {each.name: list(each.dims) for each in graph.initializer}
        nodes = [NodeProto.FromString(each.SerializeToString()) for each in graph.node]
        at = next(at for at, node in enumerate(nodes) if node.op_type == op_type and all(dims[node.input[place]]))
        new = np.array([*dims[nodes[at].input[place]], 1], np.int64)
        graph.initializer.append(numpy_helper.from_array(new, "other"))
        view = helper.make_node("Reshape", [nodes[at].input[place], "other"], ["viewed"])
        nodes[at].input[place] = "viewed"
        del graph.node[:]
        graph.node.extend([*nodes[:at], view, *nodes[at:]])

    return edit


@pytest.mark.parametrize("op_type", OPERANDS)
def test_an_operand_in_a_shape_that_the_operator_does_not_take_is_refused(
    op_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = tmp_path / "ranks", tmp_path / "certificate"
    gopt.shard(FIXTURES / "mlp_adamw.onnx", 2).write(folder)
    edit_ranks(folder, viewed(op_type, OPERANDS[op_type]))
    with pytest.raises(InputError, match=rf"{op_type} .* does not fit its operands: their shapes are "):
        gopt.prove(folder)
    monkeypatch.setattr(operators, "misfit", lambda *_: "")  # as a prover that does not look
    assert gopt.prove(folder, certificate=file).proven
    fault = gopt.check_certificate(file, folder).fault
    assert fault is not None and f"{op_type}: their shapes are" in str(fault)


def test_a_node_behind_calls_is_checked_by_onnx_also_if_nothing_reads_it(tmp_path: Path) -> None:
    """onnx's checker says nothing of nodes behind an operator that it does not know."""
    folder = tmp_path / "ranks"
    gopt.shard(FIXTURES / "mlp_adamw.onnx", 2).write(folder)

    def edit(model: ModelProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 3), np.float32), "table"))
        model.graph.node.append(helper.make_node("MatMul", ["table", "table"], ["unread"]))

    edit_ranks(folder, edit)
    for name in {*COLLECTIVES, *MESSAGES}:
        if onnx.defs.has(name, COMM):  # as in a process that begins
            onnx.defs.deregister_schema(name, VERSION, COMM)
    with pytest.raises(InputError, match=r"is not a valid ONNX model.*MatMul"):
        gopt.prove(folder)
