"""The kinds of files and folders known to gopt by content, and the description of each."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from gopt.errors import InputError
from gopt.offline.inspect_folder import inspect_folder
from gopt.offline.inspect_role import ROLE, inspect_role
from gopt.offline.kinds import gopt_files, value_files
from gopt.offline.kinds.candidate import FileCandidate
from gopt.offline.kinds.ort_artifacts import inspect_ort_artifacts, is_ort_artifacts
from gopt.offline.kinds.ort_checkpoint import inspect_ort_checkpoint, is_ort_checkpoint
from gopt.offline.kinds.ort_models import inspect_ort_optimizer, inspect_ort_training, is_ort_optimizer, is_ort_training
from gopt.offline.kinds.rank_file import inspect_rank_file, is_rank_file
from gopt.offline.kinds.training_info import has_training_info, inspect_training_info
from gopt.offline.kinds.unknown import looks_like


class Description(Protocol):
    """Base of the descriptions of all kinds."""

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class FileKind:
    """One kind: ``name`` in words, the test (never by a file's name), and the description."""

    name: str
    recognise: Callable[[FileCandidate], bool]
    inspect: Callable[[FileCandidate], Description]


def _role(candidate: FileCandidate) -> Description:
    role = inspect_role(candidate.path)
    if role is None:
        raise InputError(f"{candidate.path}: its metadata name no role", "write the folder again with gopt split")
    return role


KINDS = (
    FileKind("checkpoint of gopt", gopt_files.is_checkpoint, gopt_files.inspect_checkpoint),
    FileKind("training artifacts of ONNX Runtime", is_ort_artifacts, inspect_ort_artifacts),
    FileKind(
        "output folder of gopt", lambda candidate: candidate.is_folder, lambda candidate: inspect_folder(candidate.path)
    ),
    FileKind("manifest of gopt", gopt_files.is_manifest, gopt_files.inspect_manifest),
    FileKind("report of gopt", gopt_files.is_report, gopt_files.inspect_report),
    FileKind("record of a run", gopt_files.is_record, gopt_files.inspect_record),
    FileKind("training checkpoint of ONNX Runtime", is_ort_checkpoint, inspect_ort_checkpoint),
    FileKind("safetensors", value_files.is_safetensors, value_files.inspect_safetensors),
    FileKind("archive of NumPy arrays", value_files.is_npz, value_files.inspect_npz),
    FileKind("file of a trainer or a server", lambda candidate: ROLE in candidate.metadata, _role),
    FileKind("file of a rank", is_rank_file, inspect_rank_file),
    FileKind("model with training_info", has_training_info, inspect_training_info),
    FileKind("training graph of ONNX Runtime", is_ort_training, inspect_ort_training),
    FileKind("optimizer graph of ONNX Runtime", is_ort_optimizer, inspect_ort_optimizer),
)
"""The first that recognises a path describes it. What none recognises is a training step or an inference model, which
only the analysis of the graph can tell: see ``gopt.cli.inspect``."""


def kind_of(candidate: FileCandidate) -> FileKind | None:
    """The kind of a path; None for other models, and for files that are no model. Raises InputError where there is no
    file."""
    return next((kind for kind in KINDS if kind.recognise(candidate)), None)


def inspect_path(path: str | os.PathLike[str]) -> Description | None:
    """Return the description of a path; None for a possible step or inference model.

    Raises InputError for damaged files, and for files of other tools, with the guessed tool."""
    candidate = FileCandidate(path)
    kind = kind_of(candidate)
    if kind is not None:
        return kind.inspect(candidate)
    if candidate.model is None and (error := looks_like(candidate)) is not None:
        raise error
    return None
