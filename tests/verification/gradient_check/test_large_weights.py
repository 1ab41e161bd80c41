"""Large weights in a graph of float64: which stay float32."""

from __future__ import annotations

import onnx.parser
import pytest

from gopt.ir.load import graph_of
from gopt.runtime.widen import widened
from gopt.verification.gradient_check import large_weights
from gopt.verification.gradient_check.large_weights import with_large_weights

READ = {
    "product": ("y = MatMul(x, w) g = MatMul(xt, y)", True),
    "of the other side": ("u = MatMul(wt, xt) y = Identity(u) g = MatMul(xt, x)", False),
    "turned": ("y = Gemm<transB=1>(x, w) p = MatMul(xt, y) g = Transpose<perm=[1, 0]>(p)", True),
    "squared too": ("y = MatMul(x, w) s = Mul(w, w) g = MatMul(xt, y)", False),
    "product with itself": ("y = MatMul(w, w) g = MatMul(xt, x)", False),
    "gradient that is read": ("y = MatMul(x, w) g = MatMul(xt, y) z = Neg(g)", False),
    "gradient of another sort": ("y = MatMul(x, w) p = MatMul(xt, y) g = Neg(p)", False),
    "product with another": ("y = MatMul(v, w) g = MatMul(xt, y)", False),
    "added": ("p = MatMul(x, xt) y = Gemm(x, xt, w) g = MatMul(xt, y)", False),
}


@pytest.mark.parametrize("kind", READ)
def test_weights_that_products_alone_read_stay_float32(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(large_weights, "LARGE", 16)
    text, stays = READ[kind]
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]>
        f (float[4,4] x, float[4,4] w, float[4,4] v) => (float loss, float[4,4] g) {{
        xt = Transpose<perm=[1, 0]>(x) {"wt = Transpose(w)" if "wt" in text else ""} {text}
        loss = ReduceMean<keepdims=0>(y) }}"""
    )
    graph = graph_of(onnx.shape_inference.infer_shapes(model))
    made, names = with_large_weights(widened(graph, "float64"), graph, {"w": "g", "v": "x"}, ["loss"])
    assert names == ({"w"} if stays else set())
    assert (made.types["g"].dtype == "float32") is stays
    assert not stays or made.nodes[-1].outputs == ["g"], "last: it is not held while others are computed"
