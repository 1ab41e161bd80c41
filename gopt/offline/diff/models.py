"""Compare two models: operator sets, functions, inputs, outputs, states, nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from gopt.analysis.role_map import RoleMap
from gopt.analysis.training import State, TrainingGraph
from gopt.api import read_roles, stored_roles
from gopt.errors import GoptError
from gopt.importers.load import load_step
from gopt.ir.graph import Graph
from gopt.ir.opaque.expand import expand
from gopt.ir.tensor import Tensor
from gopt.offline.diff.nodes import node_lines
from gopt.offline.diff.pairing import Pairing
from gopt.offline.diff.result import Diff, FileDifference
from gopt.offline.diff.values import EXACT, Distance, Tolerance, distance
from gopt.offline.text import digest, ref, tensor_text

T = TypeVar("T")


def diff_models(a: Path, b: Path, tolerance: Tolerance = EXACT) -> Diff:
    """Compare two ONNX files, with their states where both are training steps."""
    return diff_graphs(str(a), load_step(a, own=True), str(b), load_step(b, own=True), states=True, tolerance=tolerance)


def diff_graphs(
    name_a: str,
    a: Graph,
    name_b: str,
    b: Graph,
    *,
    states: bool,
    roles: tuple[RoleMap, RoleMap] | None = None,
    tolerance: Tolerance = EXACT,
) -> Diff:
    """Compare two graphs; ``states``: recover their roles and compare these too; ``roles``: what is known of them.

    ``tolerance`` is for initial values of inputs: values of states.
    """
    notes: list[str] = []
    trainings: list[TrainingGraph | None] = [None, None]
    if states:
        known = roles or (_kept_roles(a, name_a), _kept_roles(b, name_b))
        trainings = [_training(a, name_a, notes, known[0]), _training(b, name_b, notes, known[1])]
    pairing = Pairing(a, b)
    lines = [*_model_lines(a, b), *_interface_lines(a, b, *trainings)]
    lines += [*_value_lines(a, b, tolerance), *node_lines(pairing)]
    return Diff(name_a, name_b, tuple(lines), pairing.renamed(), tuple(notes))


def _training(graph: Graph, name: str, notes: list[str], roles: RoleMap) -> TrainingGraph | None:
    if "gopt.rank" in graph.metadata:
        return None
    try:
        return read_roles(expand(graph), roles)
    except GoptError as error:
        notes.append(f"{name}: states are not compared: {error.message}")
        return None


def _kept_roles(graph: Graph, name: str) -> RoleMap:
    """Roles that gopt wrote into its own copy of a source."""
    if "gopt.roles" not in graph.metadata:
        return RoleMap()
    return stored_roles(graph, name)


def _model_lines(a: Graph, b: Graph) -> Iterator[FileDifference]:
    opsets = [{e.domain or "ai.onnx": e.version for e in graph.header.opset_import} for graph in (a, b)]
    for domain in sorted({*opsets[0], *opsets[1]}):
        versions = [each.get(domain, "none") for each in opsets]
        if versions[0] != versions[1]:
            yield FileDifference("model", f"opset {domain}: {versions[0]} -> {versions[1]}")
    functions = [
        {(f.domain, f.name, f.overload): f.SerializeToString(deterministic=True) for f in graph.header.functions}
        for graph in (a, b)
    ]
    for key in sorted({*functions[0], *functions[1]}):
        if functions[0].get(key) != functions[1].get(key):
            both = key in functions[0] and key in functions[1]
            word = "changed" if both else "added" if key in functions[1] else "removed"
            yield FileDifference("model", f"function {key[0]}.{key[1]} {word}")


def _interface_lines(
    a: Graph, b: Graph, first: TrainingGraph | None, second: TrainingGraph | None
) -> Iterator[FileDifference]:
    told_inputs: set[str] = set()
    told_outputs: set[str] = set()
    if first is not None and second is not None:
        for name, state, other in _joined(first.state_of(), second.state_of()):
            for each in (state, other):
                told_inputs.update([each.tensor] if each else [])
                told_outputs.update([each.updated] if each else [])
            yield from _state_lines(name, state, other, a, b)
        yield from _byte_lines(first, second)
        if first.losses != second.losses:
            one, two = (", ".join(map(ref, each.losses)) for each in (first, second))
            yield FileDifference("output", f"loss: {one} -> {two}")
    sides = ("input", a.inputs, b.inputs, told_inputs), ("output", a.outputs, b.outputs, told_outputs)
    for kind, old, new, told in sides:
        for name, before, after in _joined(old, new):
            if name in told:
                continue
            if before is None or after is None:
                yield FileDifference(kind, f"{ref(name)} {'added' if before is None else 'removed'}: {after or before}")
            elif before != after:
                yield FileDifference(kind, f"{ref(name)}: {before} -> {after}")
        if list(old) != list(new) and sorted(old) == sorted(new):
            yield FileDifference(kind, "order changed")


def _value_lines(a: Graph, b: Graph, tolerance: Tolerance) -> list[FileDifference]:
    """Initial values of inputs that differ: first those that are no numbers, then the worst by their relative delta."""
    found: list[tuple[float, FileDifference]] = []
    for name in a.inputs:
        old, new = a.initializers.get(name), b.initializers.get(name)
        if name not in b.inputs or _same_tensor(old, new):
            continue
        gap: Distance | None = None if old is None or new is None else distance(old, new, tolerance)
        if gap is not None and not gap.outside and not tolerance.exact:
            continue
        texts = ["none" if value is None else tensor_text(value) for value in (old, new)]
        by = "" if gap is None else f" ({gap})"
        rank = float("inf") if gap is None else gap.relative
        found.append((rank, FileDifference("value", f"{ref(name)}: {texts[0]} -> {texts[1]}{by}")))
    return [line for _, line in sorted(found, key=lambda each: -each[0])]


def _state_lines(name: str, state: State | None, other: State | None, a: Graph, b: Graph) -> Iterator[FileDifference]:
    if state is None or other is None:
        each, graph = (state, a) if state is not None else (other, b)
        assert each is not None
        owner = f" of {ref(each.of)}" if each.of else ""
        word = "added" if state is None else "removed"
        yield FileDifference("state", f"{ref(name)} {word}: {graph.types[name]} {each.kind.value}{owner}")
        return
    if a.types[name] != b.types[name]:
        yield FileDifference("state", f"{ref(name)}: {a.types[name]} -> {b.types[name]}")
    if state.kind != other.kind:
        yield FileDifference("state", f"{ref(name)}: {state.kind.value} -> {other.kind.value}")
    if state.of != other.of:
        yield FileDifference("state", f"{ref(name)}: of {ref(state.of or '')} -> of {ref(other.of or '')}")
    if state.updated != other.updated:
        yield FileDifference("state", f"{ref(name)}: replaced by {ref(state.updated)} -> {ref(other.updated)}")


def _byte_lines(first: TrainingGraph, second: TrainingGraph) -> Iterator[FileDifference]:
    sums: list[dict[str, int]] = [{}, {}]
    for training, total in zip((first, second), sums):
        for state in training.states:
            total[state.kind.value] = total.get(state.kind.value, 0) + training.graph.types[state.tensor].nbytes
    for kind in sorted({*sums[0], *sums[1]}):
        before, after = sums[0].get(kind, 0), sums[1].get(kind, 0)
        if before != after:
            yield FileDifference("bytes", f"{kind}: {before} -> {after} ({after - before:+d})")


def _joined(a: Mapping[str, T], b: Mapping[str, T]) -> Iterator[tuple[str, T | None, T | None]]:
    """Both mappings by key, in the order of ``a``, then what only ``b`` has."""
    for name in dict.fromkeys((*a, *b)):
        yield name, a.get(name), b.get(name)


def _same_tensor(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.type != b.type:
        return False
    if a.external and (a.path, a.offset) == (b.path, b.offset):
        return True
    return digest(a) == digest(b)
