"""Ranks as processes of ``torch.distributed``: process groups, the control plane, and how processes meet."""

from __future__ import annotations

import atexit
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gopt.collectives.table import COLLECTIVES
from gopt.errors import OptionError, RunError
from gopt.ir.graph import Node
from gopt.records.mesh import PIPELINE, Mesh
from gopt.runtime.engines.launcher_folder import STORE, launcher_folder
from gopt.runtime.engines.watchdog import Watchdog
from gopt.runtime.exchanged_values import decode, encode
from gopt.runtime.pytorch.calls import START
from gopt.runtime.pytorch.group_call import GroupCall, Tensors
from gopt.runtime.session import first_line
from gopt.runtime.shared_memory import NOT_SHARED, GatherRequest, Key, SendRequest, SharedMemory

_AFTER = 3.0
"""Seconds that a launcher has to name the rank that died, before the others report a broken connection."""
_SLACK = 60.0
"""Seconds beyond the deadline after which PyTorch itself gives a call up: the watchdog comes first."""
_MOST_REDUCTIONS = 2
"""Reductions on their way on the host, while further segments run."""

_DOWN = f"{PIPELINE} down"
"""The group of values for earlier stages, beside the group of values for later ones."""


class TorchEngine:
    """One process, one rank. Values of calls are tensors. A call longer than ``deadline`` seconds ends the job.

    ``device``: the device of the calls' tensors. Raises OptionError where the launcher started another number of ranks,
    RunError where no process group comes about."""

    overlaps = True
    shared_calls = 0

    def __init__(self, mesh: Mesh, device: torch.device, deadline: float, explain: Callable[[str], None]) -> None:
        self._mesh, self._device = mesh, device
        start_processes(device, deadline)
        self.rank: int = dist.get_rank()
        self.watchdog = Watchdog(deadline, explain, lambda: os._exit(RunError("").exit_code))
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._reductions: list[weakref.ref[StartedCall]] = []
        if any(ranks != dist.get_world_size() for ranks in self.gather(mesh.ranks)):
            raise OptionError(
                f"the launcher started {dist.get_world_size()} ranks, the folder holds {mesh.ranks}",
                f"start it with torchrun --nproc-per-node {mesh.ranks}, or make other ranks with gopt reshard",
            )
        names, sizes = zip(*mesh.axes)
        self.device_mesh: DeviceMesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
        self._groups: dict[str, Any] = {}
        self._started = weakref.WeakSet[StartedCall]()
        _ENGINES.add(self)

    def prepare(self, groups: Sequence[str]) -> None:
        for group in (group for group in groups if group not in self._groups):
            if len(self._mesh.split(group)) == 1:
                self._groups[group] = self.device_mesh.get_group(group)
            else:
                self._groups[group] = self._subgroup(group)
            if group == PIPELINE:  # a backend may run the calls of a group one behind the other
                self._groups[_DOWN] = self._subgroup(group)

    def _subgroup(self, group: str) -> Any:
        parts = dict.fromkeys(tuple(self._mesh.members(group, rank)) for rank in range(self._mesh.ranks))
        return dist.new_subgroups_by_enumeration([[*part] for part in parts])[0]

    def share(self, sends: Mapping[Key, SendRequest], gathers: Mapping[Key, GatherRequest]) -> SharedMemory:
        return NOT_SHARED

    def gather(self, item: Any) -> list[Any]:
        """The items of all ranks; bytes of other ranks are decoded, and never run."""
        with self.watchdog.on("the ranks' agreement"), named("the ranks' agreement"):
            while self._sent:
                self._sent.pop()[0].wait()
            data = torch.frombuffer(bytearray(encode(item)), dtype=torch.uint8)
            sizes = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
            dist.all_gather(sizes, torch.tensor([len(data)]))
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(data)] = data
            everything = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(everything, padded)
        return [decode(bytes(part[: int(size)].numpy())) for part, size in zip(everything, sizes)]

    def fail(self, error: BaseException) -> None:
        """End this rank at once; the launcher ends the others."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(getattr(error, "exit_code", 70))

    def call(self, index: int, node: Node, inputs: list[Any], buffer: Any = None) -> list[torch.Tensor]:
        return self.start(index, node, inputs).result()

    def start(self, index: int, node: Node, inputs: Tensors) -> StartedCall:
        """Start a call; raises RunError where PyTorch refuses it."""
        group = node.attributes["group"]
        what = f"call {index} ({node.op_type} over {group})"
        with named(what):
            attributes = COLLECTIVES[node.op_type].resolve(node.attributes)
            peer = attributes.get("peer", self.rank)
            down = group == PIPELINE and peer != self.rank and (node.op_type == "Send") is (peer < self.rank)
            call = GroupCall(
                attributes, inputs, self._groups[_DOWN if down else group], self._mesh.members(group, self.rank),
                self.rank, self._device, index, self._sent,
            )  # fmt: skip
            started = StartedCall(self.watchdog, what, START[node.op_type](call))
        if node.op_type == "ReduceScatter" and self._device.type == "cpu":
            self._finish_reductions(started)
        self._started.add(started)
        return started

    def leave(self) -> None:
        """Drop the process groups: threads of a group end with the last reference. Groups stay while a call waits,
        interrupted by an error: the thread would hold the process until the call times out."""
        if not any(call.waits for call in self._started):
            self._groups.clear()
            getattr(self.device_mesh, "_pg_registry", {}).clear()

    def _finish_reductions(self, started: StartedCall) -> None:
        """Wait for all reductions but the last two: parts of a whole gradient lie in memory until their sum."""
        running = [*self._reductions, weakref.ref(started)]
        for reference in running[:-_MOST_REDUCTIONS]:
            if (call := reference()) is not None:
                call.wait()
        self._reductions = running[-_MOST_REDUCTIONS:]


@dataclass(slots=True, weakref_slot=True, eq=False)
class StartedCall:
    """A call on its way."""

    watchdog: Watchdog
    what: str
    _finish: Callable[[], list[torch.Tensor]] | None
    _results: list[torch.Tensor] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        """Whether the outputs are still to come."""
        return self._finish is not None

    def wait(self) -> None:
        """Wait until the outputs are there."""
        if self._finish is not None:
            with self.watchdog.on(self.what), named(self.what):
                self._results, self._finish = self._finish(), None

    def result(self) -> list[torch.Tensor]:
        """Wait for the call; returns the outputs, or an empty list where they are undefined on this rank."""
        self.wait()
        return self._results


_ENGINES = weakref.WeakSet[TorchEngine]()
"""The engines of this process."""


class TorchCalls:
    """Starts a rank's calls during a step, in the file's order."""

    def __init__(
        self, engine: TorchEngine, position: Callable[[int], None], mark: Callable[[str, float, float], None]
    ) -> None:
        self._engine, self._position, self._mark = engine, position, mark

    def __call__(self, index: int, node: Node, inputs: list[Any], buffer: Any = None) -> StartedCall:
        self._position(index)
        begin = time.perf_counter()
        started = self._engine.start(index, node, inputs)
        self._mark(f"{node.op_type} {index} over {node.attributes['group']}", begin, time.perf_counter())
        return started

    def close(self) -> None:
        return None


@contextmanager
def named(what: str) -> Iterator[None]:
    """Raise PyTorch's errors as a RunError with the name of the call."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        time.sleep(_AFTER)
        raise RunError(f"{what} failed: {first_line(error)}", "perhaps another rank has ended") from error


