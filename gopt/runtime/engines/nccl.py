"""Ranks as MPI processes with one GPU each, and calls by NCCL. The only file that imports NCCL's binding.

A call is queued on the communication stream, after all work queued on the compute stream so far. A reader of a call's
outputs makes the compute stream wait for the call. The host waits for neither. float16 and bfloat16 are summed in
float32 and rounded once. A mean is NCCL's average: each value is divided before the sum. Unique ids and control
messages use MPI."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from gopt.collectives.layout import lengths, parse_shapes, resized, total_elements
from gopt.errors import OptionError, RunError
from gopt.ir.graph import Node
from gopt.ir.types import numpy_dtype
from gopt.records.mesh import Mesh
from gopt.runtime.engines.base import raise_on_one_rank
from gopt.runtime.engines.cuda import INSTALL, Cuda, DeviceBlock, Event, bindings
from gopt.runtime.engines.gpu import Gpu
from gopt.runtime.engines.kernels import Kernels
from gopt.runtime.engines.staging import ReductionOp, Staging, contiguous_views, equal_parts
from gopt.runtime.engines.watchdog import Watchdog
from gopt.runtime.shared_memory import NOT_SHARED, GatherRequest, Key, SendRequest, SharedMemory


class ControlPlane(Protocol):
    """Host communication next to NCCL; MpiEngine implements it."""

    rank: int
    watchdog: Watchdog

    def gather(self, item: Any) -> list[Any]: ...

    def host_ranks(self) -> list[int]: ...

    def fail(self, error: BaseException) -> None: ...


def on_gpus(mesh: Mesh, control: ControlPlane) -> tuple[NcclEngine, Gpu, type[StreamCollectives]]:
    """Return the engine, the device and the calls of this rank. All ranks call this function together. Raises RunError,
    OptionError."""
    cuda, nccl = raise_on_one_rank(control, lambda: (Cuda(bindings()), library()))
    near = control.host_ranks()
    # A launcher may show each of its ranks one GPU alone.
    index = near.index(control.rank) % cuda.count
    names = control.gather((near[0], cuda("cudaDeviceGetPCIBusId", 32, index)))
    raise_on_one_rank(control, lambda: _check_one_rank_per_gpu(names, control.rank))
    gpu = raise_on_one_rank(control, lambda: Gpu(cuda, index))
    return NcclEngine(mesh, control, gpu, nccl), gpu, StreamCollectives


def library() -> Any:
    """Return the module nccl.core; raises RunError if missing."""
    try:
        import nccl.core
    except ImportError as error:
        raise RunError(f"NCCL cannot be used: {error}", *INSTALL) from error
    return nccl.core


def _check_one_rank_per_gpu(names: Sequence[Any], rank: int) -> None:
    """Raise OptionError where two ranks have the same GPU, unless NCCL allows this by configuration."""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return
    twins = [twin for twin, name in enumerate(names) if name == names[rank]]
    if len(twins) > 1:
        raise OptionError(
            f"ranks {twins[0]} and {twins[1]} would share a GPU",
            "NCCL needs a GPU per rank: start fewer ranks on each machine, or use --engine mpi",
            "to test with one GPU: set NCCL_MULTI_RANK_GPU_ENABLE=1; ranks then take turns on it",
        )


@dataclass(slots=True)
class PendingCollective:
    """A call that has started. ``held``: blocks still in use by the stream."""

    gpu: Gpu
    done: Event
    outputs: list[DeviceBlock]
    held: list[DeviceBlock]

    def result(self) -> list[DeviceBlock]:
        """The outputs. Work queued on the compute stream from now on comes after the call."""
        self.gpu.wait_event(self.gpu.compute_stream, self.done)
        self.held = []  # what gets their memory now comes behind the wait
        return self.outputs


class NcclEngine:
    """The Engine of a process that has a single rank and a single GPU; a Block is memory of the GPU."""

    def __init__(self, mesh: Mesh, control: ControlPlane, gpu: Gpu, nccl: Any) -> None:
        self.rank = control.rank
        self._mesh, self._control, self._gpu, self._nccl = mesh, control, gpu, nccl
        self._comms: dict[str, Any] = {}
        self._in_flight: deque[tuple[str, Event]] = deque()
        self._kernels = Kernels(gpu)
        gpu.guard = lambda: control.watchdog.on(self._unfinished)

    def prepare(self, groups: Sequence[str]) -> None:
        new = [group for group in groups if group not in self._comms]
        mine = {
            group: bytes(self._nccl.get_unique_id())
            for group in new if self._mesh.first(group, self.rank) == self.rank
        }  # fmt: skip
        ids = self._control.gather(mine)
        for group in new:
            members, index = self._mesh.members(group, self.rank), self._mesh.index(group, self.rank)
            unique = self._nccl.UniqueId.from_bytes(ids[members[0]][group])
            with self._control.watchdog.on(f"the start of NCCL over {group}"):
                self._comms[group] = self._nccl.Communicator.init(len(members), index, unique)

    def share(self, sends: Mapping[Key, SendRequest], gathers: Mapping[Key, GatherRequest]) -> SharedMemory:
        return NOT_SHARED

    def gather(self, item: Any) -> list[Any]:
        # The host communicates between steps: finish the GPU's work first, so that a hang is found at its call.
        self._gpu.synchronize()
        self._in_flight.clear()
        return self._control.gather(item)

    def fail(self, error: BaseException) -> None:
        """End all ranks at once: kernels that wait for other ranks could keep this process from ending."""
        enders = [threading.Thread(target=comm.abort, daemon=True) for comm in self._comms.values()]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join(2.0)
        self._control.fail(error)

    def call(self, index: int, node: Node, inputs: list[DeviceBlock]) -> list[DeviceBlock]:
        return self.start(index, node, inputs).result()

    def start(self, index: int, node: Node, inputs: list[DeviceBlock]) -> PendingCollective:
        """Queue a call on the GPU; returns the call's future. Raises RunError."""
        group = node.attributes["group"]
        name = f"call {index} ({node.op_type} over {group})"
        staging = Staging(self._gpu, self._kernels, [*inputs])
        self._gpu.wait_event(self._gpu.comm_stream, self._gpu.cuda.event(self._gpu.compute_stream))
        make = _Call(self._comms[group], self._nccl, self._mesh, self.rank, staging, node, inputs)
        with self._control.watchdog.on(name):  # the first call of a kind connects the ranks
            try:
                outputs = _MAKE[node.op_type](make)
            except RunError:
                raise
            except Exception as error:  # its exceptions have no common base
                raise RunError(f"NCCL failed at {name}: {error}") from error
        done = self._gpu.cuda.event(self._gpu.comm_stream)
        self._in_flight.append((name, done))
        return PendingCollective(self._gpu, done, outputs, [*staging.held, *outputs])

    def _unfinished(self) -> str:
        """The first call not yet finished by the GPU, for messages of the watchdog."""
        late = (name for name, done in list(self._in_flight) if not self._gpu.cuda.finished(done))
        return next(late, "the GPU")


