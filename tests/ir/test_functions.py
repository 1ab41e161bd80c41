"""How far functions of a model may expand."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from model_files import function, refusal, save, small, value
from onnx import helper

from gopt.errors import InputError
from gopt.ir.load import load
from gopt.ir.types import TensorType


def test_functions_stay_in_the_header_and_are_inferred_through(tmp_path: Path) -> None:
    call = helper.make_node("Twice", ["x"], ["y"], domain="user")
    model = small(nodes=[call], functions=[function("Twice", "Relu")], outputs=[value("y", ("N", "M"))])
    graph = load(save(tmp_path, model))
    assert [f.name for f in graph.header.functions] == ["Twice"]
    assert graph.types["y"] == TensorType("float32", ("N", 3))


@pytest.mark.parametrize(("levels", "limit"), [(60, "FUNCTION_NODES"), (18, "FUNCTION_NODES")])
def test_functions_that_double_at_each_level_are_counted_and_refused(tmp_path: Path, levels: int, limit: str) -> None:
    doubling = [function("F0", "Relu"), *(function(f"F{i}", f"F{i - 1}", "user") for i in range(1, levels))]
    call = helper.make_node(f"F{levels - 1}", ["x"], ["y"], domain="user")
    refusal(load, save(tmp_path, small(nodes=[call], functions=doubling)), InputError, limit)


def test_functions_that_call_one_another_too_deep_are_refused(tmp_path: Path) -> None:
    def calling(place: int) -> onnx.FunctionProto:
        made = function(f"F{place}", f"F{place - 1}" if place else "Relu", "user" if place else "")
        del made.node[1]
        made.node[0].output[0] = "z"
        return made

    call = helper.make_node("F120", ["x"], ["y"], domain="user")
    model = small(nodes=[call], functions=[calling(place) for place in range(121)])
    refusal(load, save(tmp_path, model), InputError, "FUNCTION_DEPTH")


def test_functions_that_call_themselves(tmp_path: Path) -> None:
    functions = [function("Ping", "Pong", "user"), function("Pong", "Ping", "user")]
    call = helper.make_node("Ping", ["x"], ["y"], domain="user")
    refusal(load, save(tmp_path, small(nodes=[call], functions=functions)), InputError, "function 'P.ng' calls itself")
