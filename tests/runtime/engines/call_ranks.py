"""One rank of three, under a launcher: every call of an engine (``mpi``, ``nccl``, ``torch``) against the reference.

Prints, on the first rank, how many calls were compared. Differences of all ranks end it with 1.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from test_nccl import cases, typed

from gopt.ir.graph import COMM, Node
from gopt.records.mesh import Mesh

LOOSE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-6, "float64": 1e-14}
"""Both add in an order of their own."""


def compare(mine: np.ndarray, theirs: np.ndarray, how: str | None, dtype: str) -> None:
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    if how in ("sum", "mean") and dtype in LOOSE:
        bound = LOOSE[dtype]
        np.testing.assert_allclose(mine.astype("f8"), theirs.astype("f8"), rtol=bound, atol=4 * bound)
    else:
        np.testing.assert_array_equal(mine, theirs)


def run(device: Any, engine: Any, rank: int) -> tuple[int, list[str]]:
    compared, wrong = 0, []
    for case in cases():
        op, _, _, how = case
        for full, given, wanted, dtype in typed(case):
            inputs = [device.to_device(array) for array in given[rank]]
            found = engine.call(compared, Node(op, ["x"], ["y"], domain=COMM, attributes=full), inputs)
            try:
                for mine, theirs in zip(map(device.to_host, found), wanted[rank], strict=True):
                    compare(mine, theirs, how, dtype)
                for block, array in zip(inputs, given[rank], strict=True):
                    np.testing.assert_array_equal(device.to_host(block), array)
            except (AssertionError, ValueError) as error:
                wrong.append(f"rank {rank}: {op} {full} {dtype}: {error}")
            compared += 1
    return compared, wrong


class Memory:
    """The arrays that engine ``mpi`` takes, which is on no device."""

    @staticmethod
    def to_device(array: np.ndarray) -> np.ndarray:
        return array.copy()

    @staticmethod
    def to_host(array: np.ndarray) -> np.ndarray:
        return array


def on_mpi(mesh: Mesh) -> tuple[Any, Any]:
    from gopt.runtime.engines.mpi import MpiEngine

    return MpiEngine(mesh, 120.0, lambda text: None), Memory


def on_nccl(mesh: Mesh) -> tuple[Any, Any]:
    from gopt.runtime.engines.mpi import MpiEngine
    from gopt.runtime.engines.nccl import on_gpus

    return on_gpus(mesh, MpiEngine(mesh, 120.0, lambda text: None))[:2]


def on_torch(mesh: Mesh) -> tuple[Any, Any]:
    from gopt.runtime.pytorch.device import device_of_rank
    from gopt.runtime.pytorch.engine import TorchEngine

    device = device_of_rank()
    return TorchEngine(mesh, device.torch_device, 120.0, lambda text: None), device


def main(transport: Any) -> None:
    mesh = Mesh.parse("shard=3")
    engine, device = transport(mesh)
    engine.prepare(["shard"])
    compared, wrong = run(device, engine, engine.rank)
    wrong = [each for rank in engine.gather(wrong) for each in rank]
    if engine.rank == 0:
        print(compared)
        print("\n".join(wrong), file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main({"mpi": on_mpi, "nccl": on_nccl, "torch": on_torch}[sys.argv[1]])
