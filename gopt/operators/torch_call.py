"""Runs the call of PyTorch in the record of an operator."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from gopt.operators.operator import Attributes, Operator

TYPES = {code: helper.tensor_dtype_to_np_dtype(code).name for code in helper.get_all_tensor_dtypes() if code}
"""Element type of ONNX -> its name in PyTorch."""


class NodeSettings(dict[str, Any]):
    """The attributes of an operator, with the operator set and the number of results of a node."""

    def __init__(self, attributes: Attributes, opset: int, results: int) -> None:
        super().__init__(attributes)
        self.opset, self.results = opset, results


def called(
    record: Operator, torch: Any, operands: Sequence[Any], attributes: Attributes, opset: int, results: int = 1
) -> tuple[Any, ...]:
    """The first ``results`` results by PyTorch, an argument: no import of PyTorch here.

    ``operands``: tensors, None for absent operands; a sequence is a list of tensors. Those at ``record.constants`` are
    Python numbers or lists of numbers, NumPy arrays, or tensors on the CPU (an exponent: a number or a tensor); NumPy
    arrays and tensors cannot be read inside ``torch.compile``. No call reads an element of any further operand, or
    branches on an element, so each is traced with fake tensors as well. ``attributes``: decoded as by
    ``gopt.ir.attributes``; ``opset``: the version of the operator's domain. A result made of no tensor stands on the
    default device, a Shape or a Size on the CPU.
    Raises KeyError for a record without ``torch``.
    """
    if record.torch is None:
        raise KeyError(record.name)
    operands = list(operands)
    while operands and operands[-1] is None:
        operands.pop()
    if isinstance(record.torch, str):
        result = attrgetter(record.torch)(torch)(*operands)
    else:
        result = record.torch(torch, NodeSettings(attributes, opset, results), *operands)
    return result[:results] if isinstance(result, tuple) else (result,)


def numbers(value: Any) -> list[Any]:
    """The numbers of a constant operand, whatever the shape."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return [number for part in value for number in numbers(part)] if isinstance(value, (list, tuple)) else [value]


def number_if_constant(torch: Any, value: Any, rank: int) -> Any:
    """The number in a tensor of the host with a single element, of ``rank`` dimensions at most: a compiler makes much
    faster code for a number. A stand-in in a trace is of another type, and stays."""
    on_host = type(value) is torch.Tensor and value.device.type == "cpu" and value.numel() == 1 and value.ndim <= rank
    return value.item() if on_host and not torch.compiler.is_dynamo_compiling() else value


def tensor_of(torch: Any, proto: TensorProto) -> Any:
    """A tensor of a file, on the default device."""
    array, dtype = np.array(numpy_helper.to_array(proto)), getattr(torch, TYPES[proto.data_type])
    if array.dtype.name not in np.sctypeDict:  # a type that NumPy has not, by the bits
        array = array.view(f"u{array.dtype.itemsize}")
    return torch.from_numpy(array).view(dtype).to(torch.get_default_device())
