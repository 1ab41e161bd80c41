"""The local part of the source on all data ranks at once, where ranks average values on the way (statistics sync).

Which values, the manifest says: it shares the list with the ranks, and nothing of how their graphs were rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from gopt.analysis.synchronised_values import SynchronisedValues
from gopt.errors import InputError
from gopt.ir.graph import COMM, Graph, Node, clone
from gopt.ir.types import numpy_dtype
from gopt.mesh import Mesh
from gopt.runtime.bound_calls import CollectiveCallback
from gopt.runtime.engines.threads import run_ranks
from gopt.runtime.executor import Executor
from gopt.verification.compare import Values

VERIFIER_CALL = "verify"
"""``made_by`` of the calls that are put in: all others the source has itself."""


def with_shared_means(graph: Graph, shared: SynchronisedValues) -> Graph:
    """The graph with every shared value replaced by its mean over the group ``shard`` for all that reads it."""
    points, constants = set(shared.points), {each.output: each for each in shared.corrected}
    lost = (points | constants.keys()) - {name for node in graph.nodes for name in node.outputs}
    if lost:
        raise InputError(
            f"the manifest says that ranks share {sorted(lost)[0]!r}, which the source does not have",
            "verify the folder with the step that it was made from",
        )
    types = graph.types | {f"{name}.mean": graph.types[name] for name in points}
    nodes: list[Node] = []
    for old in graph.nodes:
        node = clone(old)
        node.inputs = [f"{name}.mean" if name in points else name for name in node.inputs]
        fixed = next((constants[name] for name in node.outputs if name in constants), None)
        if fixed is not None:
            type, name = types[fixed.constant], f"{fixed.output}.constant"
            value = onnx.numpy_helper.from_array(np.full(type.dims, fixed.value, numpy_dtype(type.dtype)))
            nodes.append(Node("Constant", [], [name], attributes={"value": value}))
            types[name] = type
            node.inputs = [name if each == fixed.constant else each for each in node.inputs]
        nodes.append(node)
        for name in points.intersection(node.outputs):
            given = {"group": "shard", "reduce": "mean"}
            nodes.append(
                Node("AllReduce", [name], [f"{name}.mean"], domain=COMM, attributes=given, made_by=VERIFIER_CALL)
            )
    return replace(graph, nodes=nodes, types=types)


@dataclass(frozen=True, slots=True)
class _ReferenceRank:
    """A rank of the reference: calls of the source are answered as for one rank, ours by all."""

    program: Executor
    own: CollectiveCallback

    def run(self, feeds: Values, call: CollectiveCallback) -> Values:
        def answer(index: int, node: Node, inputs: list[np.ndarray]) -> Any:
            return (call if node.made_by == VERIFIER_CALL else self.own)(index, node, inputs)

        return self.program.run(feeds, answer)


def run_in_lockstep(program: Executor, feeds: Sequence[Values], own: CollectiveCallback) -> list[Values]:
    """Run the program for every data rank with its own feeds; returns the results of each."""
    mesh = Mesh((("shard", len(feeds)),))
    return run_ranks([_ReferenceRank(program, own) for _ in feeds], list(feeds), mesh)
