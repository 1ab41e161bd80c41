"""Runs a graph in float64: by ONNX Runtime where it has the kernels, else by NumPy.

A node without a kernel becomes a call and a split of the graph, as at a collective; the rest stays in sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from gopt.errors import RunError, UnsupportedError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.opaque.expand import expand
from gopt.ir.types import dtype_code, known
from gopt.operators.kinds import RECURRENT
from gopt.runtime import large_products
from gopt.runtime.blas_threads import one_blas_thread
from gopt.runtime.bound_calls import CollectiveCallback
from gopt.runtime.executor import EarlyResults, Executor, HeldInput, no_calls
from gopt.runtime.fallback_kernels import operators
from gopt.runtime.inlined_functions import inlined
from gopt.runtime.partition import Segment
from gopt.runtime.proto import build_model
from gopt.runtime.session import Array, SessionCache, first_line, session_of

FALLBACK = "Substitute"
"""A node that NumPy stands in for, as the program sees it."""


class Float64Graph:
    """A graph converted to float64 and compiled.

    ``substitutes`` counts the nodes run by NumPy. Raises RunError, and UnsupportedError where a node has neither a
    kernel nor a substitute."""

    def __init__(self, graph: Graph, cache: SessionCache) -> None:
        graph = inlined(expand(graph, "gopt.run"))
        self._fallback_nodes: dict[int, _FallbackNode] = {}
        try:
            if any(map(_only_built, graph.nodes)):
                raise UnsupportedError("ONNX Runtime does not run it")
            self._program = Executor(graph, cache)
        except (RunError, UnsupportedError):
            self._program = Executor(self._substituted(graph, cache), cache)
        self.graph = self._program.graph

    @property
    def substitutes(self) -> int:
        return len(self._fallback_nodes)

    def hold(self, feeds: Mapping[str, Array]) -> dict[str, HeldInput]:
        """As ``Executor.hold``."""
        return self._program.hold(feeds)

    @property
    def early_inputs(self) -> list[str]:
        """As ``Executor.early_inputs``."""
        return self._program.early_inputs

    def run(
        self, feeds: Mapping[str, Array | HeldInput], call: CollectiveCallback = no_calls,
        early: EarlyResults | None = None,
    ) -> dict[str, Array]:  # fmt: skip
        """Run once, as ``Executor.run``; ``call`` makes the collectives of the graph."""

        def answer(index: int, node: Node, inputs: list[Array]) -> Any:
            if node.op_type == FALLBACK:
                return self._fallback_nodes[index].run(inputs)
            return call(index, node, inputs)

        if not self._fallback_nodes:
            return self._program.run(feeds, answer, early)
        with one_blas_thread():
            return self._program.run(feeds, answer, early)

    def _substituted(self, graph: Graph, cache: SessionCache) -> Graph:
        """The graph with a call in place of every node without a kernel in ONNX Runtime."""
        trial = _KernelProbe(graph, cache)
        nodes: list[Node] = []
        calls = 0
        for node in graph.nodes:
            if node.domain != COMM and (_only_built(node) or not trial.accepts(node)):
                self._fallback_nodes[calls] = _FallbackNode(node, graph)
                reads = list(dict.fromkeys(node.reads))
                outputs = [name for name in node.outputs if name]
                node = Node(FALLBACK, reads, outputs, domain=COMM, name=node.label)
            nodes.append(node)
            calls += node.domain == COMM
        return replace(graph, nodes=nodes, types=trial.types)


def _only_built(node: Node) -> bool:
    """Return whether ONNX Runtime builds the operator in float64, and refuses to run it."""
    return node.is_in(RECURRENT)


class _KernelProbe:
    """Tests, once for each kind of node, whether ONNX Runtime has a kernel."""

    def __init__(self, graph: Graph, cache: SessionCache) -> None:
        self.types = dict(graph.types) | dict(graph.inputs)
        self.types |= {name: tensor.type for name, tensor in graph.initializers.items()}
        self._graph, self._cache = graph, cache
        self._known: dict[tuple[Any, ...], bool] = {}

    def accepts(self, node: Node) -> bool:
        if any(not known(self.types[name].dtype) if name in self.types else True for name in node.reads):
            return True  # cannot be tested; compilation reports it
        key = self._key(node)
        if key not in self._known:
            self._known[key] = self._try(node)
        return self._known[key]

    def _key(self, node: Node) -> tuple[Any, ...]:
        attributes = tuple(attribute.SerializeToString(deterministic=True) for attribute in node.to_proto().attribute)
        named = (*node.inputs, *node.captures, *node.outputs)
        dtypes = tuple(self.types[name].dtype if name in self.types else "" for name in named)
        ranks = tuple(len(self.types[name].shape or ()) for name in node.reads)
        return node.domain, node.op_type, attributes, dtypes, ranks, tuple(map(bool, node.outputs))

    def _try(self, node: Node) -> bool:
        outputs = tuple(name for name in node.outputs if name)
        segment = Segment((node,), tuple(dict.fromkeys(node.reads)), outputs)
        try:
            session_of(segment, self._graph, dict(self.types), self._cache)
        except (RunError, UnsupportedError):
            return False
        return True


class _FallbackNode:
    """One node, run by onnx's reference evaluator with the operators of ``fallback_kernels``."""

    def __init__(self, node: Node, graph: Graph) -> None:
        from onnx.reference import ReferenceEvaluator

        self.label = f"{node.op_type} {node.label!r}"
        self.names = list(dict.fromkeys(node.reads))
        self.outputs = [name for name in node.outputs if name]
        self.dtypes = [graph.type_of(name).dtype for name in self.outputs]
        types = {name: graph.type_of(name) for name in (*self.names, *self.outputs)}
        model = build_model(
            graph.header, [node], {name: types[name] for name in self.names}, {n: types[n] for n in self.outputs}
        )
        try:
            products = large_products.KERNELS if node.op_type in dict(large_products.KERNELS) else ()
            self._evaluator = ReferenceEvaluator(model, new_ops=list(operators(products)))
        except Exception as error:  # it raises whatever it meets
            raise UnsupportedError(f"nothing runs {self.label} in float64: {first_line(error)}") from error

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        try:
            with np.errstate(all="ignore"):
                results = self._evaluator.run(None, dict(zip(self.names, inputs)))
        except Exception as error:
            raise RunError(f"{self.label} failed in float64: {first_line(error)}") from error
        return [_typed(result, dtype) for result, dtype in zip(results, self.dtypes)]


def _typed(result: Any, dtype: str) -> Array:
    """The result in the declared type, which the evaluator does not always return."""
    array = np.asarray(result)
    wanted = onnx.helper.tensor_dtype_to_np_dtype(dtype_code(dtype)) if known(dtype) else array.dtype
    return np.require(array if array.dtype == wanted else array.astype(wanted), requirements="C")
