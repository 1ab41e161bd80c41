"""Evaluates a graph once more by a second engine: sources and ranks on one engine share its errors.

The engine is onnx's reference evaluator if quick, else ONNX Runtime without any rewrites. After a difference by more
than rounding, each node, and each node with the nodes in front, runs alone on the same operands: the first node that
differs at every tried point is named."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gopt.analysis.training import TrainingGraph
from gopt.errors import GoptError, RunError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.graph_index import GraphIndex, ancestors
from gopt.ir.node_kinds import elementwise
from gopt.ir.opaque.expand import expand
from gopt.ir.types import TensorType
from gopt.runtime.bound_calls import CollectiveCallback
from gopt.runtime.emulate_half import emulate_half
from gopt.runtime.executor import Executor
from gopt.runtime.inlined_functions import inlined
from gopt.runtime.memory import give_back
from gopt.runtime.reference_eval import evaluate, seconds
from gopt.runtime.session import CPU, SessionCache, make_session
from gopt.verification.compare import Values, floating, length, same_bits, tolerance_of
from gopt.verification.engine_check import EngineCheck, EngineDifference
from gopt.verification.piecewise import pieces
from gopt.verification.reference_graphs import local_graph, subgraph, update_graph
from gopt.verification.sensitivity import MULTIPLE, UNITS, perturbed
from gopt.verification.source_members import run_source

REFERENCE, PLAIN, TORCH = "onnx's reference evaluator", "ONNX Runtime without rewrites", "PyTorch"
SECONDS = 2.0
"""Seconds that the reference evaluator may take by the estimate; above, sessions without rewrites run."""
LOOKED_AT = 1 << 31
"""Bytes of all values of a graph up to which nodes are compared one by one."""
TOGETHER = 1 << 28
"""Bytes of results that are compared at a time."""
MOST_ELEMENTS = 1 << 22
"""Elements of a value that an update is compared on where it does the same with each."""
DEPTH, MOST = 4, 12
"""Nodes in a row, and nodes in all, that a rewrite may join."""
POINTS, JITTER = 3, 0.05
"""Operands on which a node must differ: its own, and others near them, where no maximum ties."""


class PlainSessions(SessionCache):
    """Sessions without rewrites."""

    def build(self, model: bytes, *, empty: bool = False) -> Any:
        return make_session(model, [CPU], empty=empty, rewrites=False, keep=self.keep)


def check_step(
    training: TrainingGraph, values: Values, cache: SessionCache, call: CollectiveCallback,
    known: Values | None = None, second: SessionCache | None = None,
) -> list[EngineCheck]:  # fmt: skip
    """One step on one batch: up to the gradients, and their update. ``values``: all inputs of the step; ``known``: the
    first engine's results up to the gradients, if there already; ``second``: PyTorch, in place of the usual second
    engine."""
    try:
        local, update = local_graph(training), update_graph(training)
        results = dict(known) if known is not None else run_source(Executor(local, cache), values, call)
        shared = {name: results[local] for name, local in training.shared.items()}
        updates = [_first_rows(part) for part in _parts(update)]
        whole = {name for part, rows in updates for name in part.inputs if name not in rows}
        for name in results:
            counts = [rows[name] for _, rows in updates if name in rows]
            if results[name].nbytes > TOGETHER and counts and name not in whole:
                results[name] = results[name][: counts[0]].copy()  # what is left of it is not held any longer
        checks = [compare_engines(part, values, results, cache, call, second) for part in _parts(local)]
        for part, rows in updates:
            feeds = {**values, **results, **shared}
            feeds |= {name: feeds[name][:count] for name, count in rows.items() if name in feeds}
            results = run_source(Executor(part, cache), feeds, call)
            checks.append(compare_engines(part, feeds, results, cache, call, second))
        return checks
    except GoptError as error:
        return [EngineCheck("", why=error.message)]


def _parts(graph: Graph) -> Iterator[Graph]:
    """A graph, cut where results take more than TOGETHER bytes, or a quarter of all: both engines' results are held at
    a time."""
    sizes = {name: type.nbytes if type.static else 0 for name, type in graph.outputs.items()}
    most = max(TOGETHER, sum(sizes.values()) // 4)
    names: list[str] = []
    nbytes = 0
    for name, size in sizes.items():
        if names and nbytes + size > most:
            yield subgraph(graph, graph.nodes, names, ())
            names, nbytes = [], 0
        names.append(name)
        nbytes += size
    yield subgraph(graph, graph.nodes, names, ()) if len(names) < len(graph.outputs) else graph


def _first_rows(update: Graph) -> tuple[Graph, dict[str, int]]:
    """An elementwise update on the first rows of large values, and the numbers of rows; any other update unchanged."""
    types = {name: update.type_of(name) for node in update.nodes for name in (*node.reads, *node.outputs) if name}
    types |= update.inputs | update.outputs
    if not all(type.static for type in types.values()):
        return update, {}
    for node in update.nodes:
        dims = {types[name].dims for name in (*node.reads, *node.outputs) if name and types[name].elements != 1}
        if not elementwise(node) or node.captures or len(dims) > 1:
            return update, {}
    rows = {
        name: max(1, MOST_ELEMENTS * type.dims[0] // type.elements)
        for name, type in types.items() if type.elements > MOST_ELEMENTS
    }  # fmt: skip
    if any(name in rows for name in update.initializers.keys() - update.inputs.keys()):
        return update, {}
    cut = {name: TensorType(types[name].dtype, (count, *types[name].dims[1:])) for name, count in rows.items()}
    part = replace(
        update, types=update.types | cut,
        inputs={name: cut.get(name, type) for name, type in update.inputs.items()},
        outputs={name: cut.get(name, type) for name, type in update.outputs.items()},
        initializers={name: tensor for name, tensor in update.initializers.items() if name not in cut},
    )  # fmt: skip
    return part, rows


def compare_engines(
    graph: Graph, values: Mapping[str, np.ndarray], results: Values, cache: SessionCache, call: CollectiveCallback,
    second: SessionCache | None = None,
) -> EngineCheck:  # fmt: skip
    """Compare a graph's results (``results``, or first rows) with a second engine's on the same operands."""
    if not cache.keep:
        give_back()
    graph = emulate_half(inlined(expand(graph, "gopt.run")))
    feeds = {name: np.asarray(values[name]) for name in graph.inputs if name in values}
    engine, due, why = _second(graph, feeds, cache, call, second)
    if due is None:
        return EngineCheck("", why=why)
    tolerance = tolerance_of(graph)
    apart = [name for name in due if not _near(results[name], _as_many(due[name], results[name]), tolerance)]
    check = EngineCheck(engine, len(due))
    if not apart:
        return check
    again = run_source(Executor(graph, cache), feeds, call)
    if any(not _near(results[name], _as_many(again[name], results[name]), tolerance) for name in apart):
        return EngineCheck("", why="the step draws random numbers")
    try:
        return _Search(graph, feeds, call, tolerance, apart, second).explain(check, again)
    except GoptError as error:
        return replace(check, unexplained=tuple(apart), why=error.message)


def _as_many(value: np.ndarray, results: np.ndarray) -> np.ndarray:
    """The first rows of a value, if ``results`` has these alone."""
    return value[: len(results)] if value.ndim == results.ndim > 0 and value.size > MOST_ELEMENTS else value


def _second(
    graph: Graph, feeds: Values, cache: SessionCache, call: CollectiveCallback, second: SessionCache | None
) -> tuple[str, Values | None, str]:
    if second is not None:
        try:
            return TORCH, run_source(Executor(graph, second), feeds, call), ""
        except GoptError as error:
            return "", None, error.message
    if seconds(graph) <= SECONDS:
        try:
            return REFERENCE, evaluate(graph, feeds), ""
        except GoptError:
            pass  # it lacks an operator, or computes it in other types
    try:
        return PLAIN, run_source(Executor(graph, PlainSessions(keep=cache.keep)), feeds, call), ""
    except GoptError as error:
        return "", None, error.message


# --- which node it is -------------------------------------------------------------------------------------------------


class _Search:
    """Looks for the first differing node behind the differing values."""

    def __init__(
        self, graph: Graph, feeds: Values, call: CollectiveCallback, tolerance: float, apart: list[str],
        second: SessionCache | None,
    ) -> None:  # fmt: skip
        self.graph, self.tolerance, self.apart, self.second = graph, tolerance, apart, second
        nbytes = sum(type.nbytes for type in graph.types.values() if type.static)
        if nbytes > LOOKED_AT:
            raise RunError(f"its values take {nbytes} bytes, too many to compare node by node")
        index = GraphIndex(graph)
        cone, _ = ancestors(index, apart)
        self.nodes = [node for node in graph.nodes if id(node) in cone and node.domain != COMM]
        self.producers = index.producers
        outputs = {name: graph.type_of(name) for node in self.nodes for name in node.outputs if name}
        program = Executor(replace(graph, outputs={**outputs, **graph.outputs}), PlainSessions())
        self.values = feeds | run_source(program, feeds, call)
        random = np.random.default_rng(4)
        moved = {name: perturbed(v, UNITS.get(str(v.dtype), 0.0), random) for name, v in feeds.items()}
        self.moved = run_source(program, moved, call)
        self.values |= {n: np.asarray(t.numpy()) for n, t in graph.initializers.items() if n not in self.values}

    def explain(self, check: EngineCheck, results: Values) -> EngineCheck:
        """The check with the differing node, if any."""
        rewritten = [
            name for name in self.apart
            if _excess(self.values[name], results[name], self.moved[name], self.tolerance) > 0
        ]  # fmt: skip
        for node in self.nodes if check.engine in (REFERENCE, TORCH) else ():
            if difference := self._differs(node, [node], self._independent):
                return replace(check, difference=replace(difference, rewritten=False, engine=check.engine))
        for node in self.nodes if rewritten else ():
            if difference := self._differs(node, self._window(node), self._rewritten):
                return replace(check, difference=difference)
        return replace(check, unexplained=tuple(rewritten))

    def _window(self, node: Node) -> list[Node]:
        """A node and the nodes in front, up to DEPTH in a row."""
        window, level = {id(node): node}, [node]
        for _ in range(DEPTH - 1):
            before = [self.producers[name] for reader in level for name in reader.reads if name in self.producers]
            level = [maker for maker in before if id(maker) not in window and maker.domain != COMM]
            window.update((id(node), node) for node in level[: MOST - len(window)])
        return [node for node in self.nodes if id(node) in window]

    def _differs(
        self, node: Node, nodes: list[Node], engine: Callable[[Graph], Callable[[Values], Values]]
    ) -> EngineDifference | None:
        """Return the difference of a node's results where engines differ on the node's operands and on near operands,
        by more than the rounding of the operands."""
        computed = {name for node in nodes for name in node.outputs}
        stops = {name for node in nodes for name in node.reads if name in self.producers and name not in computed}
        part = subgraph(self.graph, nodes, [name for name in node.outputs if name in self.values], stops)
        operands = {name: self.values[name] for name in part.inputs if name in self.values}
        if not part.outputs or operands.keys() != part.inputs.keys():
            return None
        try:
            plain, second = self._plain(part), engine(part)
        except GoptError:
            return None
        random, worst = np.random.default_rng(3), None
        for point in range(POINTS):
            moved = {n: _jittered(v, random) if point else v for n, v in operands.items()}
            try:
                one, two = plain(moved), second(moved)
                if all(_near(one[name], two[name], self.tolerance) for name in one):
                    return None
                near = plain({n: perturbed(v, UNITS.get(str(v.dtype), 0.0), random) for n, v in moved.items()})
            except GoptError:
                return None
            errors = {n: _excess(one[n], two[n], near[n], self.tolerance) for n in one}
            name = max(errors, key=lambda name: errors[name])
            if errors[name] <= 0:
                return None
            worst = worst or (name, errors[name])
        if worst is None:
            return None
        return EngineDifference(f"{node.op_type} {node.label!r}", worst[0], worst[1], rewritten=True)

    def _plain(self, part: Graph, sessions: SessionCache | None = None) -> Callable[[Values], Values]:
        program = Executor(part, sessions or PlainSessions())
        return lambda feeds: program.run(feeds)

    def _rewritten(self, part: Graph) -> Callable[[Values], Values]:
        return self._plain(part, SessionCache())

    def _independent(self, part: Graph) -> Callable[[Values], Values]:
        return (lambda feeds: evaluate(part, feeds)) if self.second is None else self._plain(part, self.second)


def _jittered(value: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A value near a given floating value."""
    if not floating(value) or not value.size:
        return value
    wide = np.asarray(value, np.float64)
    size = length(wide) / np.sqrt(value.size)
    if not np.isfinite(size):
        return value
    return np.asarray(wide + JITTER * (size or 1.0) * random.standard_normal(value.shape)).astype(value.dtype)


