"""Compares an output folder with the source: kinds and owners of states, start values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gopt.analysis.training import TrainingGraph
from gopt.artifact.manifest import MANIFEST_FILE, Manifest
from gopt.artifact.manifest_entries import InputKind
from gopt.artifact.pieces import cut
from gopt.errors import InputError
from gopt.runtime.memory import bits
from gopt.runtime.session import Array
from gopt.text.sanitize import listed, show
from gopt.verification.rank_programs import RankPrograms

NAMED = 4
"""States that a note names."""
_AGAIN = "shard the step again; --state FILE gives other values"


def check_roles(manifest: Manifest, source: TrainingGraph, folder: Path) -> None:
    """Raise InputError where the manifest gives a state another new value, kind or parameter than the source does, or
    an input another kind."""
    source_roles = {state.tensor: (state.updated, state.kind.value, state.of) for state in source.states}
    missing = next(iter(source_roles.keys() - {state.tensor for state in manifest.states}), None)
    if missing is not None:
        raise InputError(
            f"{folder / MANIFEST_FILE}: states: {show(missing)} is a state of the source, and missing here",
            "it was edited: shard the step again",
        )
    rows = [
        (f"states[{index}].{word}", state.tensor, role, source_roles.get(state.tensor, folder_roles)[at])
        for index, state in enumerate(manifest.states)
        for folder_roles in [(state.updated, state.kind.value, state.of)]
        for at, (word, role) in enumerate(zip(("updated", "kind", "of"), folder_roles))
    ]
    kinds = dict.fromkeys(source.batch, InputKind.BATCH.value) | dict.fromkeys(source.hyper, InputKind.HYPER.value)
    rows += [
        (f"common.inputs[{index}].kind", entry.name, entry.kind.value, kinds.get(entry.name, entry.kind.value))
        for index, entry in enumerate(manifest.common.inputs)
    ]
    for where, name, folder_role, source_role in rows:
        if folder_role != source_role:
            raise InputError(
                f"{folder / MANIFEST_FILE}: {where}: {show(name)} has {show(folder_role)} here, {show(source_role)} in "
                "the source",
                "it was edited: shard the step again",
            )


def check_starts(ranks: Sequence[RankPrograms], stored: Mapping[str, Array], folder: Path) -> None:
    """Raise InputError where ranks start a state from different values.

    ``stored``: whole start values, put together from the files of ranks.
    """
    for rank in ranks:
        if (different := _other_start(rank, stored)) is not None:
            path = folder / next(iter(rank.record.files.values()))
            raise InputError(f"{path}: {show(different)} starts from another value than on other ranks", _AGAIN)


def _other_start(rank: RankPrograms, whole: Mapping[str, Array]) -> str | None:
    """The first state of a rank that differs from the value joined from all ranks, or None."""
    for state in rank.states:
        if any(piece.tensor not in whole for piece in state.pieces):
            continue
        if state.input not in rank.values:
            if state.copy:
                continue  # a trainer pulls it
            return state.input
        local, offset = rank.values[state.input].reshape(-1), 0
        for piece in state.pieces:
            with np.errstate(over="ignore"):
                due = cut(piece, whole[piece.tensor]).astype(local.dtype, copy=False)
            if not np.array_equal(bits(local[offset : offset + piece.elements]), bits(due)):
                return piece.tensor
            offset += piece.elements
    return None


def other_start_values(stored: Mapping[str, Array], source: TrainingGraph) -> list[str]:
    """Notes on states with another value in the ranks than in the model: trained or wrong."""
    tensors = source.graph.initializers
    changed = [
        name for name, value in stored.items()
        if name in tensors and not np.array_equal(bits(value), bits(tensors[name].numpy()))
    ]  # fmt: skip
    if not changed:
        return []
    return [
        f"{listed(changed, NAMED)}: the ranks start from other values than the model. Both ran from the ranks' values"
    ]
