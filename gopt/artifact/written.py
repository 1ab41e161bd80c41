"""Writes values and report of an output folder, and says in the manifest what it wrote.

Ranks of equal files agree with their source from any start values, and no rank reads the report: without digests
``gopt verify`` could not see that either was edited.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from gopt.artifact.manifest import WrittenEntry
from gopt.artifact.report_record import REPORT_FILE, Report
from gopt.artifact.states_file import STATES_FILE, Digests, StatesFile, digest_of_tensor
from gopt.disk.files import create
from gopt.ir.tensor import Tensor


def write_values(folder: Path, values: StatesFile, starts: Mapping[str, Tensor]) -> Digests:
    """Write ``states.bin``; returns its digest, and those of ``starts``, the start values of states that it has.

    A state whose parts are stored apart is read once more. Raises OSError, RunError.
    """
    found = values.write(folder / STATES_FILE, starts)
    tensors = {name: found.tensors.get(name) or digest_of_tensor(tensor) for name, tensor in starts.items()}
    return Digests(found.file, tensors)


def write_report(folder: Path, report: Report, values: Digests) -> WrittenEntry:
    """Write ``report.json``; returns the manifest's entry for it and for ``values``. Raises OSError."""
    seen = hashlib.sha256()
    with create(folder / REPORT_FILE) as file:
        for piece in report.pieces():
            data = piece.encode()
            seen.update(data)
            file.write(data)
    return WrittenEntry(seen.hexdigest(), values.file, values.tensors)
