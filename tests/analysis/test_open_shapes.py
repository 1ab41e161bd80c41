"""A parameter of an open shape is refused by name, whatever shapes its new value has; a batch of one is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import ModelProto, ValueInfoProto
from written_steps import NET, Written, saved, sgd

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.errors import UnsupportedError


def opened(*symbols: str, value: bool, place: int = 0) -> ModelProto:
    """A step whose parameter ``w0``, and ``w0_out``, are declared with a symbol; '' for a number."""
    model = Written(NET + sgd()).model()
    for values, name, symbol in zip((model.graph.input, model.graph.output), ("w0", "w0_out"), symbols, strict=True):
        info: ValueInfoProto = next(each for each in values if each.name == name)
        if symbol:
            info.type.tensor_type.shape.dim[place].dim_param = symbol
    kept = [each for each in model.graph.initializer if value or each.name != "w0"]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model


@pytest.mark.parametrize("value", [True, False], ids=["stored", "fed"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("symbols", [("N", ""), ("N", "N"), ("N", "M")], ids="-".join)
def test_a_parameter_of_an_open_shape_is_refused(
    symbols: tuple[str, str], place: int, value: bool, tmp_path: Path
) -> None:
    path = saved(opened(*symbols, value=value, place=place), tmp_path)
    with pytest.raises(UnsupportedError, match="'w0' has the dynamic shape") as refused:
        gopt.load(path)
    assert refused.value.hints[-1] == "if it is fed, say --batch w0"
    assert ("its stored value is float32[3,5]" in refused.value.hints[0]) is value


def test_a_new_value_of_an_open_shape_is_one(tmp_path: Path) -> None:
    assert gopt.load(saved(opened("", "N", value=True), tmp_path)).training.gradients["w0"] == "gw0"


def test_what_the_user_calls_a_batch_is_one(tmp_path: Path) -> None:
    path = saved(opened("N", "M", value=False), tmp_path)
    assert "w0" in gopt.load(path, roles=RoleMap(batch=("w0",))).training.batch


def test_a_batch_of_an_open_shape_is_none(tmp_path: Path) -> None:
    model = Written(NET + sgd()).model()
    for info in model.graph.input[:2]:
        info.type.tensor_type.shape.dim[0].dim_param = "N"
    assert gopt.load(saved(model, tmp_path)).training.batch == ["x", "y"]
