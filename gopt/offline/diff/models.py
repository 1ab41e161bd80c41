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
from gopt.offline.text import digest, opsets, ref, tensor_text

T = TypeVar("T")


def diff_models(a: Path, b: Path, tolerance: Tolerance = EXACT) -> Diff:
    """Compare two ONNX files, and states where both are training steps."""
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
    """Compare two graphs; ``states``: recover roles and compare these too; ``roles``: the known roles.

    ``tolerance`` is for initial values of inputs: values of states.
    """
    notes: list[str] = []
    trainings: list[TrainingGraph | None] = [None, None]
    if states:
        roles_of = roles or (_kept_roles(a, name_a), _kept_roles(b, name_b))
        trainings = [_training(a, name_a, notes, roles_of[0]), _training(b, name_b, notes, roles_of[1])]
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
    """Roles written by gopt into a copy of a source."""
    if "gopt.roles" not in graph.metadata:
        return RoleMap()
    return stored_roles(graph, name)


def _model_lines(a: Graph, b: Graph) -> Iterator[FileDifference]:
    for domain in sorted({*opsets(a), *opsets(b)}):
        versions = [opsets(graph).get(domain, "none") for graph in (a, b)]
        if versions[0] != versions[1]:
            yield FileDifference("model", f"opset {domain}: {versions[0]} -> {versions[1]}")
    functions = [
        {(f.domain, f.name, f.overload): f.SerializeToString(deterministic=True) for f in graph.header.functions}
        for graph in (a, b)
    ]
    for key in sorted({*functions[0], *functions[1]}):
        if functions[0].get(key) != functions[1].get(key):
            shared = key in functions[0] and key in functions[1]
            word = "changed" if shared else "added" if key in functions[1] else "removed"
            yield FileDifference("model", f"function {key[0]}.{key[1]} {word}")


def _interface_lines(
    a: Graph, b: Graph, training_a: TrainingGraph | None, training_b: TrainingGraph | None
) -> Iterator[FileDifference]:
    told_inputs: set[str] = set()
    told_outputs: set[str] = set()
    if training_a is not None and training_b is not None:
        for name, state, state_b in _joined(training_a.state_of(), training_b.state_of()):
            for side in (state, state_b):
                told_inputs.update([side.tensor] if side else [])
                told_outputs.update([side.updated] if side else [])
            yield from _state_lines(name, state, state_b, a, b)
        yield from _byte_lines(training_a, training_b)
        if training_a.losses != training_b.losses:
            one, two = (", ".join(map(ref, training.losses)) for training in (training_a, training_b))
            yield FileDifference("output", f"loss: {one} -> {two}")
    sides = ("input", a.inputs, b.inputs, told_inputs), ("output", a.outputs, b.outputs, told_outputs)
    for kind, old, new, shown in sides:
        for name, before, after in _joined(old, new):
            if name in shown:
                continue
            if before is None or after is None:
                yield FileDifference(kind, f"{ref(name)} {'added' if before is None else 'removed'}: {after or before}")
            elif before != after:
                yield FileDifference(kind, f"{ref(name)}: {before} -> {after}")
        if list(old) != list(new) and sorted(old) == sorted(new):
            yield FileDifference(kind, "order changed")


def _value_lines(a: Graph, b: Graph, tolerance: Tolerance) -> list[FileDifference]:
    """Unequal initial values of inputs: non-numbers first, then the worst by relative delta."""
    ranked: list[tuple[float, FileDifference]] = []
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
        ranked.append((rank, FileDifference("value", f"{ref(name)}: {texts[0]} -> {texts[1]}{by}")))
    return [line for _, line in sorted(ranked, key=lambda row: -row[0])]


def _state_lines(name: str, state: State | None, changed: State | None, a: Graph, b: Graph) -> Iterator[FileDifference]:
    if state is None or changed is None:
        present, graph = (state, a) if state is not None else (changed, b)
        assert present is not None
        owner = f" of {ref(present.of)}" if present.of else ""
        word = "added" if state is None else "removed"
        yield FileDifference("state", f"{ref(name)} {word}: {graph.types[name]} {present.kind.value}{owner}")
        return
    if a.types[name] != b.types[name]:
        yield FileDifference("state", f"{ref(name)}: {a.types[name]} -> {b.types[name]}")
    if state.kind != changed.kind:
        yield FileDifference("state", f"{ref(name)}: {state.kind.value} -> {changed.kind.value}")
    if state.of != changed.of:
        yield FileDifference("state", f"{ref(name)}: of {ref(state.of or '')} -> of {ref(changed.of or '')}")
    if state.updated != changed.updated:
        yield FileDifference("state", f"{ref(name)}: replaced by {ref(state.updated)} -> {ref(changed.updated)}")


def _byte_lines(old: TrainingGraph, new: TrainingGraph) -> Iterator[FileDifference]:
    sums: list[dict[str, int]] = [{}, {}]
    for training, total in zip((old, new), sums):
        for state in training.states:
            total[state.kind.value] = total.get(state.kind.value, 0) + training.graph.types[state.tensor].nbytes
    for kind in sorted({*sums[0], *sums[1]}):
        before, after = sums[0].get(kind, 0), sums[1].get(kind, 0)
        if before != after:
            yield FileDifference("bytes", f"{kind}: {before} -> {after} ({after - before:+d})")


def _joined(a: Mapping[str, T], b: Mapping[str, T]) -> Iterator[tuple[str, T | None, T | None]]:
    """Both mappings by key, in the order of ``a``, then the keys of ``b`` alone."""
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
