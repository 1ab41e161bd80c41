"""The values of ranks as they compute them, in float64, beside the numbers of the expressions that the proof has."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gopt.collectives.table import COLLECTIVES
from gopt.ir.graph import COMM, Node
from gopt.ir.types import FLOATS, numpy_dtype
from gopt.verification.proof.evaluation import ExpressionValues, Unevaluable, computed
from gopt.verification.proof.folder import folder_relation
from gopt.verification.proof.prove import Prover
from gopt.verification.proof.samples import SampledLeaves

NEAR = 1e-3
"""Of the largest element: constants such as 1 - 0.999 are stored in float32, and the proof takes what is meant."""
Array = np.ndarray


class RankValues:
    """Ranks with one file each, all of a mesh, run side by side from drawn states and batches."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        prover = Prover(folder_relation(folder))
        prover.run()
        leaves = SampledLeaves(prover.training, prover.mesh, prover.constants, seed)
        self.mesh = prover.mesh
        self.numbers = [values.files[0] for values in prover.ranks]
        self.graphs = [rank.graphs["step"] for rank in prover.relation.ranks]
        self.expressions = ExpressionValues(prover.expressions, leaves.leaf, prover.constants.origins)
        self.values: list[dict[str, Array]] = [{} for _ in self.graphs]
        self.compared = 0

    def differences(self) -> Iterator[tuple[int, Node, str]]:
        """Rank, node and value whose expression has other numbers."""
        for rank, graph in enumerate(self.graphs):
            for name in (*graph.inputs, *graph.initializers):
                value = self._expected(rank, name)
                if value is None and name in graph.initializers:
                    value = np.asarray(graph.initializers[name].numpy())
                if value is not None:
                    fitted, dtype = _fitted(value, graph.types[name].dims), graph.types[name].dtype
                    self.values[rank][name] = fitted.astype(np.float64 if dtype in FLOATS else numpy_dtype(dtype))
        at = [0] * len(self.graphs)
        with warnings.catch_warnings(action="ignore"):
            while any(place < len(graph.nodes) for place, graph in zip(at, self.graphs)):
                before = list(at)
                for rank in range(len(at)):
                    yield from self._to_call(rank, at)
                for rank in range(len(at)):
                    yield from self._call(rank, at)
                assert at != before, "ranks wait for calls that never meet"

    def _to_call(self, rank: int, at: list[int]) -> Iterator[tuple[int, Node, str]]:
        graph, values = self.graphs[rank], self.values[rank]
        while at[rank] < len(graph.nodes) and graph.nodes[at[rank]].domain != COMM:
            node = graph.nodes[at[rank]]
            at[rank] += 1
            read = [name for name in (*node.inputs, *node.captures) if name]
            if not all(name in values for name in read):
                continue  # behind a random node
            for index, name in enumerate(node.outputs):
                if name:
                    try:
                        values[name] = _wide(computed(graph, node, index, [values[each] for each in read]))
                    except Unevaluable:
                        continue
                    yield from self._compared(rank, node, name)

    def _call(self, rank: int, at: list[int]) -> Iterator[tuple[int, Node, str]]:
        nodes = [graph.nodes[place] if place < len(graph.nodes) else None for place, graph in zip(at, self.graphs)]
        node = nodes[rank]
        if node is None or node.domain != COMM:
            return
        members = self.mesh.members(str(node.attributes["group"]), rank)
        together = [nodes[member] for member in members]
        if members[0] != rank or not all(
            other is not None and other.domain == COMM and other.attributes["group"] == node.attributes["group"]
            for other in together
        ):
            return
        for member in members:
            at[member] += 1
        given = [[self.values[member].get(name) for name in each.inputs] for member, each in zip(members, together)]
        if any(value is None for row in given for value in row):
            return
        rows = [[_wide(value) for value in row] for row in given]
        dtype = next(value.dtype.name for row in rows for value in row)
        attributes = {**node.attributes, **({"dtype": dtype} if "dtype" in node.attributes else {})}
        results = COLLECTIVES[node.op_type].execute(attributes, rows, dtype)
        for member, each, row in zip(members, together, results):
            for name, value in zip(each.outputs, row or []):
                self.values[member][name] = _wide(value)
                yield from self._compared(member, each, name)

    def _compared(self, rank: int, node: Node, name: str) -> Iterator[tuple[int, Node, str]]:
        value, due = np.asarray(self.values[rank][name]), self._expected(rank, name)
        if due is None:
            return
        self.compared += 1
        if due.size not in (1, value.size):
            yield rank, node, name
        elif value.dtype.kind != "f":
            if not np.array_equal(value, _fitted(due, value.shape)):
                yield rank, node, name
        elif not np.allclose(
            value, _fitted(due, value.shape), rtol=0, equal_nan=True,
            atol=NEAR * np.abs(value[np.isfinite(value)]).max(initial=1e-4),
        ):  # fmt: skip
            yield rank, node, name

    def _expected(self, rank: int, name: str) -> Array | None:
        number = self.numbers[rank].get(name)
        try:
            return None if number is None else self.expressions.values([number], self.mesh.coordinates(rank))[0]
        except Unevaluable:
            return None


def _wide(value: Array) -> Array:
    return value.astype(np.float64) if value.dtype.kind == "f" else value


def _fitted(value: Array, dims: tuple[int, ...]) -> Array:
    return value.reshape(dims) if value.size == np.prod(dims) else np.broadcast_to(value, dims)
