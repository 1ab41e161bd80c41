"""Running statistics in place of batch statistics: BatchNorm in evaluation.

A running statistic S is updated as a S + b k V, a + b = 1, where V is the batch statistic read by the forward and k =
1, or n / (n - 1) for an unbiased variance of n elements. The coefficients are measured on the graph itself."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gopt.errors import UnsupportedError
from gopt.ir.graph import Node
from gopt.ir.graph_index import walk
from gopt.ir.node_kinds import record_of
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.offline.inference.forward_subgraph import ForwardSubgraph, evaluate
from gopt.operators.kinds import CASTS, MEANS, SPREADS
from gopt.text.sanitize import show

_LAYOUT = SPREADS | CASTS
_SCALE = frozenset(["Mul", "Div", "Sub", "Add", "Sqrt", "Reciprocal", "Pow", "Max", "Clip"])
_REDUCE = MEANS | {"ReduceSumSquare"}
_TOLERANCE = 1e-4


def evaluated(subgraph: ForwardSubgraph, statistics: Iterable[tuple[str, str]]) -> list[Node]:
    """Nodes that make, under the old names, the values read by BatchNorm in evaluation.

    ``statistics``: running statistics with new values. Raises UnsupportedError for a batch statistic with an unknown
    use in the forward."""
    replacements = [
        _as_evaluated(node) for node in subgraph.graph.nodes if id(node) in subgraph.nodes and _trains(node)
    ]
    for state, updated in statistics:
        producer = subgraph.index.producers.get(updated)
        if producer is None or _trains(producer):
            continue
        shared = _nearest_shared(subgraph, updated)
        batch = [name for name in shared if _over_batch(subgraph, name)]
        if batch or any(_elements(subgraph, name) == _elements(subgraph, state) for name in shared):
            replacements.append(_replaced(subgraph, state, updated, shared))
    return replacements


def _trains(node: Node) -> bool:
    return bool(record_of(node).running and node.attributes.get("training_mode"))


def _as_evaluated(node: Node) -> Node:
    attributes = {key: value for key, value in node.attributes.items() if key not in ("training_mode", "momentum")}
    return Node(node.op_type, node.inputs, node.outputs[:1], name=node.name, attributes=attributes)


def _nearest_shared(subgraph: ForwardSubgraph, updated: str) -> list[str]:
    """Values of the forward, computed from the batch, on the way to a new statistic, nearest first."""
    index = subgraph.index

    def fed(name: str) -> bool:
        return name in index.producers and name in subgraph.values and name in subgraph.fed

    return [name for name in walk([updated], lambda name: () if fed(name) else index.operands(name)) if fed(name)]


def _over_batch(subgraph: ForwardSubgraph, name: str) -> bool:
    """Return whether a value is a reduction over the first axis, except for layout and scale."""
    producers = subgraph.index.producers

    def following(value: str) -> Iterable[str]:
        node = producers.get(value)
        if node is not None and node.op_type in _LAYOUT:
            return node.inputs[:1]
        return (name for name in node.inputs if name in subgraph.fed) if node and node.op_type in _SCALE else ()

    nodes = (producers[value] for value in walk([name], following) if value in producers)
    return any(0 in _axes(subgraph, node) for node in nodes if node.op_type in _REDUCE)


def _axes(subgraph: ForwardSubgraph, node: Node) -> list[int]:
    """Axes reduced by a node, counted from the front."""
    shape = subgraph.graph.type_of(node.inputs[0]).shape
    rank = 0 if shape is None else len(shape)
    axes = subgraph.constants.axes(node)
    return [axis % rank if rank else axis for axis in (range(rank) if axes is None else axes)]


def _elements(subgraph: ForwardSubgraph, name: str) -> int:
    type = subgraph.graph.type_of(name)
    return type.elements if type.static else -1


def _replaced(subgraph: ForwardSubgraph, state: str, updated: str, shared: list[str]) -> Node:
    """The node from the running statistic to the batch statistic; raises UnsupportedError."""
    if len(shared) != 1 or _elements(subgraph, shared[0]) != _elements(subgraph, state):
        raise _unknown(state, f"it is updated from {', '.join(map(show, shared[:3]))}, not from one batch statistic")
    (value,) = shared
    producer = subgraph.index.producers[value]
    if len(producer.outputs) != 1 or not _over_batch(subgraph, value):
        raise _unknown(state, f"{show(value)} is not a sum or mean over the batch")
    why = _measured(subgraph, state, updated, value)
    if why:
        raise _unknown(state, why)
    shape = subgraph.graph.type_of(value).dims
    return Node("Reshape", [state, _constant(subgraph, value, shape)], [value], name=f"{value}.running")


def _measured(subgraph: ForwardSubgraph, state: str, updated: str, value: str) -> str:
    """Why a statistic is not a moving average of a batch statistic, or ''."""
    kinds = {name: subgraph.graph.type_of(name) for name in (state, value)}

    def at(running: float, batch: float) -> float:
        feeds = {
            state: np.full(kinds[state].dims, running, np.float32),
            value: np.full(kinds[value].dims, batch, np.float32),
        }
        array = evaluate(subgraph, updated, feeds)
        return float(array.reshape(-1)[0]) if np.ptp(array) < _TOLERANCE else float("nan")

    if any(kind.dtype != "float32" for kind in kinds.values()):
        return "it is not float32"
    try:
        base, old_share, new_share, mixed = at(0, 0), at(1, 0), at(0, 1), at(2, 3)
    except MemoryError:
        raise
    except Exception as error:  # whatever the reference evaluator has no rule for
        return f"its update cannot be evaluated ({type(error).__name__})"
    if not np.isclose(base, 0, atol=_TOLERANCE) or not np.isclose(
        mixed, 2 * old_share + 3 * new_share, rtol=_TOLERANCE
    ):
        return "its update is not a weighted mean"
    factor = new_share / (1 - old_share) if old_share < 1 else float("nan")
    if np.isclose(factor, 1, rtol=_TOLERANCE):
        return ""
    count = factor / (factor - 1) if factor > 1 else float("nan")  # n, of k = n / (n - 1)
    whole = np.isfinite(count) and abs(factor - round(count) / max(round(count) - 1, 1)) < _TOLERANCE
    return "" if whole and round(count) > 1 else f"it takes {factor:.4g} of the batch's part, not 1 or n/(n-1)"


def _constant(subgraph: ForwardSubgraph, value: str, shape: tuple[int, ...]) -> str:
    """The name of a new shape constant."""
    name = f"{value}.shape"
    while name in subgraph.graph.types or name in subgraph.graph.initializers:
        name += "_"
    subgraph.graph.initializers[name] = Tensor(TensorType("int64", (len(shape),)), array=np.array(shape, np.int64))
    return name


def _unknown(state: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the running statistic {show(state)} cannot take the place of the batch's: {why}",
        "export the module in evaluation mode (module.eval()), with torch.onnx.export",
    )
