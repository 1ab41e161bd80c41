"""What a path is that was given where another thing belongs, and which command takes it."""

from __future__ import annotations

from pathlib import Path

from gopt.disk.names import put_aside
from gopt.errors import InputError
from gopt.seal import INDEX, step_name, whole_steps


def check_folder(path: Path, *, checkpoints: bool = False) -> None:
    """Raise InputError for what is no output folder; ``checkpoints``: one step of a checkpoint will do as well."""
    steps = whole_steps(path)
    if steps:
        newest = path / step_name(steps[-1])
        holds = f"holds {len(steps)} checkpoint{'s' * (len(steps) != 1)}"
        if checkpoints:
            raise InputError(f"{path} {holds}", f"name one: {newest}{' is the newest' * (len(steps) != 1)}")
        raise InputError(f"{path} is no output folder: it {holds}", *_of_checkpoint(newest))
    if (path / INDEX).is_file():
        if not checkpoints:
            raise InputError(f"{path} is no output folder: it is a checkpoint", *_of_checkpoint(path))
    elif not (path / "manifest.json").is_file():
        raise InputError(f"{path} is no output folder: {_lacks(path)}", _of_other(path))


def folder_for_model(path: Path) -> InputError:
    """The refusal of a folder where a model belongs."""
    error = f"{path}: is a folder, not a file"
    if steps := whole_steps(path):
        return InputError(error, _merges(path / step_name(steps[-1])))
    if (path / INDEX).is_file():
        return InputError(error, _merges(path))
    if (path / "manifest.json").is_file():
        return InputError(error, f"it is an output folder: gopt reshard {path} makes other ranks of it", _merges(path))
    return InputError(error)


def _of_checkpoint(step: Path) -> tuple[str, str]:
    home = step.parent
    return (
        f"gopt run DIR --checkpoint {home} --resume goes on from it",
        f"gopt reshard {step} --ranks N -o DIR makes ranks of it",
    )


def _merges(path: Path) -> str:
    return f"gopt merge {path} -o MODEL makes a model of it"


def _lacks(path: Path) -> str:
    if not path.exists():
        return "there is no such folder"
    return "it has no manifest.json" if path.is_dir() else "it is a model" if path.suffix == ".onnx" else "it is a file"


def _of_other(path: Path) -> str:
    aside = [] if path.exists() else put_aside(path)
    if aside:
        return f"it was being replaced when a process died: mv {aside[0]} {path} puts it back"
    if path.is_file() and any((path.parent / name).is_file() for name in ("manifest.json", INDEX)):
        return f"it is a part of one: give {path.parent}"
    if path.is_file() and path.suffix == ".onnx":
        return f"shard it first: gopt shard {path} --ranks N"
    return "make one with gopt shard"
