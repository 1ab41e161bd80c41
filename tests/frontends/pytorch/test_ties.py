"""Equal values at the end of what a TopK takes are told where an export differs from eager PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

import gopt
from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.ties import ties
from gopt.ir.load import load


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize(
    "rows", [[[1, 2, 2, 3], [4, 2, 2, 9]], [[1, 1, 2, 3], [4, 9, 2, 9]], [[5, 5, 5, 5], [1, 2, 3, 4]]]
)
def test_rows_with_equal_values_at_the_end(largest, rows, tmp_path):
    """Three of the largest, or of the smallest: what is equal among those that are taken is no tie."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 20]>
    g (float[2, 4] x) => (float[2, 3] y, int64[2, 3] at) {{
      three = Constant<value = int64[1] {{3}}>()
      twice = Add(x, x)
      y, at = TopK<axis = 1, largest = {largest}>(twice, three)
    }}""")
    onnx.save(model, tmp_path / "step.onnx")
    values = np.float32(rows)
    ordered = np.sort(values if not largest else -values, 1)
    count = int((ordered[:, 2] == ordered[:, 3]).sum())
    found = list(ties(load(tmp_path / "step.onnx"), {"x": values}))
    assert len(found) == bool(count) and all(each.startswith(f"{count} of 2 rows of 'twice'") for each in found)


@pytest.mark.torch
def test_a_router_that_begins_with_zeros(tmp_path):
    """AFMoE of transformers: PyTorch takes other experts than ONNX's TopK, and the hint told of a wrong operator."""
    torch = pytest.importorskip("torch")

    class Router(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = torch.nn.Linear(3, 4, bias=False), torch.nn.Parameter(torch.randn(4, 3, 2))
            torch.nn.init.zeros_(self.gate.weight)

        def forward(self, x):
            scores, at = torch.topk(torch.sigmoid(self.gate(x)), 2, dim=1)
            return (scores[..., None] * torch.einsum("ni,nkij->nkj", x, self.experts[at])).sum(1)

    def recipe():
        torch.manual_seed(0)
        net = Router()
        batch = torch.randn(6, 3), torch.randn(6, 2)
        return net, torch.nn.functional.mse_loss, torch.optim.SGD(net.parameters(), 0.1), batch

    with pytest.raises(UnsupportedError, match="not the eager one") as refused:
        gopt.export(recipe, tmp_path / "step.onnx")
    assert "6 of 6 rows" in refused.value.hints[0] and "top 2" in refused.value.hints[0]
