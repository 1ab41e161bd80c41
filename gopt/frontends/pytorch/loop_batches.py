"""Batches and numbers of a loop of the user, for the inputs of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.ir.types import TensorType, numpy_dtype
from gopt.runtime.pytorch.tensors import array_dtype, tensor_over, torch_dtype
from gopt.runtime.training.fitted_arrays import check_kind, class_of, sized
from gopt.runtime.training.schedules import USABLE, usable
from gopt.text.sanitize import listed

Batch = Mapping[str, Any] | Sequence[Any]


def fitted_batch(
    batch: Batch, types: Mapping[str, TensorType], names: Sequence[str], device: torch.device
) -> tuple[dict[str, TensorType], dict[str, torch.Tensor]]:
    """The types of a batch's inputs, with open dimensions at the batch's sizes, and the tensors on the device.

    ``batch``: by the names of the inputs, or the inputs ``names`` in order; a single tensor is the only input. Raises
    InputError for a batch that does not fit."""
    if not isinstance(batch, Mapping):
        values = batch if isinstance(batch, (list, tuple)) else (batch,)
        if len(values) != len(names):
            count = f"{len(values)} value{'' if len(values) == 1 else 's'}"
            raise InputError(f"the batch has {count}", f"the step takes {listed(names)}")
        batch = dict(zip(names, values))
    if unknown := [name for name in batch if name not in types]:
        raise InputError(f"the step has no batch input {str(unknown[0])!r}", f"it takes {listed(names)}")
    if missing := [name for name in names if name not in batch]:
        raise InputError(f"the batch has no {missing[0]!r}", f"the step takes {listed(names)}")
    tensors = {name: _tensor(name, types[name], value) for name, value in batch.items()}
    fitted = sized(types, tensors)
    for name, tensor in tensors.items():
        _check(name, fitted[name], tensor)
    return fitted, {
        name: tensor.to(device, torch_dtype(numpy_dtype(types[name].dtype)), non_blocking=True)
        for name, tensor in tensors.items()
    }


def number(name: str, type: TensorType, value: Any, device: torch.device) -> torch.Tensor:
    """The value of a hyper-parameter on the device. Raises OptionError for another thing than a usable number."""
    dtype = torch_dtype(numpy_dtype(type.dtype))
    if isinstance(value, int | float) and not usable(value):
        raise OptionError(f"{name!r} is {value:g}", USABLE)
    try:
        return torch.as_tensor(value, dtype=dtype, device=device).detach().reshape(type.dims)
    except (TypeError, ValueError, RuntimeError):
        text = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]
        raise OptionError(f"{name!r} is {text}, the step takes {type}", f"call step(batch, {name}=1e-3)") from None


def _tensor(name: str, type: TensorType, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    try:
        return tensor_over(np.asarray(value))
    except (TypeError, ValueError, UnsupportedError):
        raise InputError(
            f"the batch's {name!r} is no tensor and no array of numbers: {class_of(value)}", f"the step takes {type}"
        ) from None


def _check(name: str, type: TensorType, tensor: torch.Tensor) -> None:
    if not TensorType(type.dtype, tuple(tensor.shape)).may_have_shape_of(type):
        hints = [f"the step takes {type}"]
        if tensor.dim() and type.shape and tensor.shape[1:] == type.shape[1:] and len(tensor) < type.dims[0]:
            hints.append(
                "leave out a short last batch: DataLoader(..., drop_last=True); or export with --dynamic batch"
            )
        raise InputError(f"the batch's {name!r} has shape {list(tensor.shape)}", *hints)
    check_kind(f"the batch's {name!r}", type, array_dtype(tensor.dtype))
