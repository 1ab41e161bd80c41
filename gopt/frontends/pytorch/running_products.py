"""Running products, which have no ONNX form at the opset of an export, as products of ever longer runs.

The gradient follows these products: exact where factors are zero, and without the values that PyTorch's looks at.
"""

from __future__ import annotations

from typing import Any

import torch

OPERATOR = torch.ops.aten.cumprod.default


def cumprod(x: Any, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Each element times all before it: after each round, the products of twice as many."""
    x = x.to(dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64))
    count, run = x.shape[dim] if x.dim() else 1, 1
    while run < count:
        longer = x.narrow(dim, run, count - run) * x.narrow(dim, 0, count - run)
        x, run = torch.cat([x.narrow(dim, 0, run), longer], dim), 2 * run
    return x if run > 1 else x.clone()


def cumprod_in_place(x: Any, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    return x.copy_(cumprod(x.clone(), dim, dtype=dtype))


for operator, form in ((OPERATOR, cumprod), (torch.ops.aten.cumprod_.default, cumprod_in_place)):
    if torch._C.DispatchKey.Autograd not in operator.py_kernels:  # read in a trace alone, as torch._decomp's are
        operator.py_impl(torch._C.DispatchKey.Autograd)(form)
