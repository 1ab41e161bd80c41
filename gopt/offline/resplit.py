"""Makes trainers and servers from the values of an output folder or a checkpoint, of ranks or of another split."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from gopt import api
from gopt.analysis.loss_reduction import LossReduction
from gopt.artifact.pass_facts import SplitSettings, split_records
from gopt.artifact.server_entries import Mode, PullAt
from gopt.errors import OptionError
from gopt.offline.folder_contents import FolderContents, kept_source, read_folder
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.placement import Placement
from gopt.parameter_server.slicing import Slicing

_APART = ("async", "half-async")


def resplit(
    path: str | os.PathLike[str],
    overrides: Mapping[str, Any],
    *,
    note: Callable[[str], None] = lambda text: None,
) -> api.Split:
    """Trainers and servers with the values of a folder or checkpoint; nothing is written.

    ``overrides`` has fields of ``SplitOptions``. Other fields come from the folder's split; for sharded ranks,
    micro-steps and the reduction of the loss stay. Options without an effect any more are dropped, with a call of
    ``note`` for each. Raises as ``read_folder`` and ``api.split``."""
    folder = read_folder(path)
    fields = {**inherited(folder, overrides, note), **overrides}
    for name in ("trainers", "servers"):
        if name not in fields:
            raise OptionError(f"the number of {name} is missing", f"give --{name} N")
    return api.split(kept_source(folder), SplitOptions(**fields))


def inherited(contents: FolderContents, overrides: Mapping[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
    """Return the ``SplitOptions`` stored in a folder, as far as compatible with ``overrides``."""
    manifest = contents.manifest
    fields: dict[str, Any] = {
        "loss_reduction": LossReduction.parse(manifest.loss_reduction), "accumulate": manifest.accumulate,
    }  # fmt: skip
    records, entry = split_records(contents.report.pipeline), manifest.parameter_server
    if records is None or entry is None:
        return fields
    settings = records[0]
    fields |= {
        "trainers": manifest.mesh.ranks, "servers": settings.servers, "mode": Mode(settings.mode),
        "slicing": Slicing(settings.slicing), "minimum": settings.minimum, "placement": Placement(settings.placement),
        "wire": settings.wire, "cap": settings.bucket_bytes, "fixed_trainers": settings.fixed_trainers,
        "tables": settings.tables, "tables_off": settings.tables_off, "table_memory": settings.table_memory,
        "rows": settings.rows, "init": settings.init,
    }  # fmt: skip
    _drop_of_tables(fields, contents.trained, overrides, note)
    if not overrides.keys() & {"mode", "accumulate"}:
        fields["pull"] = PullAt(settings.pull)
    mode = str(overrides.get("mode", settings.mode))
    fields |= _of_mode(settings, mode, note)
    servers = overrides.get("servers", settings.servers)
    if settings.server_map and "given" not in overrides:
        if servers == settings.servers:
            fields["given"] = settings.server_map
        else:
            note(f"the server map is dropped: it is for {settings.servers} servers")
    if entry.roles is not None and "roles" not in overrides:
        roles = entry.roles.roles()
        if (overrides.get("trainers", manifest.mesh.ranks), servers) == (roles.trainers, roles.servers):
            fields["roles"] = roles
        else:
            note(f"the roles {roles} are dropped: they are for other counts")
    return fields


def _drop_of_tables(
    fields: dict[str, Any], trained: bool, overrides: Mapping[str, Any], note: Callable[[str], None]
) -> None:  # fmt: skip
    """Leave out options of tables without an effect any more."""
    why = "mode geo has no tables" if overrides.get("mode", fields["mode"]) == "geo" else ""
    if overrides.get("tables_off"):
        why = "there are no tables any more"
    for name in ("tables", "rows", "init"):
        reason = "the checkpoint has all rows" if name == "init" and trained else why
        if fields[name] and reason:
            note(f"{name} {dict(fields[name])} is dropped: {reason}")
            fields[name] = {}


def _of_mode(settings: SplitSettings, mode: str, note: Callable[[str], None]) -> dict[str, Any]:
    """Return the options that exist in some modes only."""
    options: dict[str, Any] = {}
    for name, value, default, modes in (
        ("compensation", settings.compensation, None, _APART),
        ("count", settings.count, "round", _APART),
        ("every", settings.every, 1, ("geo",)),
    ):
        if value == default:
            continue
        if mode in modes:
            options[name] = value
        else:
            note(f"{name} {value} is dropped: it has no effect in mode {mode}")
    return options
