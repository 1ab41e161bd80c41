"""A GPU that is not there: CUDA's streams, NCCL and ONNX Runtime's CUDA provider over host memory, ranks as threads.

Streams are *lazy*: what they are given runs when the host waits for them, or another stream waits for an event of
theirs, and not before. Streams named in ``eager`` run at once instead. Between the two, work that nobody ordered runs
too early or too late, on memory that is poisoned when it is new; so a missing wait shows in the results.

Functions have the signatures of the real ones (``test_nccl_api.py``). Operators on halves round after each, as the
provider's kernels do.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from gopt.ir.load import load
from gopt.ir.types import dtype_name
from gopt.records.mesh import Mesh
from gopt.runtime.engines.base import InProcessStore
from gopt.runtime.engines.watchdog import Watchdog
from gopt.runtime.executor import Executor
from gopt.runtime.host_value import array_of
from gopt.runtime.session import SessionCache

_WAIT = 120.0
"""Seconds for which one rank waits for the others."""
_handles = itertools.count(4096)


def at(pointer: int, nbytes: int) -> np.ndarray:
    """Bytes in memory."""
    return np.frombuffer((ctypes.c_char * nbytes).from_address(pointer), np.uint8)


class Given:
    """Memory of GPUs that was given out."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.starts: list[int] = []
        self.ends: list[int] = []

    def add(self, start: int, nbytes: int) -> None:
        with self.lock:
            place = bisect.bisect(self.starts, start)
            self.starts.insert(place, start)
            self.ends.insert(place, start + nbytes)

    def remove(self, start: int) -> None:
        with self.lock:
            place = bisect.bisect_left(self.starts, start)
            del self.starts[place], self.ends[place]

    def holds(self, pointer: int, nbytes: int) -> bool:
        """Whether all of these bytes are in one piece."""
        with self.lock:
            place = bisect.bisect(self.starts, pointer) - 1
            return place >= 0 and pointer + nbytes <= self.ends[place]


given = Given()


# --- CUDA -----------------------------------------------------------------------------------------------------------


class Stream:
    """Work in order, done up to a place."""

    every: dict[int, Stream] = {}  # noqa: RUF012

    def __init__(self, eager: bool) -> None:
        self.handle = next(_handles)
        self.eager = eager
        self.work: list[Callable[[], None]] = []
        self.done = 0
        Stream.every[self.handle] = self

    def give(self, work: Callable[[], None]) -> None:
        self.work.append(work)
        if self.eager:
            self.advance(len(self.work))

    def advance(self, place: int) -> None:
        while self.done < place:
            self.done += 1
            self.work[self.done - 1]()


class Handle(int):
    """A pointer as the bindings give it."""


class Status(IntEnum):
    cudaSuccess = 0
    cudaErrorNotReady = 600
    cudaErrorInsufficientDriver = 35


