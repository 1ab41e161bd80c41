"""Rings of rows: places that a pointer and a count give, and the pointer that moves by the rows of each step.

A place is the pointer plus a constant, modulo the rows of the ring or not. Constants and layout operators are computed,
so that any way to write the count is read alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from gopt.analysis.training import StateKind, TrainingGraph
from gopt.errors import UnsupportedError
from gopt.ir.constant_folding import as_folded
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, walk
from gopt.ir.node_kinds import record_of
from gopt.operators.kinds import RELAYS, SCATTERS, SUMS

_INTEGERS = ("int64", "int32")
_FAR = 64
"""Values of an update that are searched for a pointer."""


@dataclass(frozen=True, slots=True)
class RingPlaces:
    """Integers that are ``pointer``, a state of one element, plus ``offsets``; ``pointer`` '' : the offsets alone.

    ``modulus``: what the sum was last divided by, 0 without; ``wrapped``: they are the remainder, and nothing was added
    to it. ``terms``: the constants that were added.
    """

    pointer: str
    offsets: np.ndarray
    modulus: int = 0
    wrapped: bool = False
    terms: tuple[str, ...] = ()


def places(index: GraphIndex, name: str, depth: int = 32) -> RingPlaces | None:
    """The value ``name`` as a pointer plus constants; None for any other value."""
    value = index.constants.value(name)
    if value is not None:
        return RingPlaces("", value) if value.dtype.kind in "iu" else None
    node, type = index.producers.get(name), index.graph.types.get(name)
    if node is None:
        if type is None or type.elements != 1 or type.dtype not in _INTEGERS:
            return None
        return RingPlaces(name, np.zeros(type.dims, np.int64))
    if not depth or node.domain not in ("", "ai.onnx") or len(node.outputs) != 1:
        return None
    operands = [places(index, each, depth - 1) for each in node.inputs if each]
    if any(each is None for each in operands):
        return None
    return _of(index, node, [each for each in operands if each is not None])


def _of(index: GraphIndex, node: Node, operands: list[RingPlaces]) -> RingPlaces | None:
    first = operands[0]
    if node.is_in(RELAYS):
        made = index.graph.type_of(node.outputs[0])
        fixed = all(not each.pointer for each in operands[1:])
        moved = as_folded(node, [each.offsets for each in operands]) if fixed and made.dtype in _INTEGERS else None
        return None if moved is None else replace(first, offsets=moved)
    if node.is_a("Range"):
        low, high, step = (int(each.offsets.reshape(-1)[0]) for each in operands)
        alike = (
            first.pointer == operands[1].pointer and not operands[2].pointer and first.modulus == operands[1].modulus
        )
        return replace(first, offsets=np.arange(low, high), wrapped=False) if alike and step == 1 else None
    if node.is_a("Mod") and not operands[1].pointer and operands[1].offsets.size == 1:
        by = int(operands[1].offsets.reshape(-1)[0])
        return replace(first, modulus=by, wrapped=True) if by > 0 and first.modulus in (0, by) else None
    if node.is_in(SUMS) and len(operands) == 2 and not (operands[0].pointer and operands[1].pointer):
        slot = int(not first.pointer)
        known, other, record = operands[slot], operands[1 - slot], record_of(node)
        if record.sign(slot) < 0:
            return None
        terms = (*known.terms, *other.terms, node.inputs[1 - slot])
        offsets = known.offsets + record.sign(1 - slot) * other.offsets
        return replace(known, offsets=offsets, wrapped=False, terms=terms)
    return None


@dataclass(frozen=True, slots=True)
class Pointer:
    """The pointer of a ring: each step adds ``rows``, the constant ``term``, modulo ``modulus`` or (0) without end."""

    tensor: str
    term: str
    rows: int
    modulus: int


def pointer_of(index: GraphIndex, training: TrainingGraph, tensor: str) -> Pointer | None:
    """A state as the pointer of a ring."""
    state = training.state_of().get(tensor)
    found = places(index, state.updated) if state is not None else None
    if state is None or found is None or found.pointer != tensor or found.offsets.size != 1 or len(found.terms) != 1:
        return None
    moved = int(found.offsets.reshape(-1)[0])
    if moved < 1 or (found.modulus and not found.wrapped):
        return None
    return Pointer(tensor, found.terms[0], moved, found.modulus)


def settle_rings(training: TrainingGraph) -> dict[str, str]:
    """Pointer -> a ring of rows through which it walks; the pointers of gathered rings become counts of all rows.

    Raises UnsupportedError where one pointer walks through rings that are combined in different ways.
    """
    kinds = {state.tensor: state.kind for state in training.states}
    types = training.graph.types
    counts = [each for each, kind in kinds.items() if kind is not StateKind.STATISTIC and types[each].elements == 1]
    if not any(types[each].dtype in _INTEGERS for each in counts) or StateKind.STATISTIC not in kinds.values():
        return {}
    index, rings = GraphIndex(training.graph), dict[str, list[str]]()
    for state in training.states:
        pointer = _walked(index, state.updated) if state.kind is StateKind.STATISTIC else ""
        if pointer in counts:
            rings.setdefault(pointer, []).append(state.tensor)
    for state in training.states:
        walked = rings.get(state.tensor, [])
        gathered = [name for name in walked if training.reductions.get(name) == "gather"]
        pointer_found = pointer_of(index, training, state.tensor) if walked else None
        if pointer_found is None or not (gathered or pointer_found.modulus):
            rings.pop(state.tensor, None)  # it may count samples as well
            continue
        if not gathered:
            continue
        apart = next((name for name in walked if name not in gathered), None)
        if apart is not None:
            raise UnsupportedError(
                f"{state.tensor!r} points into {gathered[0]!r} and {apart!r}, and ranks gather the first alone",
                "gather both: --statistics " + ",".join(f"{name}=gather" for name in walked),
            )
        state.kind, state.of = StateKind.STATISTIC, None
        training.counted[state.tensor] = pointer_found.term
    return {pointer: names[0] for pointer, names in rings.items()}


def _walked(index: GraphIndex, updated: str) -> str:
    """The pointer by which a new value is written, '' where it is written otherwise."""
    made = (index.producers[name] for name in walk([updated], index.operands) if name in index.producers)
    scatter = next((node for node in islice(made, _FAR) if node.is_in(SCATTERS)), None)
    found = places(index, scatter.inputs[1]) if scatter is not None else None
    return found.pointer if found is not None else ""
