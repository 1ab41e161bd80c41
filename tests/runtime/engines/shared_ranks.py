"""One rank of ``test_shared.py``, under mpiexec: reductions in shared memory against the reference, bit for bit.

Arguments: the mesh, then what goes wrong (``nothing``; on the last rank: ``allocate``, ``map``). Prints, on the first
rank, how many calls share memory. Ranks are late in turn, in writing and in reading, and write again at once.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import Any

import ml_dtypes
import numpy as np

from gopt.collectives.table import COLLECTIVES
from gopt.ir.graph import COMM, Node
from gopt.records.mesh import Mesh
from gopt.runtime.engines.mpi import MpiEngine
from gopt.runtime.shared_memory import SendRequest

LENGTH = (1 << 16) + 70_000
"""More than a tile, and bytes of any type enough."""
LATE = 0.005
DTYPES = {"float32": "f4", "float64": "f8", "float16": "f2", "bfloat16": ml_dtypes.bfloat16, "int32": "i4", "bool": "?"}


class Late:
    """A communicator; where all have come, this rank goes on ``by`` seconds later. It leaves the processor to the ranks
    that it waits for: MPI's own barrier would keep it."""

    by = 0.0

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def Barrier(self) -> None:
        come = self.comm.Ibarrier()
        while not come.Test():
            os.sched_yield()
        time.sleep(self.by)


def cases(mesh: Mesh, group: str) -> list[tuple[Node, str]]:
    count = mesh.size(group)
    uneven = [0, *(LENGTH * part // count + 13 for part in range(1, count)), LENGTH]
    empty = [0, *[LENGTH] * count]
    made = []
    for dtype in DTYPES:
        for how in ("sum", "mean", "max", "min"):
            if (dtype == "bool" and how in ("sum", "mean")) or (dtype == "int32" and how == "mean"):
                continue
            made.append(("AllReduce", {"group": group, "reduce": how}, dtype))
            made.append(("ReduceScatter", {"group": group, "reduce": how, "cuts": uneven}, dtype))
    made.append(("ReduceScatter", {"group": group, "cuts": empty}, "float32"))
    return [(Node(op, ["a"], ["b"], domain=COMM, attributes=given), dtype) for op, given, dtype in made]


def drawn(rank: int, turn: int, dtype: str) -> np.ndarray:
    generator = np.random.default_rng([rank, turn])
    values = generator.standard_normal(LENGTH) * 10.0 ** generator.integers(-6, 5, LENGTH)
    values[generator.integers(0, LENGTH, 50)] = np.nan
    values[generator.integers(0, LENGTH, 50)] = np.inf
    with np.errstate(all="ignore"):
        return (values > 0 if dtype == "bool" else values).astype(DTYPES[dtype])


def main() -> None:
    mesh, fault = Mesh.parse(sys.argv[1]), sys.argv[2]
    engine: Any = MpiEngine(mesh, 120.0, lambda text: print(text, file=sys.stderr))
    try:
        check(engine, mesh, fault)
    except BaseException as error:  # the others wait for this rank
        traceback.print_exc()
        engine.fail(error)


def check(engine: Any, mesh: Mesh, fault: str) -> None:
    last = engine.rank == mesh.ranks - 1
    if fault == "allocate" and last:
        os.posix_fallocate = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    if fault == "map" and last:
        os.readlink = lambda _: "/memfd:another (deleted)"
    groups = [*(name for name, _ in mesh.axes), "+".join(name for name, _ in mesh.axes)]
    groups = list(dict.fromkeys(groups))
    # Every case once: of several groups, each has its share of them.
    listed = [
        (group, place, *each) for number, group in enumerate(groups)
        for place, each in enumerate(cases(mesh, group)) if place % len(groups) == number
    ]  # fmt: skip
    engine.prepare(groups)
    requests = {
        (group, place): SendRequest(node, LENGTH, np.dtype(DTYPES[dtype])) for group, place, node, dtype in listed
    }
    shared = engine.share(requests, {}).sends
    engine._groups = {group: Late(comm) for group, comm in engine._groups.items()}
    for turn, (group, place, node, dtype) in enumerate(listed):
        Late.by = LATE * (engine.rank == turn % mesh.ranks)
        time.sleep(LATE * (engine.rank == (turn + 1) % mesh.ranks and turn % 3 == 0))
        granted = shared.get((group, place))
        buffer = np.empty(LENGTH, DTYPES[dtype]) if granted is None else granted.memory
        buffer[:] = drawn(engine.rank, turn, dtype)
        pair = [buffer[:1000].reshape(10, 100), buffer[1000:]]
        found = [each.copy() for each in engine.call(turn, node, pair, buffer if granted is None else granted)]
        buffer[:] = 0  # at once: whoever still read it would be wrong
        members = mesh.members(group, engine.rank)
        given = [[each[:1000].reshape(10, 100), each[1000:]] for each in (drawn(m, turn, dtype) for m in members)]
        due = COLLECTIVES[node.op_type].execute(node.attributes, given, dtype)[members.index(engine.rank)]
        for one, other in zip(found, due, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype, (node, dtype)
            if fault == "nothing":
                assert one.tobytes() == other.tobytes(), (turn, node, dtype)
            elif len(members) == 2:  # MPI sums more of them in an order of its own
                assert np.array_equal(one.astype("f8"), other.astype("f8"), equal_nan=True), (turn, node, dtype)
    if engine.rank == 0:
        print(engine.shared_calls, "of", len(listed))


if __name__ == "__main__":
    main()
