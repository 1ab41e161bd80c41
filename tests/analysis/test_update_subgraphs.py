"""Metrics of an update that read a rank's own batch: each rank shows its own, and the update stays right."""

from __future__ import annotations

import pytest
from products import spread
from written_steps import MOMENTS, MOMENTUM, NET, Written, hold_ranks, sgd

SCALAR = {"shown": ("float", ())}
WIDE = {"z": ("float", (3, 5))}
READ = NET.replace(
    "loss = ReduceMean<keepdims = 0>(square)",
    "of_z = ReduceSum<keepdims = 0>(z)\n  nothing = Mul(of_z, zero)\n  mean = ReduceMean<keepdims = 0>(square)\n"
    "  loss = Add(mean, nothing)",
)
METRICS = {
    "new parameter and batch": Written(
        NET + sgd() + "  p = MatMul(x, w0_out)\n  shown = ReduceMean<keepdims = 0>(p)\n", shown=SCALAR
    ),
    "activation and new bias": Written(
        NET + sgd() + "  p = Add(h, b0_out)\n  shown = ReduceSum<keepdims = 0>(p)\n", shown=SCALAR
    ),
    "gradient over loss": Written(
        NET + sgd() + "  p = Div(gw0, loss)\n  shown = ReduceL1<keepdims = 0>(p)\n", shown=SCALAR
    ),
    "element by element": Written(
        READ + MOMENTUM + "  e = Exp(z)\n  p = Mul(w0_m_out, e)\n  shown = ReduceL2<keepdims = 0>(p)\n",
        MOMENTS, SCALAR, WIDE,
    ),
    "behind one another": Written(
        READ + MOMENTUM + "  e = Exp(z)\n  p = Mul(w0_m_out, e)\n  q = MatMul(x, p)\n"
        "  r = Mul(q, h)\n  shown = ReduceSum<keepdims = 0>(r)\n", MOMENTS, SCALAR, WIDE,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "stage"), spread(METRICS, (2, 3), (0, 1, 2, 3)))
def test_a_metric_beside_a_ranks_own_batch(name, ranks, stage, tmp_path):
    hold_ranks(METRICS[name], tmp_path, ranks, stage)
