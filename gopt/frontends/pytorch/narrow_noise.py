"""Disturbs computations in bfloat16 or float16: kernels sum in other orders there, and round each result."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LAST_PLACE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class NarrowNoise(TorchDispatchMode):
    """Disturbs each new or changed tensor of a narrow type in the last place. ``count``: disturbed results."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.count = 0
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            return result
        several = result if isinstance(result, list | tuple) else [result]
        for value, kind in zip(several, func._schema.returns):
            is_view = kind.alias_info is not None and not kind.alias_info.is_write
            if isinstance(value, torch.Tensor) and value.dtype in LAST_PLACE and not is_view:
                self.count += 1
                noise = torch.randn(value.shape, generator=self._generator) * LAST_PLACE[value.dtype] / 2
                value.mul_(1 + noise)
        return result