class Kind(IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class FakeCudart:
    """``cuda.bindings.runtime`` in one process, with ``count`` GPUs. Streams by the order of their making."""

    cudaError_t = Status
    cudaMemcpyKind = Kind
    cudaStreamNonBlocking = 1
    cudaEventDisableTiming = 2

    def __init__(self, count: int = 1, eager: Sequence[int] = (), bus: bytes = b"0000:01:00.0") -> None:
        self.count, self.eager, self.bus = count, eager, bus
        self.device: int | None = None
        self.streams: list[Stream] = []
        self.events: dict[int, tuple[Stream, int] | None] = {}
        self.forget: set[int] = set()
        """Numbers of the streams that do not wait when they are told to: for tests that plant a fault."""

    def cudaGetDeviceCount(self):
        return (Status.cudaSuccess, self.count) if self.count else (Status.cudaErrorInsufficientDriver, None)

    def cudaGetErrorString(self, error):
        return Status.cudaSuccess, f"{error.name}".encode()

    def cudaSetDevice(self, device):
        self.device = device
        return (Status.cudaSuccess,)

    def cudaDeviceGetPCIBusId(self, length, device):
        return Status.cudaSuccess, self.bus + b"%d" % device

    def cudaStreamCreateWithFlags(self, flags):
        assert flags == self.cudaStreamNonBlocking and self.device is not None
        self.streams.append(Stream(len(self.streams) in self.eager))
        return Status.cudaSuccess, Handle(self.streams[-1].handle)

    def cudaEventCreateWithFlags(self, flags):
        handle = next(_handles)
        self.events[handle] = None
        return Status.cudaSuccess, Handle(handle)

    def cudaEventDestroy(self, event):
        del self.events[event]
        return (Status.cudaSuccess,)

    def cudaEventRecord(self, event, stream):
        self.events[event] = (self._stream(stream), len(self._stream(stream).work))
        return (Status.cudaSuccess,)

    def cudaStreamWaitEvent(self, stream, event, flags):
        place = self.events[event]
        assert place is not None and flags == 0
        waiting = self._stream(stream)
        if self.streams.index(waiting) not in self.forget:
            waiting.give(lambda: place[0].advance(place[1]))
        return (Status.cudaSuccess,)

    def cudaStreamSynchronize(self, stream):
        self._stream(stream).advance(len(self._stream(stream).work))
        return (Status.cudaSuccess,)

    def cudaEventQuery(self, event):
        place = self.events[event]
        assert place is not None
        return (Status.cudaSuccess if place[0].done >= place[1] else Status.cudaErrorNotReady,)

    def cudaMemcpyAsync(self, dst, src, count, kind, stream):
        assert kind == Kind.cudaMemcpyHostToDevice or given.holds(src, count)
        assert kind == Kind.cudaMemcpyDeviceToHost or given.holds(dst, count)
        # Pageable host memory is read at once, into a buffer of the driver's.
        read = at(src, count).copy() if kind == Kind.cudaMemcpyHostToDevice else None

        def move() -> None:
            at(dst, count)[:] = at(src, count) if read is None else read

        self._stream(stream).give(move)
        return (Status.cudaSuccess,)

    def cudaMemcpy2DAsync(self, dst, dpitch, src, spitch, width, height, kind, stream):
        assert kind == Kind.cudaMemcpyDeviceToDevice and width <= min(dpitch, spitch)
        assert given.holds(dst, (height - 1) * dpitch + width) and given.holds(src, (height - 1) * spitch + width)

        def move() -> None:
            for row in range(height):
                at(dst + row * dpitch, width)[:] = at(src + row * spitch, width)

        self._stream(stream).give(move)
        return (Status.cudaSuccess,)

    def _stream(self, handle: int) -> Stream:
        found = Stream.every[int(handle)]
        assert found in self.streams, "a stream of another rank"
        return found


# --- NCCL -----------------------------------------------------------------------------------------------------------


class Fabric:
    """Where the communicators of all ranks meet."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.brought: dict[Any, dict[int, np.ndarray]] = {}

    def bring(self, key: Any, rank: int, data: np.ndarray) -> None:
        with self.changed:
            self.brought.setdefault(key, {})[rank] = data
            self.changed.notify_all()

    def fetch(self, key: Any, ranks: Sequence[int]) -> list[np.ndarray]:
        with self.changed:
            came = self.changed.wait_for(lambda: all(r in self.brought.get(key, {}) for r in ranks), _WAIT)
            assert came, f"at {key}: {sorted(self.brought.get(key, {}))} of {list(ranks)} came"
            return [self.brought[key][rank] for rank in ranks]


class UniqueId:
    def __init__(self, value: bytes = b"") -> None:
        self.value = value

    def __bytes__(self) -> bytes:
        return self.value

    @staticmethod
    def from_bytes(b):
        return UniqueId(bytes(b))


class Op(IntEnum):
    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


class FakeNccl:
    """``nccl.core`` for one rank: calls of a group are handed over together, when it ends."""

    SUM, MAX, MIN, AVG = Op.SUM, Op.MAX, Op.MIN, Op.AVG
    UniqueId = UniqueId

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.grouped: list[tuple[Stream, Callable[[], None], Callable[[], None]]] | None = None
        self.made: list[str] = []
        """Names of the calls that were made."""
        nccl = self

        class Bound(Communicator):
            @classmethod
            def init(cls, nranks, rank, unique_id, config=None):
                return cls(nccl, nranks, rank, bytes(unique_id))

        self.Communicator = Bound

    def get_unique_id(self, empty=False):
        return UniqueId(b"%016d" % next(_handles))

    @contextmanager
    def group(self) -> Iterator[None]:
        assert self.grouped is None
        self.grouped = []
        try:
            yield
        finally:
            grouped, self.grouped = self.grouped, None
            self._hand_over(grouped)

    def post(self, stream: Any, bring: Callable[[], None], fetch: Callable[[], None]) -> None:
        entry = (Stream.every[int(stream)], bring, fetch)
        if self.grouped is None:
            self._hand_over([entry])
        else:
            self.grouped.append(entry)

    def _hand_over(self, entries: list[tuple[Stream, Callable[[], None], Callable[[], None]]]) -> None:
        def run() -> None:
            for _, bring, _ in entries:
                bring()
            for _, _, fetch in entries:
                fetch()

        if entries:
            assert len({id(stream) for stream, _, _ in entries}) == 1
            entries[0][0].give(run)


class Communicator:
    """``nccl.core.Communicator``. Sums go from the first rank to the last; a maximum loses NaN where it can."""

    def __init__(self, nccl: FakeNccl, nranks: int, rank: int, name: bytes) -> None:
        self.nccl, self.nranks, self.rank, self.name = nccl, nranks, rank, name
        self.calls = itertools.count()
        self.counts: dict[tuple[str, int, int], Iterator[int]] = {}
        self.aborted = False

    @classmethod
    def init(cls, nranks, rank, unique_id, config=None):
        raise NotImplementedError

    def abort(self):
        self.aborted = True

    def allreduce(self, sendbuf, recvbuf, op, *, stream=None, config=None):
        self._reduce("allreduce", sendbuf, recvbuf, op, None, stream)

    def reduce(self, sendbuf, recvbuf, op, root=None, *, stream=None, config=None):
        self._reduce("reduce", sendbuf, recvbuf, op, root, stream)

    def reduce_scatter(self, sendbuf, recvbuf, op, *, stream=None, config=None):
        source, target = _Buffer(sendbuf), _Buffer(recvbuf)
        count = source.count // self.nranks
        assert source.dtype == target.dtype and 0 < count <= target.count

        def write(found: list[np.ndarray]) -> None:
            target.write(_combined(found, op)[self.rank * count : (self.rank + 1) * count])

        self._post("reduce_scatter", source.read, write, stream)

    def allgather(self, sendbuf, recvbuf, *, stream=None, config=None):
        source, target = _Buffer(sendbuf), _Buffer(recvbuf)
        assert source.dtype == target.dtype and target.count >= source.count * self.nranks
        self._post("allgather", source.read, lambda found: target.write(np.concatenate(found)), stream)

    def broadcast(self, sendbuf, recvbuf, root, *, stream=None, config=None):
        source, target = _Buffer(sendbuf if self.rank == root else recvbuf), _Buffer(recvbuf)
        assert source.dtype == target.dtype and source.count == target.count
        self._post("broadcast", source.read, lambda found: target.write(found[root]), stream)

    def send(self, sendbuf, peer, *, stream=None):
        key, source = self._channel("to", self.rank, peer), _Buffer(sendbuf)
        self.nccl.made.append("send")
        self.nccl.post(stream, lambda: self.nccl.fabric.bring(key, 0, source.read()), lambda: None)

    def recv(self, recvbuf, peer, *, stream=None):
        key, target = self._channel("from", peer, self.rank), _Buffer(recvbuf)
        self.nccl.made.append("recv")
        self.nccl.post(stream, lambda: None, lambda: target.write(self.nccl.fabric.fetch(key, [0])[0]))

    def _channel(self, way: str, sender: int, receiver: int) -> Any:
        number = next(self.counts.setdefault((way, sender, receiver), itertools.count()))
        return self.name, sender, receiver, number

    def _reduce(self, name: str, sendbuf: Any, recvbuf: Any, op: Op, root: int | None, stream: Any) -> None:
        source = _Buffer(sendbuf)
        target = _Buffer(recvbuf) if root in (None, self.rank) else None
        assert target is None or (source.dtype == target.dtype and target.count >= source.count)

        def write(found: list[np.ndarray]) -> None:
            if target is not None:
                target.write(_combined(found, op))

        self._post(name, source.read, write, stream)

    def _post(self, name: str, read: Callable[[], Any], write: Callable[[list[Any]], None], stream: Any) -> None:
        key = self.name, next(self.calls), name
        fabric = self.nccl.fabric
        self.nccl.made.append(name)
        self.nccl.post(
            stream,
            lambda: fabric.bring(key, self.rank, read()),
            lambda: write(fabric.fetch(key, range(self.nranks))),
        )


class _Buffer:
    """What NCCL sees of a buffer; refuses types that it has no word for."""

    def __init__(self, buffer: Any) -> None:
        seen = buffer.__cuda_array_interface__
        self.dtype = np.dtype(seen["typestr"])
        assert self.dtype.kind in "iuf" and (self.dtype.kind == "f" or self.dtype.itemsize != 2), self.dtype
        assert "stream" not in seen and seen["strides"] is None
        self.pointer, self.count = seen["data"][0], int(np.prod(seen["shape"]))
        assert given.holds(self.pointer, self.count * self.dtype.itemsize)

    def read(self) -> np.ndarray:
        return at(self.pointer, self.count * self.dtype.itemsize).view(self.dtype).copy()

    def write(self, values: np.ndarray) -> None:
        assert values.dtype == self.dtype and values.size <= self.count
        at(self.pointer, values.nbytes)[:] = np.ascontiguousarray(values).view(np.uint8)


def _combined(found: list[np.ndarray], op: Op) -> np.ndarray:
    with np.errstate(all="ignore"):
        total = found[0] / found[0].dtype.type(len(found)) if op is Op.AVG else found[0].copy()
        for other in found[1:]:
            if op is Op.AVG:
                total += other / other.dtype.type(len(found))
            else:
                total = {Op.SUM: np.add, Op.MAX: np.fmax, Op.MIN: np.fmin}[op](total, other)
    return total


# --- ONNX Runtime ---------------------------------------------------------------------------------------------------


class FakeValue:
    """An OrtValue on the GPU: memory of the host, poisoned when it is new."""

    def __init__(self, value: Any, new: bool = True) -> None:
        self._value, self._at = value, value.data_ptr()
        given.add(self._at, value.tensor_size_in_bytes())
        if new:
            at(self._at, value.tensor_size_in_bytes())[:] = 0xFF

    def __del__(self) -> None:
        given.remove(self._at)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)


class FakeOrtValue:
    """``onnxruntime.OrtValue``; on the CPU the real one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(onnxruntime.OrtValue, name)

    def __call__(self, value: Any) -> Any:
        return onnxruntime.OrtValue(value)

    def ortvalue_from_shape_and_type(
        self, shape, element_type, device_type="cpu", device_id=0, vendor_id=-1, memory_info=None
    ):
        value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, element_type)
        return value if device_type == "cpu" else FakeValue(value)


