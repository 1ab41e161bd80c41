"""While a run goes on: states that ranks hold in common must keep the same bits on all of them.

A fingerprint of each state is compared, which is made at the speed of memory: any one changed bit shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gopt.artifact.manifest import Manifest
from gopt.artifact.pass_facts import buckets
from gopt.artifact.report_check import read_report
from gopt.errors import GoptError, RunError
from gopt.runtime.engines.base import Engine
from gopt.runtime.session import Array
from gopt.runtime.training.start_values import Difference, Replicas, difference
from gopt.sanitize import show


def fingerprint(value: Array) -> str:
    """The sum and the exclusive or of a value's bytes, as numbers of 64 bits."""
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    whole = data[: len(data) // 8 * 8].view(np.uint64)
    total = int(np.add.reduce(whole, dtype=np.uint64)) if len(whole) else 0
    return f"{total:x}.{int(np.bitwise_xor.reduce(whole)):x}.{data[len(whole) * 8 :].tobytes().hex()}"


def audit(
    engine: Engine, replicas: Replicas, states: Mapping[str, Any], to_host: Callable[[Any], Array], folder: Path,
    step: int,
) -> None:  # fmt: skip
    """Raise RunError, on all ranks the same, where a state that ranks hold in common differs; all ranks call it."""
    found = difference(engine, replicas, lambda name: fingerprint(to_host(states[name])))
    if found is None:
        return
    what = _told(replicas.manifest, found, folder)
    error = RunError(
        f"step {step}: {found.who} and rank {found.first} hold different values of {what}, which they "
        f"hold in common along {found.axis}",
        "the memory or a file of a rank was damaged, or ranks run different builds: gopt verify checks the folder",
        "--resume continues from the last checkpoint, in which all agreed",
    )
    error.named = True  # type: ignore[attr-defined]
    raise error


def _told(manifest: Manifest, found: Difference, folder: Path) -> str:
    """The first tensor of the source that a state has, and its bucket."""
    entry = manifest.ranks[found.first]
    state = next(each for each in manifest.states_of(entry) if each.input == found.state)
    tensor = state.pieces[0].tensor if state.pieces else found.state
    owner = next((each.of or each.tensor for each in manifest.states if each.tensor == tensor), tensor)
    try:
        facts = buckets(read_report(folder, manifest).pipeline)
    except GoptError:
        facts = []
    bucket = next((each.name for each in facts if tensor in each.tensors or owner in each.tensors), None)
    return show(tensor) + (" (in no bucket)" if bucket is None else f" (bucket {bucket})")
