"""Checks during a run that states held by several ranks in common keep the same bits.

The check compares fingerprints, made at the speed of memory: any changed bit shows. The fingerprints travel with the
values that ranks exchange after a step anyway."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gopt.artifact.manifest import Manifest
from gopt.artifact.pass_facts import buckets
from gopt.artifact.report_check import read_report
from gopt.errors import GoptError, RunError
from gopt.runtime.engines.base import Engine
from gopt.runtime.memory import bits
from gopt.runtime.session import Array
from gopt.runtime.training.start_values import Replicas, StartDifference, first_difference
from gopt.text.sanitize import show

_SMALL = 4096
"""Bytes of a value up to which a cyclic redundancy check of it is faster than sums of its words."""
_BLOCK = 8192
"""Words that are summed at once: what changes places between blocks shows too."""


def fingerprint(values: Iterable[Array]) -> str:
    """A check of values in order, at the speed of memory: any changed bit shows, and all but 1 in 2^32 of other
    changes."""
    check = 0
    for value in values:
        if value.nbytes > _SMALL:
            check = _of_large(value, check)
            continue
        try:
            check = zlib.crc32(value.data, check)
        except (ValueError, BufferError):  # a type that only NumPy's add-ons know, or not in one piece
            check = zlib.crc32(bits(value).data, check)
    return f"{check:08x}"


def _of_large(value: Array, check: int) -> int:
    data = bits(value)
    whole = len(data) // 8
    words, blocks = data[: 8 * whole].view(np.uint64), whole // _BLOCK
    sums = np.add.reduce(words[: blocks * _BLOCK].reshape(blocks, _BLOCK), 1)
    last = np.add.reduce(words[blocks * _BLOCK :])
    return zlib.crc32(data[8 * whole :].data, zlib.crc32(last.tobytes(), zlib.crc32(sums.data, check)))


class Audit:
    """The comparison of states that a rank holds in common with others. ``folder``: the sharded step."""

    def __init__(self, replicas: Replicas, rank: int, folder: Path) -> None:
        self._replicas, self._folder = replicas, folder
        self._held = {axis: replicas.along(axis, rank) for axis in replicas.axes}

    def digests(self, states: Mapping[str, Any], to_host: Callable[[Any], Array]) -> list[str]:
        """One fingerprint for each axis, of all states that this rank holds in common along the axis."""
        fingerprints: dict[tuple[str, ...], str] = {}
        for names in map(tuple, self._held.values()):
            if names not in fingerprints:
                fingerprints[names] = fingerprint(to_host(states[name]) for name in names)
        return [fingerprints[tuple(names)] for names in self._held.values()]

    def check(
        self, engine: Engine, everything: Sequence[Sequence[str]], states: Mapping[str, Any],
        to_host: Callable[[Any], Array], step: int,
    ) -> None:  # fmt: skip
        """Raise RunError, on all ranks the same, where the digests of all ranks differ; all ranks call it."""
        if not self._replicas.differ(everything):
            return
        digests = functools.cache(lambda name: fingerprint([to_host(states[name])]))
        by_axis = {axis: {name: digests(name) for name in names} for axis, names in self._held.items()}
        difference = first_difference(self._replicas.mesh, list(by_axis), engine.gather(by_axis))
        what = _told(self._replicas.manifest, difference, self._folder)
        error = RunError(
            f"step {step}: {difference.who} and rank {difference.first} hold different values of {what}, which they "
            f"hold in common along {difference.axis}",
            "the memory or a file of a rank was damaged, or ranks run different builds: gopt verify checks the folder",
            "--resume continues from the last checkpoint, in which all agreed",
        )
        error.named = True  # type: ignore[attr-defined]
        raise error


def _told(manifest: Manifest, difference: StartDifference, folder: Path) -> str:
    """The first source tensor of a state, and the bucket of this tensor."""
    entry = manifest.ranks[difference.first]
    state = next(state for state in manifest.states_of(entry) if state.input == difference.state)
    tensor = state.pieces[0].tensor if state.pieces else difference.state
    owner = next((state.of or state.tensor for state in manifest.states if state.tensor == tensor), tensor)
    try:
        facts = buckets(read_report(folder, manifest).pipeline)
    except GoptError:
        facts = []
    bucket = next((fact.name for fact in facts if tensor in fact.tensors or owner in fact.tensors), None)
    return show(tensor) + (" (in no bucket)" if bucket is None else f" (bucket {bucket})")
