"""Whole values of the states of a running job, put together from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from gopt.artifact.manifest import Manifest
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.offline.folder_contents import put_together, stored_pieces
from gopt.runtime.engines.base import Engine
from gopt.runtime.host_value import array_dtype
from gopt.runtime.session import Array
from gopt.runtime.training.checkpoint import writers


def gathered_states(
    manifest: Manifest, engine: Engine, held: Mapping[str, Any], to_host: Callable[[Any], Array],
    tensors: Collection[str],
) -> dict[str, Array]:  # fmt: skip
    """The values of some states of the source, as ``gopt merge`` puts them together; every rank calls this function.

    ``held``: the rank's states by input, ``to_host``: such a value as an array."""
    inputs = dict.fromkeys(
        state.input
        for states in (manifest.common.state, *(rank.state for rank in manifest.ranks))
        for state in states
        if not state.copy and any(piece.tensor in tensors for piece in state.pieces)
    )
    mine = frozenset(writers(manifest, engine.rank).get(engine.rank, ()))
    stored: list[dict[str, Tensor]] = [{} for _ in manifest.ranks]
    for name in inputs:
        for rank, value in enumerate(engine.gather(to_host(held[name]) if name in mine else None)):
            if value is not None:
                stored[rank][name] = Tensor(TensorType(array_dtype(value), value.shape), array=value)
    types = {state.tensor: state.type for state in manifest.states if state.tensor in tensors}
    whole = put_together(manifest, types, stored_pieces(manifest, enumerate(stored)))
    return {name: np.asarray(whole[name].numpy()).reshape(type.dims) for name, type in types.items()}
