"""What an output folder or a checkpoint holds: the source, and the current value of each of its states, in pieces.

A value is a list of byte ranges in the ranks' files: of those nothing is kept but headers. Files of a checkpoint are
read once, in blocks, for their digests.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from gopt.analysis.rolemap import RoleMap
from gopt.api import roles_from
from gopt.errors import InputError
from gopt.given import check_folder
from gopt.graph.external import load_state
from gopt.graph.load import load
from gopt.graph.model import Graph, Tensor
from gopt.graph.types import TensorType
from gopt.mesh import Mesh
from gopt.offline.inspect import read_record
from gopt.seal import INDEX, check_file, rank_name, read_index


@dataclass(slots=True)
class Held:
    """The source graph with the values that the ranks hold, how its roles were settled, and what was written then."""

    graph: Graph
    roles: RoleMap
    manifest: dict[str, Any]
    report: dict[str, Any]
    missing: list[str]
    """States without a value."""


def read_held(path: str | os.PathLike[str]) -> Held:
    """Read an output folder, or one step of a checkpoint; raises InputError where something is missing or
    differs, RunError where a checkpoint is damaged."""
    folder, home = Path(path), _home(path)
    checkpoint = home != folder
    manifest, report = read_record(home, "manifest"), read_record(home, "report")
    source = home / "source.onnx"
    if not source.is_file():
        raise InputError(f"{home} has no {source.name}")
    graph = load(source, own=True)
    text = graph.metadata.get("gopt.roles")
    if text is None:
        raise InputError(f"{source} does not say which values are states", "take the one that gopt shard wrote")
    try:
        values = _values(folder, manifest, graph, checkpoint)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{home}: the manifest is damaged ({type(error).__name__}: {error})") from None
    missing = [each["tensor"] for each in manifest["states"] if each["tensor"] not in values]
    header = onnx.ModelProto()
    header.CopyFrom(graph.header)
    kept = [entry for entry in header.metadata_props if not entry.key.startswith("gopt.")]
    del header.metadata_props[:]
    header.metadata_props.extend(kept)
    metadata = {key: value for key, value in graph.metadata.items() if not key.startswith("gopt.")}
    whole = replace(graph, header=header, metadata=metadata, initializers={**graph.initializers, **values})
    return Held(whole, roles_from(text), manifest, report, missing)


def read_mesh(path: str | os.PathLike[str]) -> Mesh:
    """The mesh of an output folder or a checkpoint; raises InputError."""
    home = _home(path)
    try:
        return Mesh.from_record(read_record(home, "manifest")["mesh"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{home}: the manifest is damaged ({type(error).__name__}: {error})") from None


def _home(path: str | os.PathLike[str]) -> Path:
    """The folder that has the manifest: of a checkpoint the one it lies in."""
    folder = Path(path)
    check_folder(folder, checkpoints=True)
    return (folder if folder.name else folder.resolve()).parent if (folder / INDEX).is_file() else folder


def _values(folder: Path, manifest: Mapping[str, Any], graph: Graph, checkpoint: bool) -> dict[str, Tensor]:
    """Every state whose pieces are all there."""
    pieces: dict[str, dict[int, Tensor]] = {}
    files = read_index(folder, manifest) if checkpoint else {}
    for rank in manifest["ranks"]:
        stored = _checkpointed(folder, rank, files) if checkpoint else _written(folder, rank)
        for state in (*manifest["common"]["state"], *rank["state"]):
            if state.get("copy") or state["input"] not in stored:
                continue
            tensor, place = stored[state["input"]], 0
            for piece in state["pieces"]:
                length = piece["stop"] - piece["start"]
                held = pieces.setdefault(piece["tensor"], {})
                if piece["start"] not in held:
                    held[piece["start"]] = tensor.piece(place, place + length)
                place += length
            if place != tensor.type.elements:
                what = f"{state['input']} is {tensor.type}, its pieces have {place} elements"
                raise InputError(f"rank {rank['rank']}: {what}")
    found = {}
    order = {name: place for place, name in enumerate(graph.inputs)}  # every state is an input of the kept source
    for name in sorted(pieces, key=lambda name: order[name]):
        held = pieces[name]
        type = graph.types[name]
        parts = tuple(held[start] for start in sorted(held))
        _check_tiles(name, type, [(start, held[start].type) for start in sorted(held)])
        found[name] = replace(parts[0], type=type) if len(parts) == 1 else Tensor(type, parts=parts)
    return found


def _check_tiles(name: str, type: TensorType, parts: list[tuple[int, TensorType]]) -> None:
    place = 0
    for start, part in parts:
        if start != place or part.dtype != type.dtype:
            raise InputError(f"the pieces of {name} do not tile it: {part} at {start}, expected at {place}")
        place += part.elements
    if place != type.elements:
        raise InputError(f"the pieces of {name} end at {place} of {type.elements}: a rank is missing")


def _written(folder: Path, rank: Mapping[str, Any]) -> dict[str, Tensor]:
    """Initial values to which the files of a rank refer."""
    found = {}
    for name in rank["files"].values():
        path = folder / Path(name).name
        if not path.is_file():
            raise InputError(f"rank {rank['rank']} has no file {path}")
        tensors = load(path, own=True).initializers
        found.update({name: tensor for name, tensor in tensors.items() if tensor.path})
    return found


def _checkpointed(folder: Path, rank: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    path = folder / rank_name(rank["rank"])
    check_file(path, files.get(path.name))
    return load_state(path)
