"""First states of a rank by a start-up graph, which has no inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gopt.errors import InputError, RunError
from gopt.ir.graph import Graph
from gopt.ir.load import load
from gopt.ir.types import TensorType, numpy_dtype
from gopt.runtime.executor import Executor
from gopt.runtime.session import Array, NoKernelError, SessionCache


def startup_values(path: Path, types: Mapping[str, TensorType], deadline: float | None = None) -> dict[str, Array]:
    """State -> the value computed by a start-up graph. ``types``: of all states that the graph may set.

    Raises InputError for a graph of other states or with inputs, RunError where the graph cannot run."""
    if not path.is_file():
        raise RunError(f"there is no file {path}", "shard again, copy it here, or take stored values: --no-startup")
    graph = load(path, own=True)
    missing = next(iter(graph.inputs), None)
    if missing is not None:
        raise InputError(f"{path}: a start-up graph has no inputs, and this one has {missing!r}", "shard again")
    unknown = next((name for name in graph.outputs if name not in types), None)
    if unknown is not None:
        raise InputError(f"{path}: it sets {unknown!r}, which is not a state here", "shard again")
    values = run_startup(graph, str(path), deadline)
    for name, value in values.items():
        type = types[name]
        if value.shape != type.dims or value.dtype != numpy_dtype(type.dtype):
            actual = TensorType(value.dtype.name, value.shape)
            raise InputError(f"{path}: {name!r} is {actual}, the state is {type}", "shard again")
    return values


def run_startup(graph: Graph, what: str, deadline: float | None = None) -> dict[str, Array]:
    """The outputs of a start-up graph; ``what``: the graph's name in messages.

    ``deadline``: the longest run of a piece, in seconds. Raises RunError where the graph cannot run. A session
    continues its random numbers, so each run has a session of its own. No other runtime steps in for a missing kernel:
    it would draw other numbers from the same seeds, on that rank alone."""
    try:
        return Executor(graph, SessionCache(deadline)).run({}, _no_call)
    except NoKernelError as error:
        raise RunError(
            f"{what}: {error.message}", "store the values in the model instead, or take stored ones: --no-startup"
        ) from error


def _no_call(index: int, node: object, inputs: list[Array]) -> list[Array]:
    raise RunError(f"a start-up graph has the collective {node}, and no rank waits for others at the start")
