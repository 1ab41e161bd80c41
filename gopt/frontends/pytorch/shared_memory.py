"""Tensors sharing memory, where an update of one changes the other: the graph has a value for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.python_values import Path, said
from gopt.frontends.pytorch.states import Place, StateForm
from gopt.text.sanitize import show


def refuse_shared_memory(cells: Sequence[Place], around: Mapping[Path, torch.Tensor]) -> None:
    """Raise UnsupportedError for a written place with memory of another place, or of a tensor kept and read by code
    (``around``). A tied tensor is a single place."""
    tensors = [(cell.name, cell.kind is not StateForm.CONSTANT, cell.read()) for cell in cells if not cell.number]
    tensors += [(said(path), False, value) for path, value in around.items()]
    memory = defaultdict(list)
    for name, written, value in tensors:
        if value is not None and value.numel() and value.layout is torch.strided and not isinstance(value, FakeTensor):
            start = value.untyped_storage().data_ptr() + value.storage_offset() * value.element_size()
            memory[value.untyped_storage().data_ptr()].append((start, start + _extent(value), name, written, value))
    for owners in memory.values():
        for index, (start, end, name, written, value) in enumerate(owners):
            for other_start, other_end, other_name, is_written, its in owners[index + 1 :]:
                if its is not value and (written or is_written) and start < other_end and other_start < end:
                    raise UnsupportedError(
                        f"{show(name)} and {show(other_name)} are two tensors of one memory, and a step writes to it",
                        "tie parameters by one object (a.weight = b.weight); take a copy (clone) where both are apart",
                    )


def _extent(value: torch.Tensor) -> int:
    """Bytes from the first element to behind the last."""
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    return (reach + 1) * value.element_size()