class FakeRuntime:
    """The package onnxruntime with a CUDA provider; ``provider`` is what its sessions end up with."""

    OrtValue = FakeOrtValue()

    def __init__(self, provider: str = "CUDAExecutionProvider") -> None:
        self.provider = provider

    def __getattr__(self, name: str) -> Any:
        return getattr(onnxruntime, name)

    def RunOptions(self) -> FakeRunOptions:
        return FakeRunOptions()

    def preload_dlls(self, cuda=True, cudnn=True, msvc=True, directory=None):
        print("a library was not found")

    def InferenceSession(self, model, options, providers, disabled_optimizers, **more):
        if providers == ["CPUExecutionProvider"]:
            return onnxruntime.InferenceSession(
                model, options, providers=providers, disabled_optimizers=disabled_optimizers
            )
        assert "Pad_Fusion" in disabled_optimizers
        name, chosen = providers[0]
        assert name == "CUDAExecutionProvider" and more == {"enable_fallback": 0}
        return FakeSession(model, chosen, self.provider)


class FakeRunOptions:
    def __init__(self) -> None:
        self.entries: dict[str, str] = {}

    def add_run_config_entry(self, key: str, value: str) -> None:
        self.entries[key] = value


def _shaped(data: bytes) -> bytes:
    """A segment as a file must be: its outputs have a rank. None of them is read, and a wrong one would be refused."""
    model = onnx.ModelProto.FromString(data)
    found = {info.name: info.type for info in onnx.shape_inference.infer_shapes(model, data_prop=True).graph.output}
    for info in model.graph.output:
        info.type.CopyFrom(found[info.name])
        info.type.tensor_type.shape.SetInParent()
    shaped: bytes = model.SerializeToString()
    return shaped


