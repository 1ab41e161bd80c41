"""Operators of no ONNX form are found early. By hand, ``pytest -m torch``."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import export_recipes as recipes  # noqa: E402

from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch import convert  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402


def test_an_operator_of_no_form_is_told_before_the_step_is_converted(tmp_path, monkeypatch):
    """By the name that code has for it, not by that of its parts."""
    monkeypatch.setattr(convert, "_converted", lambda *given: pytest.fail("this takes most of the time"))
    with pytest.raises(UnsupportedError, match=r"ONNX has none of aten\.lgamma"):
        export(recipes.reshaping(lambda y: torch.lgamma(y.abs() + 1)), tmp_path / "step.onnx")


def test_a_view_of_other_strides_is_a_reshape():
    """The exporter traces a step anew, and a convolution's result may have other strides there: PVT v2."""
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.view.default, (graph.placeholder("x"), [8, 16])))
    module, strided = torch.fx.GraphModule({}, graph), torch.arange(128.0).reshape(2, 16, 4).transpose(1, 2)
    with pytest.raises(RuntimeError, match="view"):
        module(strided)
    convert._reshape_views(module)
    assert torch.equal(module(strided), strided.reshape(8, 16))
