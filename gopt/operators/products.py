"""Products, convolutions, layers over time: the work of a step."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from gopt.operators.calls import attention, recurrent, windows
from gopt.operators.dims import products as dims
from gopt.operators.operator import Attributes, Operator, Shape, Slope

NONE, STEP, LINEAR, AFFINE, BENT, CURVED = Slope


def _of_matrices(attributes: Attributes, operands: Sequence[Shape], out: Shape) -> int:
    a = operands[0]
    return prod(out) * (a[0 if attributes.get("transA", 0) else -1] if a else 1)


def _of_windows(attributes: Attributes, operands: Sequence[Shape], out: Shape) -> int:
    return prod(out) * prod(operands[1][1:])


def _of_spread_windows(attributes: Attributes, operands: Sequence[Shape], out: Shape) -> int:
    return prod(operands[0]) * prod(operands[1][1:])


def _of_equation(attributes: Attributes, operands: Sequence[Shape], out: Shape) -> int:
    """The product of all dimensions named by an equation of two terms; 0 unless all are named."""
    equation = str(attributes.get("equation", "")).replace(" ", "")
    terms = equation.partition("->")[0].split(",")
    if len(terms) != 2 or "." in equation:
        return 0
    return prod(dict(zip("".join(terms), (*operands[0], *operands[1]))).values())


def _gemm(torch: Any, attributes: Attributes, rows: Any, columns: Any, bias: Any = None) -> Any:
    rows, columns = (x.mT if attributes.get(f"trans{side}", 0) else x for side, x in (("A", rows), ("B", columns)))
    scale, share = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
    if bias is None:
        return rows @ columns if scale == 1 else scale * (rows @ columns)
    return torch.addmm(bias, rows, columns, beta=share if share != 1 else 1, alpha=scale if scale != 1 else 1)


_BIASED = (1, 1, 0)
OPERATORS = (
    Operator(
        "MatMul", (LINEAR,), factors=(1,), zero=True, total=True, work=_of_matrices, dims=dims.matmul, torch="matmul"
    ),
    Operator(
        "Gemm", (AFFINE,), factors=_BIASED, scale="alpha", total=True, work=_of_matrices, dims=dims.gemm, torch=_gemm
    ),
    Operator(
        "Einsum", (LINEAR,), factors=(1,), zero=True, total=True, work=_of_equation, dims=dims.einsum,
        torch=lambda t, a, *xs: t.einsum(a["equation"], *xs),
    ),
    Operator(
        "Conv", (AFFINE,), factors=_BIASED, total=True, work=_of_windows, dims=dims.convolution,
        torch=windows.convolution,
    ),
    Operator(
        "ConvTranspose", (AFFINE,), factors=_BIASED, total=True, work=_of_spread_windows, dims=dims.convolution,
        torch=windows.transposed_convolution,
    ),
    Operator(
        "Attention", (CURVED, CURVED, AFFINE, CURVED, CURVED, AFFINE), aside=(3, 4, 5), dims=dims.attention,
        torch=attention.attention,
    ),
    Operator(
        "RotaryEmbedding", (LINEAR, AFFINE, AFFINE), zero=True, aside=(1, 2), dims=dims.rotary,
        torch=attention.rotary,
    ),
    Operator("RNN", (CURVED,), aside=(5,), torch=recurrent.rnn),
    Operator("GRU", (CURVED,), aside=(5,), torch=recurrent.gru),
    Operator("LSTM", (CURVED,), aside=(5, 6), torch=recurrent.lstm),
    Operator("STFT", aside=(2,), settings=(1, 3), torch=windows.frames),
    Operator("CausalConvWithState", aside=(3,), torch=windows.causal_convolution),
    Operator("LinearAttention", aside=(3,), torch=attention.linear),
)  # fmt: skip
