"""Ranks as MPI processes. The only file that imports an MPI binding, and only when ranks are to run on it.

The tensors of one call are sent as one buffer, without a copy where they are adjacent in memory. Large calls within one
host use memory shared by its ranks, with MPI as a barrier."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from gopt.collectives.layout import lengths, parse_shapes, resized, total_elements
from gopt.collectives.reference import slices
from gopt.errors import InvariantError, OptionError, RunError
from gopt.ir.graph import Node
from gopt.ir.types import numpy_dtype
from gopt.records.mesh import Mesh
from gopt.runtime.engines.base import exit_together
from gopt.runtime.engines.mpi_reductions import Reductions, reduce_op
from gopt.runtime.engines.shared_buffers import share_buffers
from gopt.runtime.engines.shared_reduction import MIN_BYTES, all_reduce, reduce_scatter
from gopt.runtime.engines.watchdog import Watchdog
from gopt.runtime.exchanged_values import decode, encode
from gopt.runtime.memory import Pool, bits, packed, same_memory, unpack_views
from gopt.runtime.session import Array
from gopt.runtime.shared_memory import (
    NOT_SHARED,
    CallBuffer,
    GatherRequest,
    Key,
    SendRequest,
    SharedGather,
    SharedMemory,
    SharedSend,
)
from gopt.system.background import dying_with_parent

T = TypeVar("T")

LAUNCHED = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
"""Variables that launchers set in the environment of a rank."""


def launched() -> bool:
    """Return whether this process was started by an MPI launcher."""
    return any(name in os.environ for name in LAUNCHED)


def raise_on_all_ranks(work: Callable[[], T]) -> T:
    """``exit_together`` over MPI."""
    world = load_mpi().COMM_WORLD
    return exit_together(lambda code: exchange(world, code), world.rank, work)


def load_mpi(extra: str = "mpi") -> Any:
    """Return the module mpi4py.MPI. Raises RunError with the extra of gopt to install."""
    try:
        with dying_with_parent():  # without its launcher it would wait for the others for ever
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise _unusable(error, extra) from error
    MPI.pickle.__init__(_refuse_pickle, _refuse_pickle)  # type: ignore[misc]
    return MPI


def _refuse_pickle(*_: Any) -> NoReturn:
    """In place of pickle in mpi4py: bytes of another process are never run."""
    raise InvariantError("messages of MPI are bytes: nothing is pickled")


def exchange(comm: Any, item: Any) -> list[Any]:
    """The values of all processes of a communicator, in order; all processes call this function together."""
    data = np.frombuffer(encode(item), np.uint8)
    sizes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([data.size], np.int64), sizes)
    starts = [0, *accumulate(sizes.tolist())]
    whole = np.empty(starts[-1], np.uint8)
    comm.Allgatherv(data, [whole, sizes.tolist()])
    return [decode(whole[start:stop].data) for start, stop in pairwise(starts)]


def _unusable(error: Exception, extra: str) -> RunError:
    name = "PyTorch" if extra == "torch" else "MPI"
    return RunError(f"{name} cannot be used: {error}", f"install it with: pip install 'gopt[{extra}]'")


def check_installed(engine: str) -> None:
    """Raise RunError without the package that ranks of an engine are to load; nothing is loaded here."""
    try:
        if engine != "torch":
            import mpi4py

            del mpi4py
        elif find_spec("torch") is None:  # its import takes seconds
            raise ImportError("No module named 'torch'")
    except ImportError as error:
        raise _unusable(error, engine) from error


class MpiEngine:
    """One process, one rank. A call longer than ``deadline`` seconds ends the job."""

    def __init__(self, mesh: Mesh, deadline: float, explain: Callable[[str], None]) -> None:
        self._mpi: Any = load_mpi()
        self._world = self._mpi.COMM_WORLD.Dup()
        self.rank: int = self._world.rank
        self._mesh = mesh
        if any(ranks != self._world.size for ranks in exchange(self._world, mesh.ranks)):
            raise OptionError(
                f"the launcher started {self._world.size} ranks, the folder holds {mesh.ranks}",
                f"start it with mpiexec -n {mesh.ranks}, or make other ranks with gopt reshard",
            )
        self._groups: dict[str, Any] = {}
        self._pool = Pool()
        self._reductions = Reductions(self._mpi, self._pool)
        self.watchdog = Watchdog(deadline, explain, lambda: self._world.Abort(RunError("").exit_code))
        host = self._world.Split_type(self._mpi.COMM_TYPE_SHARED)
        self._host_ranks: list[int] = exchange(host, self.rank)
        unlink_mpich_files()  # now that all ranks of this host have come
        self.overlaps = _has_spare_processors(host)
        self._shared = NOT_SHARED
        self._results: dict[int, _Results] = {}
        """By the identity of a call's node: what it made last in the memory that it was given."""
        self._sent: list[tuple[Any, Array]] = []
        """Values on their way to other ranks: a request, and the memory that it reads."""

    def prepare(self, groups: Sequence[str]) -> None:
        for group in (group for group in groups if group not in self._groups):
            members = self._mesh.members(group, self.rank)
            self._groups[group] = self._world.Split(members[0], self._mesh.index(group, self.rank))

    def gather(self, item: Any) -> list[Any]:
        with self.watchdog.on("the ranks' agreement"):
            while self._sent:
                self._sent.pop()[0].Wait()
            return exchange(self._world, item)

    def host_ranks(self) -> list[int]:
        """The ranks on this machine, including this one."""
        return self._host_ranks

    def share(self, sends: Mapping[Key, SendRequest], gathers: Mapping[Key, GatherRequest]) -> SharedMemory:
        self._shared = share_buffers(
            {key: request for key, request in sends.items() if self._is_shared_send(request)},
            {key: request for key, request in gathers.items() if self._pays(request)},
            lambda group: self._mesh.members(group, self.rank), self.rank, self.gather,
        )  # fmt: skip
        return self._shared

    def _is_shared_send(self, request: SendRequest) -> bool:
        call = request.call
        fits = call.op_type == "AllReduce" or (call.op_type == "ReduceScatter" and "cuts" in call.attributes)
        return fits and self._pays(request)

    def _pays(self, request: SendRequest | GatherRequest) -> bool:
        """Return whether a call is large enough for shared memory, and all ranks of the group are on this host."""
        members = self._mesh.members(request.call.attributes["group"], self.rank)
        large = request.count * request.dtype.itemsize >= MIN_BYTES
        return len(members) > 1 and large and set(members) <= set(self._host_ranks)

    @property
    def shared_calls(self) -> int:
        """The number of this rank's calls that use shared memory."""
        return len(self._shared.sends) + sum(gather.calls for gather in self._shared.gathers.values())

    def fail(self, error: BaseException) -> None:
        """End all ranks at once: others may wait in a call that this rank will never make."""
        sys.stderr.flush()
        self._world.Abort(getattr(error, "exit_code", 70))

    def call(self, index: int, node: Node, inputs: list[Array], buffer: CallBuffer | None = None) -> list[Array]:
        make = getattr(self, f"_{_SNAKE[node.op_type]}")
        with self.watchdog.on(f"call {index} ({node.op_type} over {node.attributes['group']})"):
            outputs: list[Array] = make(self._groups[node.attributes["group"]], node, inputs, buffer)
        return outputs

    def _all_reduce(self, comm: Any, node: Node, inputs: list[Array], buffer: CallBuffer | None) -> list[Array]:
        shapes = [x.shape for x in inputs]
        if isinstance(buffer, SharedSend):
            flat = all_reduce(buffer.parts, comm.rank, reduce_op(node), comm.Barrier)
            return self._in_place(node, flat, lambda: unpack_views(flat, shapes))
        flat, narrow = self._reductions.upcast(inputs, buffer)
        comm.Allreduce(self._mpi.IN_PLACE, flat, self._reductions.op(node, flat))
        return unpack_views(self._reductions.mean(flat, comm, node, narrow), shapes)

    def _reduce(self, comm: Any, node: Node, inputs: list[Array], buffer: CallBuffer | None) -> list[Array]:
        flat, narrow = self._reductions.upcast(inputs, buffer)
        root = node.attributes["root"]
        if comm.rank != root:
            comm.Reduce(flat, None, self._reductions.op(node, flat), root)
            return []
        comm.Reduce(self._mpi.IN_PLACE, flat, self._reductions.op(node, flat), root)
        return unpack_views(self._reductions.mean(flat, comm, node, narrow), [x.shape for x in inputs])

    def _broadcast(self, comm: Any, node: Node, inputs: list[Array], _: CallBuffer | None) -> list[Array]:
        shapes = _shapes(tuple(node.attributes["shapes"]))
        dtype = numpy_dtype(node.attributes["dtype"])
        flat = packed(inputs) if inputs else self._pool.take([total_elements(shapes)], dtype)
        comm.Bcast(bits(flat), node.attributes["root"])
        return unpack_views(flat.copy() if inputs else flat, shapes)

    def _reduce_scatter(self, comm: Any, node: Node, inputs: list[Array], buffer: CallBuffer | None) -> list[Array]:
        if "cuts" in node.attributes:
            cuts = node.attributes["cuts"]
            if isinstance(buffer, SharedSend):
                mine = reduce_scatter(buffer.parts, comm.rank, cuts, reduce_op(node), comm.Barrier)
                return self._in_place(node, buffer.memory, lambda: [mine])
            counts = lengths(cuts)
            flat, narrow = self._reductions.upcast(inputs, buffer)
            # The result is at the beginning of the buffer that is reduced in place.
            comm.Reduce_scatter(self._mpi.IN_PLACE, flat, counts, self._reductions.op(node, flat))
            return [self._reductions.mean(flat[: counts[comm.rank]], comm, node, narrow)]
        pieces = slices(inputs[0], node.attributes["axis"], node.attributes["sizes"])
        flat, narrow = self._reductions.upcast(pieces, None)
        comm.Reduce_scatter(self._mpi.IN_PLACE, flat, [piece.size for piece in pieces], self._reductions.op(node, flat))
        local_shard = pieces[comm.rank]
        return [self._reductions.mean(flat[: local_shard.size], comm, node, narrow).reshape(local_shard.shape)]

    def _all_gather(self, comm: Any, node: Node, inputs: list[Array], buffer: CallBuffer | None) -> list[Array]:
        shard = np.ascontiguousarray(inputs[0])
        attributes = node.attributes
        if isinstance(buffer, SharedGather):
            if not buffer.filled:
                if shard.size and not same_memory(buffer.local_shard, shard):
                    np.copyto(buffer.local_shard, shard.reshape(-1))
                comm.Barrier()
            flat = buffer.memory
            return self._in_place(node, flat, lambda: unpack_views(flat, _shapes(tuple(attributes["shapes"]))))
        if "cuts" in attributes:
            counts = lengths(attributes["cuts"])
        else:
            counts = [total_elements([resized(shard.shape, attributes["axis"], size)]) for size in attributes["sizes"]]
        whole = buffer if isinstance(buffer, np.ndarray) else self._pool.take([sum(counts)], shard.dtype)
        target = whole[sum(counts[: comm.rank]) :][: shard.size]
        in_place = shard.size > 0 and same_memory(target, shard)
        width, byte = shard.dtype.itemsize, self._mpi.BYTE
        sent = self._mpi.IN_PLACE if in_place else [bits(shard), byte]
        if len(set(counts)) == 1:  # MPI's call for equal parts is faster
            comm.Allgather(sent, [bits(whole), counts[0] * width, byte])
        else:
            comm.Allgatherv(sent, [bits(whole), [count * width for count in counts], byte])
        if "cuts" in attributes:
            return unpack_views(whole, _shapes(tuple(attributes["shapes"])))
        shapes = [resized(shard.shape, attributes["axis"], size) for size in attributes["sizes"]]
        return [np.concatenate(unpack_views(whole, shapes), attributes["axis"])]

    def _all_to_all(self, comm: Any, node: Node, inputs: list[Array], _: CallBuffer | None) -> list[Array]:
        attributes = node.attributes
        out, into = attributes["split_axis"], attributes["concat_axis"]
        pieces = [np.ascontiguousarray(piece) for piece in slices(inputs[0], out, attributes["split_sizes"])]
        base = resized(inputs[0].shape, out, attributes["split_sizes"][comm.rank])
        shapes = [resized(base, into, size) for size in attributes["concat_sizes"]]
        width, dtype = inputs[0].dtype.itemsize, inputs[0].dtype
        flat = packed(pieces)
        got = np.empty(total_elements(shapes), dtype)
        comm.Alltoallv(
            [bits(flat), [piece.size * width for piece in pieces], self._mpi.BYTE],
            [bits(got), [total_elements([shape]) * width for shape in shapes], self._mpi.BYTE],
        )
        return [np.concatenate(unpack_views(got, shapes), into)]

    def _send(self, comm: Any, node: Node, inputs: list[Array], _: CallBuffer | None) -> list[Array]:
        peer = self._mesh.index(node.attributes["group"], node.attributes["peer"])
        flat = packed([array.copy() for array in inputs])  # the rank goes on, and may write where the values lie
        self._sent = [item for item in self._sent if not item[0].Test()]
        self._sent.append((comm.Isend([bits(flat), self._mpi.BYTE], peer, node.attributes["tag"]), flat))
        return []

    def _recv(self, comm: Any, node: Node, inputs: list[Array], _: CallBuffer | None) -> list[Array]:
        shapes = _shapes(tuple(node.attributes["shapes"]))
        flat = np.empty(total_elements(shapes), numpy_dtype(node.attributes["dtype"]))
        peer = self._mesh.index(node.attributes["group"], node.attributes["peer"])
        comm.Recv([bits(flat), self._mpi.BYTE], peer, node.attributes["tag"])
        return unpack_views(flat, shapes)

    def _in_place(self, node: Node, memory: Array, views: Callable[[], list[Array]]) -> list[Array]:
        """The arrays of a call in shared memory. The objects stay the same as long as the memory does, so the executor
        keeps its bindings."""
        results = self._results.get(id(node))
        if results is None or results.memory is not memory:
            results = self._results[id(node)] = _Results(node, memory, views())
        return results.arrays


@dataclass(frozen=True, slots=True)
class _Results:
    """The arrays of a call in one memory."""

    node: Node
    memory: Array
    arrays: list[Array]


def unlink_mpich_files() -> None:
    """Unlink the files by which MPICH's ranks of a host communicate. All ranks have opened the files; killed ranks
    would leave megabytes in /dev/shm."""
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        for path in {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/mpich_shm_" in line}:
            Path(path).unlink(missing_ok=True)


def _has_spare_processors(host: Any) -> bool:
    """Return whether this host has two processors for each rank: a waiting call spins."""
    if not hasattr(os, "sched_getaffinity"):
        return bool((os.cpu_count() or 1) >= 2 * host.size)
    usable = set().union(*exchange(host, os.sched_getaffinity(0)))
    return bool(len(usable) >= 2 * host.size)


_SNAKE = {
    "AllReduce": "all_reduce", "Reduce": "reduce", "Broadcast": "broadcast", "ReduceScatter": "reduce_scatter",
    "AllGather": "all_gather", "AllToAll": "all_to_all", "Send": "send", "Recv": "recv",
}  # fmt: skip


@functools.cache
def _shapes(texts: tuple[str, ...]) -> list[tuple[int, ...]]:
    return parse_shapes(texts)