class FakeSession:
    """A session of the CUDA provider: its run is handed to the stream that it was made with."""

    def __init__(self, model: bytes, options: dict[str, str], provider: str) -> None:
        assert options["use_tf32"] == "0"
        self.stream = Stream.every[int(options["user_compute_stream"])]
        self.provider = provider
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "segment.onnx")
            path.write_bytes(_shaped(model))
            graph = load(path, own=True)
        self.types = {name: type.dtype for name, type in graph.outputs.items()}
        self.program = Executor(graph, SessionCache())

    def get_providers(self) -> list[str]:
        return [self.provider, "CPUExecutionProvider"]

    def get_outputs(self) -> list[Any]:
        class Info:
            def __init__(self, name: str, dtype: str) -> None:
                self.name = name
                self.type = f"tensor({ {'float32': 'float', 'float64': 'double'}.get(dtype, dtype) })"

        return [Info(name, dtype) for name, dtype in self.types.items()]

    def io_binding(self) -> FakeBinding:
        return FakeBinding()

    def run_with_iobinding(self, iobinding, run_options=None):
        inputs, outputs = dict(iobinding.inputs), dict(iobinding.outputs)

        def run() -> None:
            feeds = {name: _array(*place).copy() for name, place in inputs.items()}
            results = self.program.run(feeds, lambda *_: [])
            for name, place in outputs.items():
                if place is None:
                    iobinding.made[name] = results[name]
                else:
                    target = _array(*place)
                    assert target.shape == results[name].shape and target.dtype == results[name].dtype, name
                    target[...] = results[name]

        self.stream.give(run)
        if None in outputs.values() or run_options.entries != {"disable_synchronize_execution_providers": "1"}:
            self.stream.advance(len(self.stream.work))


