"""A GPU as the device of a rank.

The GPU has two streams: *compute* for sessions, *communication* for everything that belongs to calls. Work on one
stream runs in queued order; the host waits for neither stream. Memory without references here can be reused at once, if
the compute stream first waits for the communication stream's work on it: ``Gpu.order``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from io import StringIO
from typing import Any

import numpy as np
import onnx

from gopt.collectives.layout import ALIGN as SHARD
from gopt.errors import RunError, UnsupportedError
from gopt.ir.graph import COMM, Graph
from gopt.ir.types import TensorType, dtype_code, known, numpy_dtype
from gopt.runtime import session
from gopt.runtime.device import WithoutHost
from gopt.runtime.engines.cuda import INSTALL, Cuda, DeviceBlock, Dtype, Event, Memory
from gopt.runtime.host_value import array_dtype
from gopt.runtime.partition import Segment
from gopt.runtime.planner.assignment import BufferAssignment, MemberIndex
from gopt.runtime.planner.buffer_assignment import packed_inputs
from gopt.runtime.planner.buffers import Buffers
from gopt.runtime.runtime_errors import node_error
from gopt.runtime.session import Array, SessionCache
from gopt.runtime.shared_memory import SharedMemory
from gopt.runtime.tuning.tuning import NO_TUNING

PROVIDER = "CUDAExecutionProvider"
ALIGN = 16
"""Bytes to which values for sessions are to be aligned: the widest load of a kernel."""
_GRAIN = 512
"""Bytes to which memory is rounded up, so that it is more often of use again."""


class Sessions(SessionCache):
    """Sessions of ONNX Runtime's CUDA provider. The sessions' work is queued on one stream, and the host does not
    wait."""

    def __init__(self, index: int, stream: int) -> None:
        super().__init__()
        self._options = {
            "device_id": str(index), "user_compute_stream": str(stream),
            "use_tf32": "0",  # float32 is float32
            "cudnn_conv_algo_search": "HEURISTIC",  # timing kernels gives other results each time
        }  # fmt: skip

    def build(self, model: bytes, *, empty: bool = False) -> Any:
        providers = [(PROVIDER, self._options), session.CPU]
        built = session.make_session(model, providers, empty=empty, enable_fallback=0)
        # It says so in its log only, when the provider cannot be loaded. Single operators without a kernel for the
        # GPU still run on the CPU, and so do shapes.
        if built.get_providers()[0] != PROVIDER:
            raise RunError("ONNX Runtime fell back to the CPU: its CUDA provider cannot be loaded", *INSTALL)
        return built


class GpuSegment:
    """A segment on the GPU. Results of known shape are bound to free memory; ONNX Runtime allocates the others."""

    overwrites: frozenset[str] = frozenset()

    def __init__(
        self, gpu: Gpu, segment: Segment, session: tuple[tuple[str, ...], Any], buffers: Mapping[str, DeviceBlock],
        types: Mapping[str, TensorType],
    ) -> None:  # fmt: skip
        self.outputs = segment.outputs
        self.title = segment.title
        self.inputs, self._session = session
        self._gpu = gpu
        self._buffers = {name: buffers[name] for name in self.outputs if name in buffers}
        known_types = {name: types[name] for name in self.outputs if name in types and known(types[name].dtype)}
        self._types = {name: type for name, type in known_types.items() if type.static}

    def run(self, values: Mapping[str, DeviceBlock]) -> dict[str, DeviceBlock]:
        inputs = {name: values[name] for name in self.inputs}
        targets = {
            name: self._buffers[name] if name in self._buffers else self._gpu.empty(type.dims, numpy_dtype(type.dtype))
            for name, type in self._types.items()
        }
        with self._gpu.guard():
            results = self._gpu.run(self._session, inputs, targets, self.outputs)
        return dict(zip(self.outputs, results, strict=True))


class Gpu(WithoutHost):
    """One GPU: a Device. Values and views are Blocks.

    Operators on float16 and bfloat16 run as in the CUDA provider, with each result rounded; nothing is emulated.
    ``guard`` is the watchdog over waits of the host."""

    emulates_half = False
    tuning = NO_TUNING

    def __init__(self, cuda: Cuda, index: int) -> None:
        self.cuda, self.index = cuda, index
        self.guard: Callable[[], AbstractContextManager[Any]] = nullcontext
        cuda("cudaSetDevice", index)
        ort = session.runtime()
        ort.set_default_logger_severity(4)
        with redirect_stdout(StringIO()):  # it prints which libraries it does not find, also those that the system has
            ort.preload_dlls()
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._pool: dict[int, list[Any]] = {}
        self._memory = ort.OrtValue.ortvalue_from_shape_and_type
        try:
            self.empty((1,), np.dtype(np.uint8))
        except RuntimeError as error:
            raise RunError(f"ONNX Runtime cannot use the GPU: {_last_line(error)}", *INSTALL) from error
        self.compute_stream, self.comm_stream = cuda.stream(), cuda.stream()

    # --- memory ---

    def empty(self, shape: Sequence[int], dtype: Dtype, beyond: int = 0) -> DeviceBlock:
        """Allocate a tensor with undefined values, and memory for ``beyond`` elements behind it.

        The compute stream may use the tensor at once, the communication stream after a wait for the compute stream."""
        needed = (math.prod(shape) + beyond) * dtype.itemsize
        nbytes = max(-(-needed // _GRAIN), 1) * _GRAIN
        free = self._pool.setdefault(nbytes, [])
        value = free.pop() if free else self._memory([nbytes], np.uint8, "cuda", self.index)
        return DeviceBlock(Memory(value, nbytes, free), 0, dtype, tuple(shape))

    def copy(self, target: DeviceBlock, source: DeviceBlock, stream: int) -> None:
        """Copy the bytes of ``source`` to the beginning of ``target``."""
        if source.nbytes:
            kind = self.cuda.kind("DeviceToDevice")
            self.cuda("cudaMemcpyAsync", target.pointer, source.pointer, source.nbytes, kind, stream)

    def copy_rows(
        self, target: DeviceBlock, step: int, source: DeviceBlock, stride: int, width: int, rows: int, stream: int
    ) -> None:
        """Copy ``rows`` rows of ``width`` bytes. Rows begin every ``stride`` bytes in ``source`` and every ``step`` in
        ``target``."""
        if width * rows:
            kind = self.cuda.kind("DeviceToDevice")
            self.cuda(
                "cudaMemcpy2DAsync", target.pointer, step, source.pointer, stride, width, rows, kind, stream
            )  # fmt: skip

    # --- order ---

    def wait_event(self, stream: int, event: Event) -> None:
        """Make all later work on the stream wait for an event."""
        self.cuda("cudaStreamWaitEvent", stream, event.handle, 0)

    def synchronize(self) -> None:
        """Wait until all work queued on both streams is done."""
        with self.guard():
            self.cuda("cudaStreamSynchronize", self.compute_stream)
            self.cuda("cudaStreamSynchronize", self.comm_stream)

    # --- a Device ---

    def sessions(self) -> SessionCache:
        return Sessions(self.index, self.compute_stream)

    def to_device(self, shown: Array | DeviceBlock) -> DeviceBlock:
        if isinstance(shown, DeviceBlock):
            return shown
        array = np.require(shown, requirements="C")
        if array_dtype(array) == "string" or array.dtype.hasobject:
            raise UnsupportedError("a GPU cannot hold strings")
        block = self.empty(array.shape, array.dtype)
        if array.nbytes:
            # Pageable memory: it has been read when this returns.
            kind = self.cuda.kind("HostToDevice")
            with self.guard():
                self.cuda("cudaMemcpyAsync", block.pointer, array.ctypes.data, array.nbytes, kind, self.compute_stream)
        return block

    def hold(self, shown: Array | DeviceBlock) -> DeviceBlock:
        return self.to_device(shown)

    def view(self, value: DeviceBlock) -> DeviceBlock:
        return value

    def to_host(self, shown: Array | DeviceBlock) -> Array:
        if not isinstance(shown, DeviceBlock):
            return shown
        array = np.empty(shown.shape, shown.dtype)
        if array.nbytes:
            kind = self.cuda.kind("DeviceToHost")
            with self.guard():
                self.cuda("cudaMemcpyAsync", array.ctypes.data, shown.pointer, array.nbytes, kind, self.compute_stream)
                self.cuda("cudaStreamSynchronize", self.compute_stream)
        return array

    def assign_buffers(self, graph: Graph, replaces: Mapping[str, str], member: MemberIndex | None) -> BufferAssignment:
        return BufferAssignment(graph)

    def allocate_buffers(self, assignment: BufferAssignment, shared: SharedMemory) -> Buffers:
        """Allocate buffers for what calls send, unless a tensor would begin at an address unfit for kernels."""
        graph = assignment.graph
        members = {
            name: len(node.attributes.get("cuts", ()))
            for node in graph.nodes if node.domain == COMM for name in node.inputs
        }  # fmt: skip
        send_views: dict[str, Any] = {}
        for names, types in packed_inputs(graph):
            if any(type.nbytes % ALIGN for type in types[:-1]):
                continue
            elements = sum(type.elements for type in types)
            flat = self.empty((elements,), numpy_dtype(types[0].dtype), beyond=SHARD * members[names[0]])
            start = 0
            for name, type in zip(names, types, strict=True):
                send_views[name] = flat.part(start, type.dims)
                start += type.elements
        return Buffers(send_views=send_views)

    def compile_segment(
        self, segment: Segment, graph: Graph, types: dict[str, TensorType], cache: SessionCache,
        views: Mapping[str, Sequence[DeviceBlock]] | None, persistent: Mapping[str, Any],
    ) -> GpuSegment:  # fmt: skip
        compiled = session.session_of(segment, graph, types, cache)
        return GpuSegment(self, segment, compiled, {name: shapes[0] for name, shapes in (views or {}).items()}, types)

    def run(
        self,
        session: Any,
        inputs: Mapping[str, DeviceBlock],
        targets: Mapping[str, DeviceBlock],
        outputs: Sequence[str],
    ) -> list[DeviceBlock]:
        """Queue the run of a session on the compute stream, and return the outputs. Raises RunError."""
        binding = session.io_binding()
        for name, block in inputs.items():
            binding.bind_input(name, "cuda", self.index, code(block.dtype), block.shape, block.pointer)
        for name in outputs:
            if name in targets:
                block = targets[name]
                binding.bind_output(name, "cuda", self.index, code(block.dtype), block.shape, block.pointer)
            else:
                binding.bind_output(name, "cuda", self.index)
        try:
            session.run_with_iobinding(binding, self._options)
        except Exception as error:  # its exceptions have no common base
            raise node_error(error) from error
        if len(targets) == len(outputs):
            return [targets[name] for name in outputs]
        values = zip(outputs, binding.get_outputs(), strict=True)
        return [targets[name] if name in targets else _allocated(value) for name, value in values]


def _allocated(value: Any) -> DeviceBlock:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.element_type())
    return DeviceBlock(Memory(value, value.tensor_size_in_bytes()), 0, dtype, tuple(value.shape()))


@functools.cache
def code(dtype: Dtype) -> int:
    """ONNX's number of an element type."""
    return dtype_code(array_dtype(np.empty(0, dtype)))


def _last_line(error: Exception) -> str:
    """The last line of an error's message: ONNX Runtime puts lines of its source in front."""
    words = session.first_line(error)
    return words.rpartition(") ")[2] or words
