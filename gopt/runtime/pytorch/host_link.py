"""Copies between the memory of a GPU and pinned memory of the host, on a stream of their own."""

from __future__ import annotations

from typing import Protocol

import torch


class HostLink(Protocol):
    """A way between the memory of a device and of the host. A copy returns at once, and may still be on its way."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy of a tensor of the device."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy of a tensor of the host."""

    def arrive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the device, for work that is launched from now on."""

    def settle(self) -> None:
        """Wait for all copies, before the host reads or writes tensors."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in memory of the host, for many copies from there."""


class PinnedLink:
    """The link of a GPU of CUDA. All copies run in order on one stream; a tensor of the device is read once the copies
    that it comes from are done."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._events: dict[int, torch.cuda.Event] = {}
        """Address of a tensor of the device -> the end of the copy."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            result = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            result.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return result

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor if tensor.is_pinned() else tensor.pin_memory()
        with torch.cuda.stream(self._stream):
            result = tensor.to(self._device, non_blocking=True)
        result.record_stream(torch.cuda.current_stream(self._device))
        self._events[result.data_ptr()] = self._stream.record_event()
        return result

    def arrive(self, tensor: torch.Tensor) -> torch.Tensor:
        event = self._events.pop(tensor.data_ptr(), None)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        return tensor

    def settle(self) -> None:
        self._stream.synchronize()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
