"""Merges ranks into one model, or reshards ranks: values are copied in pieces, never whole in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gopt import api
from gopt.artifact.model_file import check_model, write_model
from gopt.artifact.output_paths import resolve_output
from gopt.artifact.states_file import INLINE, StatesFile
from gopt.errors import OptionError, RunError
from gopt.ir.graph import Graph
from gopt.offline.folder_contents import FolderContents, kept_source, read_folder
from gopt.passes import DEFAULT, PASSES, find, joined
from gopt.passes.base import build_options, dashed
from gopt.passes.pipeline import Pipeline, build_pipeline
from gopt.passes.preflight import check_stage
from gopt.passes.shard.options import Options, useless
from gopt.records.mesh import PIPELINE, Mesh
from gopt.records.topology import Topology
from gopt.schedules.builders import is_name, stages_of
from gopt.system.files import make_folders, reason
from gopt.system.signals import raise_on_signals
from gopt.text.notebook import HtmlTable

EMBED = 64 << 20
"""Bytes of values up to which a model is one file; larger ones have their values in a second file."""


@dataclass(frozen=True, slots=True)
class Merged(HtmlTable):
    """Result of ``merge``."""

    model: str
    data: str
    states: int
    nbytes: int
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model, "data": self.data, "states": self.states, "bytes": self.nbytes,
            "missing": list(self.missing),
        }  # fmt: skip


def merge(path: str | os.PathLike[str], model: str | os.PathLike[str], *, force: bool = False) -> Merged:
    """Write the source with the values of a folder's or checkpoint's ranks.

    States without a value on any rank stay without. Raises OptionError when the model exists and ``force`` is not
    given, InputError for incomplete ranks, RunError when the model cannot be written."""
    contents, target = read_folder(path), resolve_output(model)
    check_model(target, shown=Path(model), force=force)
    graph = contents.graph
    total = sum(tensor.nbytes for tensor in graph.initializers.values())
    data = save_model(target, graph, Path(model), force=force)
    count = len(contents.manifest.states) - len(contents.missing)
    return Merged(str(Path(model)), data, count, total, tuple(contents.missing))


def save_model(target: Path, graph: Graph, shown: Path, *, force: bool) -> str:
    """Write a graph to ``target``, in messages ``shown``; values of more than EMBED bytes go into a second file.

    Return the path of this second file as shown, or ''. Raise OptionError if the target is taken and ``force`` is not
    given, RunError if the target cannot be written."""
    values = StatesFile()
    if sum(tensor.nbytes for tensor in graph.initializers.values()) > EMBED:
        for name, tensor in graph.initializers.items():
            if tensor.nbytes > INLINE:
                values.add([(name, tensor)])
    try:
        make_folders(target.parent)
        with raise_on_signals():
            data = write_model(target, graph, values, force=force)
    except OSError as error:
        raise RunError(f"cannot write {shown}: {reason(error)}", "choose another path with -o") from error
    return str(shown.with_name(data)) if data else ""


def reshard(
    path: str | os.PathLike[str],
    mesh: Mesh,
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    accumulate: int | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> api.Sharded:
    """The ranks of another mesh from the ranks of a folder or checkpoint, with current values; nothing is written.

    Passes and options are taken from the report, with replacements in ``options`` by pass and in ``accumulate``.
    Options without an effect any more are dropped, with a call of ``note`` for each."""
    check_stage(mesh, (options or {}).get("shard", {}).get("stage"))
    folder = read_folder(path)
    micro_steps = folder.manifest.accumulate if accumulate is None else accumulate
    return api.shard(
        kept_source(folder), mesh, pipeline=_pipeline(folder, mesh, options or {}, note), accumulate=micro_steps
    )


def _pipeline(
    contents: FolderContents, mesh: Mesh, options: Mapping[str, Mapping[str, Any]], note: Callable[[str], None]
) -> Pipeline:
    """The pipeline of the report with some options replaced; for a split, the default pipeline."""
    if contents.manifest.parameter_server is not None:
        inherited = {"loss-reduction": contents.manifest.loss_reduction}
        chosen = {**options, "shard": inherited | dict(options.get("shard", {}))}
        return build_pipeline(joined([(name, {}) for name in DEFAULT], options), chosen)
    remaining = {name: dict(values) for name, values in options.items()}
    items = []
    for entry in contents.report.pipeline:
        name, overrides = entry.name, remaining.pop(entry.name, {})
        whole = dashed(entry.options) | overrides
        if name == "shard":
            whole = _of_use(whole, overrides, note)
        elif name == "tensor-parallel" and "link" not in overrides:
            whole = _on_links(whole, mesh, note)
        elif name == "pipeline":
            whole = _of_stages(whole, overrides, mesh, note)
        items.append((name, whole))
    of_axes = {name for name in DEFAULT if mesh.along(PASSES[name].axis) > 1}
    return build_pipeline(joined(items, of_axes | remaining.keys()), remaining)


def _of_stages(
    whole: dict[str, Any], overrides: Mapping[str, Any], mesh: Mesh, note: Callable[[str], None]
) -> dict[str, Any]:
    """Options of ``pipeline`` without inherited ones for another number of stages."""
    members = mesh.along(PIPELINE)
    patterns, schedule = str(whole.get("stages") or ""), str(whole.get("schedule") or "")
    stages = stages_of(schedule, members) if is_name(schedule) else members
    idle = {
        "stages": bool(patterns) and patterns.count("|") + 1 != stages,
        "schedule": bool(schedule) and (members == 1 or not is_name(schedule)),
    }
    for name, drops in idle.items():
        if drops and name not in overrides:
            note(f"{name} {whole[name]!r} has no use on the mesh {mesh}, and is left out")
            whole.pop(name)
    return whole


def _on_links(whole: dict[str, Any], mesh: Mesh, note: Callable[[str], None]) -> dict[str, Any]:
    """Options of ``tensor-parallel`` without inherited links of other axes."""
    link = whole.get("link")
    try:
        if link:
            Topology.parse(link, mesh)
    except OptionError as error:
        note(f"tensor-parallel: link={link} is dropped: {error.message}")
        return {name: value for name, value in whole.items() if name != "link"}
    return whole


def _of_use(whole: dict[str, Any], overrides: Mapping[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
    """Options of ``shard`` without inherited options that have no effect beside the new ones."""
    while True:
        chosen = build_options(find("shard"), whole)
        assert isinstance(chosen, Options)
        names = dashed(useless(chosen))
        dead = [
            name
            for name in names
            if name in whole and name.replace("-", "_") not in overrides and name not in overrides
        ]
        if not dead:
            return whole
        for name in dead:
            note(f"shard: {name}={whole[name]} is dropped: {names[name][0]}")
        whole = {name: value for name, value in whole.items() if name not in dead}
