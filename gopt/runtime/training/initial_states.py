"""The states of a rank at the first step: computed by a start-up graph, stored in the rank's files, or read from the
user's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gopt.artifact.manifest import Piece
from gopt.artifact.manifest_entries import LocalState
from gopt.artifact.pieces import cut_stored
from gopt.errors import InputError
from gopt.ir.external_data import load_state
from gopt.ir.graph import Graph
from gopt.ir.types import TensorType, numpy_dtype
from gopt.runtime.session import Array

NO_VALUES: Mapping[str, Array] = {}


def initial_states(
    states: Sequence[LocalState], graphs: Mapping[str, Graph], path: str | None,
    computed: Mapping[str, Array] = NO_VALUES,
) -> dict[str, Array]:  # fmt: skip
    """State -> a new array.

    ``states``: the manifest's entries. ``graphs``: by phase. ``path``: --state FILE, read for states without a stored
    value. ``computed``: values that go before all others. Raises InputError for a state without a value."""
    stored = {
        name: tensor for graph in graphs.values() for name, tensor in graph.initializers.items() if name in graph.inputs
    }
    tensors = load_state(path) if path is not None else {}
    values = {}
    for state in states:
        name = state.input
        if name in computed:
            values[name] = np.array(computed[name])
        elif name in stored:
            values[name] = stored[name].copied()
        else:
            type = next(graph.inputs[name] for graph in graphs.values() if name in graph.inputs)
            values[name] = joined(state.pieces, tensors, type)
    return values


def joined(pieces: Sequence[Piece], tensors: Mapping[str, Any], type: TensorType) -> Array:
    """The value of a state, of this type on a rank, from pieces of the source's ``tensors``. Raises InputError for a
    missing tensor."""
    missing = next((piece.tensor for piece in pieces if piece.tensor not in tensors), None)
    if missing is not None:
        raise InputError(f"state {missing!r} has no value", "give the values with --state FILE")
    flats = [cut_stored(piece, tensors[piece.tensor]) for piece in pieces]
    flat = np.concatenate(flats) if flats else np.zeros(0)
    return flat.astype(numpy_dtype(type.dtype)).reshape(type.dims)
