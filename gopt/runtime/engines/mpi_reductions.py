"""How MPI's ranks combine arrays: the type, MPI's operator, and the mean.

float16 and bfloat16 are reduced in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gopt.collectives.layout import HALVES
from gopt.ir.graph import Node
from gopt.runtime.memory import Pool
from gopt.runtime.session import Array
from gopt.runtime.shared_memory import CallBuffer


def reduce_op(node: Node) -> str:
    """The reduction of a call: sum, mean, max or min."""
    how: str = node.attributes.get("reduce", "sum")
    return how


class Reductions:
    """A memory pool and MPI operators, created once, for all reductions of a rank."""

    def __init__(self, mpi: Any, pool: Pool) -> None:
        self._mpi, self._pool = mpi, pool
        self._nan_ops: dict[tuple[str, str], Any] = {}

    def upcast(self, inputs: Sequence[Array], buffer: CallBuffer | None) -> tuple[Array, np.dtype[Any] | None]:
        """The inputs as one flat buffer that may be overwritten, in the type of the combination."""
        dtype = inputs[0].dtype
        if dtype.name in HALVES or dtype == np.bool_:
            wide = np.dtype(np.uint8 if dtype == np.bool_ else np.float32)
            return np.concatenate([block.reshape(-1) for block in inputs]).astype(wide), dtype
        if isinstance(buffer, np.ndarray):
            return buffer, None
        flat = self._pool.take([sum(block.size for block in inputs)], dtype)
        np.concatenate([block.reshape(-1) for block in inputs], out=flat)
        return flat, None

    def mean(self, flat: Array, comm: Any, node: Node, narrow: np.dtype[Any] | None) -> Array:
        """Divide a sum in place where the call asks for a mean. Returned in the type of the call, ``narrow``, if
        ``upcast`` changed the type."""
        if reduce_op(node) == "mean":
            with np.errstate(all="ignore"):
                np.divide(flat, comm.size, out=flat)
        with np.errstate(over="ignore"):
            return flat if narrow is None else flat.astype(narrow)

    def op(self, node: Node, flat: Array) -> Any:
        """MPI's operator for a call."""
        how = reduce_op(node)
        if how not in ("max", "min"):
            return self._mpi.SUM
        if flat.dtype.kind != "f":
            return self._mpi.MAX if how == "max" else self._mpi.MIN
        key = (how, flat.dtype.str)
        if key not in self._nan_ops:
            self._nan_ops[key] = self._mpi.Op.Create(_nan_op(how, flat.dtype), commute=True)
        return self._nan_ops[key]


def _nan_op(how: str, dtype: np.dtype[Any]) -> Callable[[Any, Any, Any], None]:
    """An MPI operator for a maximum or minimum in which NaN wins. MPI's own operator may lose a NaN, and an overflow
    check would then miss it."""
    take = np.maximum if how == "max" else np.minimum

    def combine(sent: Any, received: Any, _: Any) -> None:
        local_shard, theirs = np.frombuffer(sent, dtype), np.frombuffer(received, dtype)
        take(local_shard, theirs, out=theirs)

    return combine
