"""The part of CUDA's runtime needed by a rank: memory, streams, events. The only file that imports CUDA's bindings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from gopt.errors import RunError

Dtype: TypeAlias = np.dtype[Any]

INSTALL = (
    "it needs an NVIDIA driver, CUDA 13 and cuDNN 9: pip install 'gopt[nccl]' 'onnxruntime-gpu[cuda,cudnn]'",
    "--engine mpi runs on the CPU",
)


def bindings() -> Any:
    """Return the module cuda.bindings.runtime; raises RunError if missing."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise RunError(f"CUDA cannot be used: {error}", *INSTALL) from error
    return runtime


class Cuda:
    """CUDA's runtime, with error codes raised. Raises RunError where a call fails, and where there is no GPU."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self.count = int(self("cudaGetDeviceCount"))
        if self.count < 1:
            raise RunError("this machine has no GPU", *INSTALL)

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Make one call, and return the only result, or None."""
        code, *results = getattr(self._api, name)(*arguments)
        if int(code):
            text = self._api.cudaGetErrorString(code)[1].decode()
            raise RunError(f"the GPU cannot be used: {name}: {text}", *INSTALL)
        return results[0] if results else None

    def kind(self, name: str) -> Any:
        return getattr(self._api.cudaMemcpyKind, f"cudaMemcpy{name}")

    def stream(self) -> int:
        return int(self("cudaStreamCreateWithFlags", self._api.cudaStreamNonBlocking))

    def event(self, stream: int) -> Event:
        """Record an event behind all work queued on a stream so far."""
        handle = self("cudaEventCreateWithFlags", self._api.cudaEventDisableTiming)
        event = Event(self._api.cudaEventDestroy, handle)
        self("cudaEventRecord", event.handle, stream)
        return event

    def finished(self, event: Event) -> bool:
        """Return whether all work before an event is done. Also true after an error, reported by the next call."""
        return bool(self._api.cudaEventQuery(event.handle)[0] != self._api.cudaError_t.cudaErrorNotReady)


class Event:
    """A position in a stream. The event is destroyed with the last reference; CUDA allows this while other streams
    still wait."""

    __slots__ = ("_destroy", "handle")

    def __init__(self, destroy: Any, handle: Any) -> None:
        self._destroy, self.handle = destroy, handle

    def __del__(self) -> None:
        self._destroy(self.handle)  # a failure while the process ends is ignored


class Memory:
    """Memory of the GPU. A block of a pool returns to the pool with the last reference."""

    __slots__ = ("_pool", "nbytes", "pointer", "value")

    def __init__(self, value: Any, nbytes: int, pool: list[Any] | None = None) -> None:
        self.value, self.nbytes, self._pool = value, nbytes, pool
        self.pointer: int = value.data_ptr()

    def __del__(self) -> None:
        if self._pool is not None:
            self._pool.append(self.value)


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """A contiguous tensor in the GPU's memory, ``offset`` bytes into the memory."""

    memory: Memory
    offset: int
    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def pointer(self) -> int:
        return self.memory.pointer + self.offset

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def part(self, start: int, shape: Sequence[int]) -> DeviceBlock:
        """The elements from ``start`` on, as a tensor of this shape. The tensor may reach beyond the block, within the
        block's memory."""
        return DeviceBlock(self.memory, self.offset + start * self.dtype.itemsize, self.dtype, tuple(shape))

    def bits(self) -> DeviceBlock:
        """The same memory as a flat block of bytes."""
        return DeviceBlock(self.memory, self.offset, np.dtype(np.uint8), (self.nbytes,))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # Without a stream: gopt orders the work itself.
        return {
            "data": (self.pointer, False), "shape": self.shape, "typestr": self.dtype.str, "strides": None,
            "version": 3,
        }  # fmt: skip
