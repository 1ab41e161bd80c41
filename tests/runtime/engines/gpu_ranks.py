"""One rank of ``test_nccl_gpu.test_calls_of_three_ranks``, under mpiexec: every call over NCCL against the reference.

Prints, on the first rank, how many calls were compared. Differences of all ranks end it with 1.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from test_nccl import cases, typed

from gopt.ir.graph import COMM, Node
from gopt.records.mesh import Mesh
from gopt.runtime.engines.mpi import MpiEngine
from gopt.runtime.engines.nccl import on_gpus

LOOSE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-6, "float64": 1e-14}
"""NCCL adds in an order of its own."""


def compare(mine: np.ndarray, theirs: np.ndarray, how: str | None, dtype: str) -> None:
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    if how in ("sum", "mean") and dtype in LOOSE:
        bound = LOOSE[dtype]
        np.testing.assert_allclose(mine.astype("f8"), theirs.astype("f8"), rtol=bound, atol=4 * bound)
    else:
        np.testing.assert_array_equal(mine, theirs)


def run(gpu: Any, engine: Any, rank: int) -> tuple[int, list[str]]:
    compared, wrong = 0, []
    for case in cases():
        op, _, _, how = case
        for full, given, wanted, dtype in typed(case):
            inputs = [gpu.to_device(array) for array in given[rank]]
            found = engine.call(compared, Node(op, ["x"], ["y"], domain=COMM, attributes=full), inputs)
            try:
                for mine, theirs in zip(map(gpu.to_host, found), wanted[rank], strict=True):
                    compare(mine, theirs, how, dtype)
                for block, array in zip(inputs, given[rank], strict=True):
                    np.testing.assert_array_equal(gpu.to_host(block), array)
            except (AssertionError, ValueError) as error:
                wrong.append(f"rank {rank}: {op} {full} {dtype}: {error}")
            compared += 1
    return compared, wrong


def main() -> None:
    mesh = Mesh.parse("shard=3")
    control = MpiEngine(mesh, 120.0, lambda text: None)
    engine, gpu, _ = on_gpus(mesh, control)
    engine.prepare(["shard"])
    compared, wrong = run(gpu, engine, control.rank)
    wrong = [each for rank in engine.gather(wrong) for each in rank]
    if control.rank == 0:
        print(compared)
        print("\n".join(wrong), file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