# --- start of the processes -------------------------------------------------------------------------------------------


def local_rank() -> int:
    """The number of this process among the processes of its machine."""
    names = ("LOCAL_RANK", "SLURM_LOCALID", "PMI_RANK")
    return int(next((os.environ[name] for name in names if name in os.environ), 0))


def start_processes(device: torch.device, deadline: float) -> None:
    """Join the processes of the job, unless this process has done so. Raises RunError."""
    if dist.is_initialized():
        return
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    try:
        timeout = timedelta(seconds=deadline + _SLACK)
        dist.init_process_group(backend, timeout=timeout, **_meeting(timeout))
    except (RuntimeError, ValueError) as error:
        raise RunError(f"torch.distributed cannot start: {first_line(error)}") from error
    atexit.register(_leave)


def _leave() -> None:
    """End the threads of all groups: a thread of gloo aborts the process by giving a tensor back to Python after the
    end of the interpreter. A group lives, with all threads, until the last reference goes."""
    for engine in [*_ENGINES]:
        engine.leave()
    if dist.is_initialized():
        dist.destroy_process_group()


def _meeting(timeout: timedelta) -> dict[str, Any]:
    """Where the processes of the job meet: by the variables of torchrun, else of gopt's launcher or Slurm."""
    environment, folder = os.environ, launcher_folder()
    if environment.get("GROUP_WORLD_SIZE") == "1":
        # The store of the one agent still has the addresses of processes that ended before a restart. Agents of several
        # machines count restarts apart.
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return {"store": dist.PrefixStore(f"gopt/{attempt}", store), "rank": rank, "world_size": size}
    if "RANK" in environment:
        return {}
    if folder is not None:
        rank, size = int(environment["PMI_RANK"]), int(environment["PMI_SIZE"])
        return {"store": dist.FileStore(str(folder / STORE), size), "rank": rank, "world_size": size}
    if "SLURM_PROCID" not in environment:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    rank, size = int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"])
    host = environment.get("MASTER_ADDR") or _first_host(environment["SLURM_JOB_NODELIST"])
    port = environment.get("MASTER_PORT") or str(20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000)
    return {"init_method": f"tcp://{host}:{port}", "rank": rank, "world_size": size}


def _first_host(nodes: str) -> str:
    """``gpu[003-006,9],login`` -> ``gpu003``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if match is None:
        raise RunError(f"cannot read {nodes!r} as Slurm's list of nodes", "set MASTER_ADDR to the host of rank 0")
    return match[1] + (match[2] or "")