@dataclass(slots=True)
class StreamCollectives:
    """A rank's calls, started in file order; NCCL runs the calls on a separate stream."""

    engine: NcclEngine
    position: Callable[[int], None]
    mark: Callable[[str, float, float], None]

    def __call__(self, index: int, node: Node, inputs: list[DeviceBlock]) -> PendingCollective:
        self.position(index)
        begin = time.perf_counter()
        started = self.engine.start(index, node, inputs)
        self.mark(f"{node.op_type} {index} over {node.attributes['group']}", begin, time.perf_counter())
        return started

    def close(self) -> None:
        return None


class _Call:
    """One call. Each public method makes one kind of collective, and returns outputs written later by the communication
    stream."""

    def __init__(
        self, comm: Any, nccl: Any, mesh: Mesh, rank: int, staging: Staging, node: Node, inputs: list[DeviceBlock]
    ) -> None:
        self._comm, self._group, self._staging, self._inputs = comm, nccl.group, staging, inputs
        self._attributes = node.attributes
        self._stream = staging.gpu.comm_stream
        self._place = mesh.index(node.attributes["group"], rank)
        self._peer = mesh.index(node.attributes["group"], node.attributes.get("peer", rank))
        self._how = ReductionOp.of(node, inputs[0].dtype) if inputs else None
        self._operator = getattr(nccl, self._how.operator) if self._how is not None else None
        self._any = nccl.MAX

    def all_reduce(self) -> list[DeviceBlock]:
        return self._reduced(lambda x, y, operator: self._comm.allreduce(x, y, operator, stream=self._stream))

    def reduce(self) -> list[DeviceBlock]:
        root = self._attributes["root"]
        blocks = self._reduced(lambda x, y, operator: self._comm.reduce(x, y, operator, root, stream=self._stream))
        return blocks if self._place == root else []

    def _reduced(self, make: Callable[[DeviceBlock, DeviceBlock, Any], None]) -> list[DeviceBlock]:
        """All tensors after the reduction. NCCL gets one flat buffer."""
        how, staging = self._reduction, self._staging
        flats = [staging.upcast(block, how) for block in self._inputs]
        marks = [staging.marks(flat, how) for flat in flats]
        totals = [staging.empty(flat.size, flat.dtype) for flat in flats]
        with self._group():
            for source, total, mark in zip(flats, totals, marks):
                if source.size:
                    make(source, total, self._operator)
                if mark.size:
                    make(mark, mark, self._any)
        narrow = [staging.downcast(total, mark, how) for total, mark in zip(totals, marks)]
        return [flat.part(0, block.shape) for flat, block in zip(narrow, self._inputs)]

    def broadcast(self) -> list[DeviceBlock]:
        outputs = self._stated()
        with self._group():
            for source, target in zip(self._inputs or outputs, outputs):
                if target.size:
                    self._comm.broadcast(source.bits(), target.bits(), self._attributes["root"], stream=self._stream)
        return outputs

    def reduce_scatter(self) -> list[DeviceBlock]:
        how, staging, index = self._reduction, self._staging, self._place
        if "cuts" in self._attributes:
            pieces, counts = self._inputs, lengths(self._attributes["cuts"])
            shape: tuple[int, ...] = (counts[index],)
        else:
            pieces = staging.sliced(self._inputs[0], self._attributes["axis"], self._attributes["sizes"])
            counts, shape = [piece.size for piece in pieces], pieces[index].shape
        equal = equal_parts(counts)
        flat = staging.packed(pieces, how, equal * len(counts))
        marks = staging.marks(flat, how, equal * len(counts))
        mine = staging.empty(equal or counts[index], flat.dtype)
        totals_marks = staging.empty(mine.size, marks.dtype)
        with self._group():
            self._scatter(flat, mine, counts, equal, self._operator)
            if marks.size:
                self._scatter(marks, totals_marks, counts, equal, self._any)
        size = (counts[index],)
        return [staging.downcast(mine.part(0, size), totals_marks.part(0, size), how).part(0, shape)]

    def _scatter(self, flat: DeviceBlock, mine: DeviceBlock, counts: Sequence[int], equal: int, operator: Any) -> None:
        if equal:
            whole = flat.part(0, (equal * len(counts),))
            self._comm.reduce_scatter(whole, mine, operator, stream=self._stream)
            return
        for member, start in enumerate(accumulate(counts[:-1], initial=0)):
            if counts[member]:
                part = flat.part(start, (counts[member],))
                self._comm.reduce(part, mine, operator, member, stream=self._stream)

    def all_gather(self) -> list[DeviceBlock]:
        shard, attributes = self._inputs[0], self._attributes
        if "cuts" in attributes:
            whole = self._gathered(shard, lengths(attributes["cuts"]))
            return self._staging.unpacked(whole, parse_shapes(attributes["shapes"]))
        axis = attributes["axis"]
        shapes = [resized(shard.shape, axis, size) for size in attributes["sizes"]]
        whole = self._gathered(shard, [math.prod(shape) for shape in shapes])
        return [self._staging.joined(contiguous_views(whole, shapes), axis)]

    def _gathered(self, shard: DeviceBlock, counts: Sequence[int]) -> DeviceBlock:
        """The shards of all members in order."""
        equal = equal_parts(counts)
        whole = self._staging.empty(equal * len(counts) or sum(counts), shard.dtype)
        if equal:
            if counts[self._place] != equal:  # its part of the result is as long as NCCL wants it
                slot = whole.part(self._place * equal, (equal,))
                self._staging.copy(slot, shard)
                shard = slot
            self._comm.allgather(shard.bits(), whole.bits(), stream=self._stream)
            return whole
        with self._group():
            for member, part in enumerate(contiguous_views(whole, [(count,) for count in counts])):
                if part.size:
                    source = shard if member == self._place else part
                    self._comm.broadcast(source.bits(), part.bits(), member, stream=self._stream)
        return whole

    def all_to_all(self) -> list[DeviceBlock]:
        attributes, axis = self._attributes, self._attributes["concat_axis"]
        pieces = self._staging.sliced(self._inputs[0], attributes["split_axis"], attributes["split_sizes"])
        shapes = [resized(pieces[self._place].shape, axis, size) for size in attributes["concat_sizes"]]
        got = contiguous_views(self._staging.empty(total_elements(shapes), pieces[0].dtype), shapes)
        with self._group():
            for member, (out, into) in enumerate(zip(pieces, got)):
                self._exchange([out], self._comm.send, member)
                self._exchange([into], self._comm.recv, member)
        return [self._staging.joined(got, axis)]

    def send(self) -> list[DeviceBlock]:
        """Send tensors. NCCL has no tags, so sends and receives of two ranks match in file order."""
        with self._group():
            self._exchange(self._inputs, self._comm.send, self._peer)
        return []

    def recv(self) -> list[DeviceBlock]:
        outputs = self._stated()
        with self._group():
            self._exchange(outputs, self._comm.recv, self._peer)
        return outputs

    def _exchange(self, blocks: Sequence[DeviceBlock], move: Callable[..., None], peer: int) -> None:
        for block in blocks:
            if block.size:
                move(block.bits(), peer, stream=self._stream)

    def _stated(self) -> list[DeviceBlock]:
        """Allocate the outputs, with types and shapes from the node's attributes."""
        dtype = numpy_dtype(self._attributes["dtype"])
        return [self._staging.empty(shape, dtype) for shape in parse_shapes(self._attributes["shapes"])]

    @property
    def _reduction(self) -> ReductionOp:
        assert self._how is not None
        return self._how


_MAKE: dict[str, Callable[[_Call], list[DeviceBlock]]] = {
    "AllReduce": _Call.all_reduce, "Reduce": _Call.reduce, "Broadcast": _Call.broadcast,
    "ReduceScatter": _Call.reduce_scatter, "AllGather": _Call.all_gather, "AllToAll": _Call.all_to_all,
    "Send": _Call.send, "Recv": _Call.recv,
}  # fmt: skip
