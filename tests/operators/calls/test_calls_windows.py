"""Convolutions and pools by PyTorch over drawn windows, compared with gopt's kernels of NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gopt.operators.table import OPERATORS
from gopt.operators.torch_call import called
from gopt.runtime import windows
from gopt.runtime.reference_kernels import REFERENCE_KERNELS

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
KERNELS: dict[str, Callable[..., Any]] = {
    "AveragePool": windows.average_pool, "Conv": windows.conv, "ConvTranspose": windows.conv_transpose,
    "LpPool": windows.lp_pool, "MaxPool": REFERENCE_KERNELS["MaxPool"],
}  # fmt: skip


def drawn(name: str, seed: int) -> tuple[list[np.ndarray], dict[str, Any]] | None:
    """Operands and attributes; None for windows longer than what they slide over."""
    random = np.random.default_rng([seed, *name.encode()])
    rank = int(random.integers(1, 4))
    dims, kernel = random.integers(3, 9, rank), random.integers(1, 4, rank)
    how: dict[str, Any] = {"strides": random.integers(1, 4, rank).tolist()}
    if random.random() < 0.4:
        how["dilations"] = random.integers(1, 3, rank).tolist()
    if random.random() < 0.3:
        how["auto_pad"] = str(random.choice(["SAME_UPPER", "SAME_LOWER", "VALID"]))
    elif random.random() < 0.7:
        top = 3 if "Conv" in name else int(kernel.min())
        how["pads"] = random.integers(0, top, 2 * rank).tolist()
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, how.get("dilations", [1] * rank))]
    if "Conv" not in name and any(far > size for far, size in zip(reach, dims)):
        return None
    if "Pool" in name:
        how["kernel_shape"] = kernel.tolist()
        if random.random() < 0.4 and "auto_pad" not in how:
            how["ceil_mode"] = 1
        if name == "AveragePool" and random.random() < 0.5:
            how["count_include_pad"] = 1
        if name == "MaxPool" and random.random() < 0.3:
            how["storage_order"] = 1
        return [random.standard_normal((2, 3, *dims))], how
    group = int(random.choice([1, 2]))
    how["group"], shape = group, (4, 6 // group) if name == "ConvTranspose" else (6, 4 // group)
    if name == "ConvTranspose" and random.random() < 0.5:
        limits = [max(s, d) for s, d in zip(how["strides"], how.get("dilations", [1] * rank))]
        how["output_padding"] = [int(random.integers(0, limit)) for limit in limits]
    operands = [random.standard_normal((2, 4, *dims)), random.standard_normal((*shape, *kernel))]
    return [*operands, *([random.standard_normal(6)] if random.random() < 0.5 else [])], how


def uses(name: str, count: int) -> Iterator[tuple[list[np.ndarray], dict[str, Any], Any]]:
    for seed in range(count):
        use = drawn(name, seed)
        if use is not None:
            try:
                due = KERNELS[name](*use[0], **use[1])
            except ValueError:
                continue  # a window beyond the padded operand, or a result of negative size
            due = due if isinstance(due, tuple) else (due,)
            if all(each.size for each in due):
                yield *use, due


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_windows_slide_as_the_standard_says(name):
    compared = 0
    for operands, how, due in uses(name, 150):
        found = called(OPERATORS[name], torch, [torch.from_numpy(each) for each in operands], how, 22, len(due))
        for mine, expected in zip(found, due):
            assert tuple(mine.shape) == expected.shape, how
            np.testing.assert_allclose(mine.numpy(), expected, rtol=1e-9, atol=1e-12, err_msg=str(how))
        compared += 1
    assert compared > 60
