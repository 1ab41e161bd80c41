"""``gopt.inspect``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gopt.analysis.role_map import RoleMap
from gopt.errors import InputError, UnsupportedError
from gopt.offline.inspect import inspect_model
from gopt.offline.kinds.inference import inspect_inference
from gopt.offline.kinds.ort_artifacts import OrtArtifactsInspection
from gopt.offline.kinds.registry import Description, inspect_path
from gopt.options.types import checked
from gopt.steps.source import Source, load
from gopt.system.garbage import gc_paused
from gopt.system.progress import ProgressCallback, no_progress
from gopt.verbs.on_disk import Folder, on_disk


@checked
def inspect(
    what: Source | Folder,
    *,
    roles: RoleMap = RoleMap(),
    group_types: Mapping[str, str] | None = None,
    axes: Mapping[str, str] | None = None,
    advance: ProgressCallback = no_progress,
) -> Description:
    """Describe a training step, an output folder, a checkpoint, or any file that gopt knows by its content.

    ``roles``, ``group_types`` and ``axes`` are as in ``load``; ``advance`` is called with each phase.
    The kind of description depends on the kind of file; every description has ``to_json``. Raises InputError for a
    file that cannot be read.

    >>> gopt.inspect("fixtures/mlp_adamw.onnx").optimizers[0].name
    'AdamW'
    """
    if isinstance(what, Source):
        return inspect_model(what, advance)
    with on_disk(what) as path:
        return _inspect(path, roles, group_types or {}, axes or {}, advance)


def _inspect(
    path: str | os.PathLike[str], roles: RoleMap, groups: Mapping[str, str], axes: Mapping[str, str],
    advance: ProgressCallback,
) -> Description:  # fmt: skip
    """A kind recognised by content, a training step, or else an inference model."""
    advance("reading")
    described = inspect_path(path)
    if isinstance(described, OrtArtifactsInspection):
        return _with_step(described, path, roles)
    if described is not None:
        return described
    with gc_paused():
        try:
            source = load(path, roles=roles, group_types=groups, axes=axes, advance=advance)
        except (InputError, UnsupportedError) as refusal:
            if any((roles.loss, roles.states, roles.params, roles.batch, roles.shared)):
                raise  # the user says that it is a step
            return inspect_inference(Path(path), refusal)
        return inspect_model(source, advance)


def _with_step(result: OrtArtifactsInspection, path: str | os.PathLike[str], roles: RoleMap) -> OrtArtifactsInspection:
    """The parts of a folder, with their training step, or the reason for none."""
    try:
        return replace(result, step=inspect_model(load(path, roles=roles)))
    except (InputError, UnsupportedError) as refusal:
        return replace(result, refusal=refusal.message, next="; ".join(refusal.hints))