class FakeBinding:
    """``onnxruntime.IOBinding``."""

    def __init__(self) -> None:
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        self.made: dict[str, np.ndarray] = {}

    def bind_input(self, name, device_type, device_id, element_type, shape, buffer_ptr):
        assert device_type == "cuda" and buffer_ptr % 16 == 0, name
        self.inputs[name] = (element_type, tuple(shape), buffer_ptr)

    def bind_output(self, name, device_type="cpu", device_id=0, element_type=None, shape=None, buffer_ptr=None):
        assert device_type == "cuda"
        assert buffer_ptr is None or buffer_ptr % 16 == 0, name
        self.outputs[name] = None if buffer_ptr is None else (element_type, tuple(shape), buffer_ptr)

    def get_outputs(self) -> list[Any]:
        return [
            None if place is not None else FakeValue(onnxruntime.OrtValue.ortvalue_from_numpy(self.made[name]), False)
            for name, place in self.outputs.items()
        ]


def _array(element_type: int, shape: tuple[int, ...], pointer: int) -> np.ndarray:
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(element_type))
    assert dtype_name(element_type)
    return at(pointer, int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)


# --- ranks ----------------------------------------------------------------------------------------------------------


class FakeWords:
    """What MpiEngine says between processes, between threads."""

    def __init__(self, rank: int, store: InProcessStore, deadline: float = _WAIT) -> None:
        self.rank, self.store = rank, store
        self.node_error: BaseException | None = None
        self.said: list[str] = []
        self.watchdog = Watchdog(deadline, self.said.append, store.barrier.abort)

    def gather(self, item: Any) -> list[Any]:
        return self.store.gather(self.rank, item)

    def host_ranks(self) -> list[int]:
        return list(range(len(self.store._words)))

    def fail(self, error: BaseException) -> None:
        self.node_error = error
        self.store.barrier.abort()


def together(mesh: Mesh, work: Callable[[FakeWords], Any]) -> list[Any]:
    """Every rank's work, in a thread each; raises the first failure."""
    store = InProcessStore(mesh.ranks, _WAIT)
    results: list[Any] = [None] * mesh.ranks
    failures: list[BaseException] = []

    def live(rank: int) -> None:
        words = FakeWords(rank, store)
        try:
            results[rank] = work(words)
        except BaseException as error:
            failures.append(error)
            words.fail(error)
        finally:
            words.watchdog.close()

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(mesh.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * _WAIT)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


__all__ = ["Fabric", "FakeCudart", "FakeNccl", "FakeRuntime", "FakeWords", "array_of", "together"]
