"""The index of a step of a checkpoint: size and digest of every rank's file. The index is written last, so a step with
an index is complete.

Files are read in blocks: a check needs constant memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from gopt import documents, limits
from gopt.artifact.integrity import FileEntry, accept_hints, check_seal, fault_of, is_unchecked, sealed
from gopt.artifact.json_writer import pretty_json
from gopt.artifact.manifest import MANIFEST_FILE, Manifest
from gopt.documents.records import (
    OPTIONAL,
    Bounds,
    Count,
    Digest,
    RunIdentity,
    WholeNumber,
    from_document,
    one_of,
    to_document,
)  # fmt: skip
from gopt.errors import InputError, RunError

INDEX_FILE = "index.json"
FORMAT = "gopt-checkpoint/1"
LOCK_FILE = ".gopt.lock"
"""File in a folder of checkpoints that the job which writes them locks; it is never removed."""
STATES_OF_RANK = re.compile(r"rank_(\d{4,9})\.safetensors")
VALUES_FILE = re.compile(r"source(\.[0-9a-f]{8})?\.bin")
"""Names of the file, beside the steps, that has large constants of the source."""
BEST_DIR = "best"
"""The folder of the best step (``--keep-best``), beside the folders of the newest steps."""
STEP_DIR = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True, slots=True)
class BestEntry:
    """The evaluation of a step kept as the best."""

    metric: str
    """The name is the one of the metric, as the evaluation model has it."""
    mode: Annotated[str, one_of("min", "max")]
    """The word says whether the lowest or the highest value is the best."""
    value: float
    """The value is the mean over all held-out samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """The index of a step of a checkpoint shows that the step is complete: it is written last, as index.json in the
    folder of the step."""

    format: str = FORMAT
    """The format is the name and version of this format."""
    step: Count
    """The step is the number of updates since the start of training."""
    manifest: Digest
    """The digest identifies the manifest of the ranks that wrote the checkpoint: SHA-256, in hexadecimal digits, of the
    manifest as JSON with sorted keys."""
    run: RunIdentity | None = field(default=None, metadata=OPTIONAL)
    """The identity of the run that wrote the step, which the manifest beside the steps has too; the key is absent in a
    step of an older version."""
    draws: Count | None = field(default=None, metadata=OPTIONAL)
    """The seed is the one of the random numbers that the run drew (--draws); the key is absent where the run drew
    none."""
    shuffle: Count | None = field(default=None, metadata=OPTIONAL)
    """The seed shuffles the samples (--shuffle); the key is absent for the order of the file."""
    last: Annotated[str, one_of("carry", "drop", "pad")] | None = field(default=None, metadata=OPTIONAL)
    """The word says what became of the samples at the end of a pass that filled no step (--last); the key is absent
    where the data was not on disk."""
    batch_size: Annotated[WholeNumber, Bounds(minimum=1)] | None = field(default=None, metadata=OPTIONAL)
    """The number is the one of a batch's samples (--batch-size); the key is absent where the step fixes it."""
    batches: WholeNumber | None = field(default=None, metadata=OPTIONAL)
    """The number counts the batches that were dealt out to all trainers of a split before the step; the key is absent
    where it is steps x micro-steps x trainers."""
    best: BestEntry | None = field(default=None, metadata=OPTIONAL)
    """The evaluation for which the step was kept as the best (--keep-best); the key is absent in other steps."""
    files: Mapping[str, FileEntry]
    """The table lists the file of every rank. The value describes the file that the key names, rank_NNNN.safetensors,
    which holds the states that this rank writes."""
    seal: Digest | None = field(default=None, metadata=OPTIONAL)
    """The digest is the SHA-256 of the bytes of this document that stand before the comma in front of this key, in
    hexadecimal digits; the key is the last one, and is absent in documents of older versions."""

    def trainers(self, servers: int) -> int:
        """The number of trainers at the start of the run of a split: servers are the ranks behind, and never lost."""
        numbers = [int(match[1]) for match in map(STATES_OF_RANK.fullmatch, self.files) if match]
        return max(numbers, default=-1) + 1 - servers

    def of_run(self, manifest: Manifest) -> Manifest:
        """The manifest of the run folder, with the number of trainers at the start; lost trainers count."""
        plan = manifest.parameter_server
        trainers = 0 if plan is None else self.trainers(plan.servers)
        return manifest.with_trainers(trainers) if 1 <= trainers <= limits.RANKS else manifest

    def text(self) -> str:
        """The text of the file, sealed."""
        document = to_document(replace(self, seal=None))
        del document["files"]
        return sealed(pretty_json(document), self.files)


def step_dir(step: int) -> str:
    """The folder of a step, inside the folder of checkpoints."""
    return f"step_{step:08d}"


def complete_steps(home: Path) -> list[int]:
    """Steps with a complete checkpoint in a folder, in order."""
    steps = []
    for path in home.iterdir() if home.is_dir() else ():
        match = STEP_DIR.fullmatch(path.name)
        if match and (path / INDEX_FILE).is_file():
            steps.append(int(match[1]))
    return sorted(steps)


def rank_states_file(rank: int) -> str:
    return f"rank_{rank:04d}.safetensors"


def read_index(folder: Path, manifest: Manifest, run: str | None) -> CheckpointIndex:
    """The index of a step of a checkpoint; raises RunError for a damaged index, another run than ``run``, or other
    ranks than the manifest's, except for the number of trainers."""
    index = open_index(folder)
    if index.run is not None and index.run != run and not is_unchecked():
        raise RunError(
            f"checkpoint {folder} is of another run than {MANIFEST_FILE} beside it: it was moved here",
            f"move it back to the steps of its run; to take it as one of this run: gopt seal {folder}",
        )
    if index.manifest != index.of_run(manifest).digest():
        split = manifest.parameter_server is not None
        raise RunError(
            f"checkpoint {folder} was written by {'trainers and servers' if split else 'ranks'} of another folder",
            f"make a folder of it: gopt reshard {folder} {'--servers S' if split else '--ranks N'} -o DIR",
        )
    return index


def open_index(folder: Path) -> CheckpointIndex:
    """The index of a step of a checkpoint; raises RunError for a damaged index."""
    try:
        path = folder / INDEX_FILE
        data = documents.read_bytes(path, documents.INDEX.limit)
        index = from_document(CheckpointIndex, documents.parse_json(data, documents.INDEX, str(path)))
        check_seal(data, str(path), index.seal, folder)
        match = STEP_DIR.fullmatch(os.path.basename(os.path.realpath(folder)))
        if match and int(match[1]) != index.step:
            raise InputError(f"{folder / INDEX_FILE}: step: {index.step} differs from the step of its folder")
    except InputError as error:
        raise RunError(
            f"the checkpoint is damaged: {error.message}",
            f"remove {folder} to continue from the one before",
            *error.hints,
        ) from error
    return index


def check_states_file(path: Path, entry: FileEntry | None) -> None:
    """Raise RunError when a rank's file is missing, or differs from the ``entry`` of the index."""
    if entry is None or not path.is_file():
        raise RunError(f"checkpoint {path.parent} lacks {path.name}", "remove it to continue from the one before")
    if is_unchecked():
        return
    try:
        fault = fault_of(path, entry)
    except InputError as error:
        raise RunError(f"checkpoint {error.message}", *error.hints) from error
    if fault:
        raise RunError(
            f"the checkpoint is damaged: {path} {fault}",
            f"remove {path.parent} to continue from the one before",
            *accept_hints(path.parent),
        )