def _near(one: np.ndarray, two: np.ndarray, tolerance: float) -> bool:
    return _excess(one, two, one, tolerance) <= 0


def _excess(one: np.ndarray, two: np.ndarray, near: np.ndarray, tolerance: float) -> float:
    """The distance of two values as a share of their size; 0 where rounding may be the cause: within the tolerance, and
    MULTIPLE times the first's movement (to ``near``). NaN or infinity in both agrees."""
    if one.shape != two.shape:
        return float("inf")
    if near is one and same_bits(one.ravel(), two.ravel()):
        return 0.0
    steady = alike = True
    apart = moved = first_size = second_size = 0.0
    with np.errstate(all="ignore"):
        for some in pieces(one, two, near):
            array_a, array_b, array_c = (np.asarray(value, np.float64) for value in some)
            finite_a, finite_b = np.isfinite(array_a), np.isfinite(array_b)
            finite_c = finite_a if near is one else np.isfinite(array_c)
            steady &= np.array_equal(finite_a, finite_c)
            alike &= np.array_equal(finite_a, finite_b)
            sound: Any = finite_a & finite_b
            finite_all: Any = sound & finite_c
            if finite_all.all():
                sound = finite_all = ...  # nothing is copied
            apart = math.hypot(apart, length((array_a - array_b)[sound]))
            moved = math.hypot(moved, length((array_a - array_c)[finite_all])) if near is not one else 0.0
            first_size = math.hypot(first_size, length(array_a[sound]))
            second_size = math.hypot(second_size, length(array_b[sound]))
    if not alike:
        return float("inf") if steady else 0.0
    size = max(first_size, second_size)
    allowed = (tolerance * size if floating(one) else 0.0) + MULTIPLE * moved
    return apart / size if apart > allowed and size else 0.0
