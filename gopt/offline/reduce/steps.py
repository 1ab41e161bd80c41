"""The ways to make a graph smaller, largest removals with the fewest runs first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from onnx import ModelProto

from gopt.offline.reduce.chunks import remove_chunks
from gopt.offline.reduce.cut import cut
from gopt.offline.reduce.search import Search
from gopt.offline.reduce.sizes import SMALL, resized, sizes

Groups = Sequence[tuple[str, ...]]
"""Outputs that go together: the new values of a parameter and of its optimizer states."""

_SHORT = 16
"""Elements of a stored value that is as well kept as it would be an input."""


def remove_parameters(search: Search, groups: Groups) -> None:
    """Whole parameters: the new values of parameter and optimizer states are no outputs any more.

    The nodes behind them go along; the parameter itself stays as an input where the forward reads it."""

    def attempt(chunk: Groups) -> bool:
        names = {name for group in chunk for name in group}
        return search.attempt("parameters", cut(search.view, outputs=names))

    remove_chunks(groups, attempt, lambda group: any(name in search.view.outputs for name in group))


def remove_outputs(search: Search) -> None:
    """Graph outputs, and the nodes needed by nothing else."""

    def attempt(chunk: Sequence[str]) -> bool:
        return search.attempt("outputs", cut(search.view, outputs=set(chunk)))

    remove_chunks(search.view.outputs, attempt, lambda name: name in search.view.outputs)


def remove_nodes(search: Search) -> None:
    """Runs of nodes; results read by others become inputs."""
    alive = _NodePresence(search)

    def attempt(chunk: Sequence[str]) -> bool:
        return search.attempt("nodes", cut(search.view, nodes=set(chunk)))

    remove_chunks(search.view.keys, attempt, alive)


def bypass_nodes(search: Search) -> None:
    """Nodes with a result of the type of an input: readers read the input."""
    alive = _NodePresence(search)

    def attempt(chunk: Sequence[str]) -> bool:
        instead = _bypassed(search, set(chunk))
        return bool(instead) and search.attempt("bypasses", cut(search.view, instead=instead, nodes=set(instead)))

    remove_chunks(list(_bypassed(search, set(search.view.keys))), attempt, alive)


def _bypassed(search: Search, keys: set[str]) -> dict[str, str]:
    """Result -> the replacing value, of nodes with one result."""
    view = search.view
    replacements: dict[str, str] = {}
    for node in view.nodes:
        if len(node.output) != 1 or node.output[0] not in keys or node.output[0] in view.captured:
            continue
        kind = view.types.get(node.output[0])
        for name in node.input:
            source = view.types.get(name)
            if kind is not None and source is not None and source.type == kind.type:
                replacements[node.output[0]] = replacements.get(name, name)
                break
    return replacements


def drop_values(search: Search) -> None:
    """Stored values become inputs, or states without a value; shapes, axes and other short lists stay."""

    def attempt(chunk: Sequence[str]) -> bool:
        return search.attempt("values", cut(search.view, values=set(chunk)))

    long = [name for name, tensor in search.view.stored.items() if math.prod(tensor.dims) > _SHORT]
    remove_chunks(long, attempt, lambda name: name in search.view.stored)


def shrink_sizes(search: Search) -> None:
    """Dimensions become small: all at once, else one size after the other, to 2 or by halves."""
    lengths = sizes(search.view)
    if lengths and search.attempt("sizes", resized(search.view, dict.fromkeys(lengths, SMALL))):
        return
    for size in lengths:
        now = size
        while now > SMALL:
            tried = [small for small in dict.fromkeys((SMALL, now // 2)) if SMALL <= small < now]
            length = next((s for s in tried if search.attempt("sizes", resized(search.view, {now: s}))), None)
            if length is None:
                break
            now = length


def drop_comments(search: Search) -> None:
    """Documentation, metadata, types of inner values, and unused functions and operator sets."""
    model = ModelProto()
    model.CopyFrom(search.view.model)
    for node in model.graph.node:
        node.ClearField("doc_string")
        node.ClearField("metadata_props")
    del model.graph.value_info[:], model.metadata_props[:]
    used = {(node.domain, node.op_type) for node in model.graph.node}
    if not any((function.domain, function.name) in used for function in model.functions):
        del model.functions[:]
        domains = {"", *(domain for domain, _ in used)}
        imports = [entry for entry in model.opset_import if entry.domain in domains or entry.domain == "ai.onnx"]
        del model.opset_import[:]
        model.opset_import.extend(imports)
    search.attempt("comments", model)


class _NodePresence:
    """Whether a node is still in the graph: the set of keys is made once for each kept graph."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._view = search.view
        self._keys = set(self._view.keys)

    def __call__(self, key: str) -> bool:
        if self._view is not self._search.view:
            self._view = self._search.view
            self._keys = set(self._view.keys)
        return key in self._keys


STEPS: tuple[Callable[[Search], None], ...] = (remove_outputs, remove_nodes, bypass_nodes, shrink_sizes, drop_values)
