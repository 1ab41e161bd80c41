"""Tensors for numbers of Python: ``x += 1`` makes a new tensor, and holders of the old tensor keep it."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Tensor = torch.Tensor
AUGMENTED = {
    Tensor.add_: operator.add, Tensor.sub_: operator.sub, Tensor.mul_: operator.mul, Tensor.div_: operator.truediv,
    Tensor.floor_divide_: operator.floordiv, Tensor.pow_: operator.pow, Tensor.remainder_: operator.mod,
}  # fmt: skip
"""Methods of a tensor that Python calls for ``+=`` and the like."""


class PythonNumbers(TorchFunctionMode):
    """Answers in-place operators on ``numbers``, and on their results, by new tensors."""

    def __init__(self, numbers: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._numbers = {id(number): number for number in numbers}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in AUGMENTED and id(args[0]) in self._numbers:
            result = AUGMENTED[function](*args)
            self._numbers[id(result)] = result  # kept, so that its id stays its own
            return result
        return function(*args, **(kwargs or {}))
