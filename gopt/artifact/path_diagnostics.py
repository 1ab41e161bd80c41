"""Errors for a path of the wrong kind, naming the right command."""

from __future__ import annotations

from pathlib import Path

from gopt.artifact.checkpoint_index import INDEX_FILE, complete_steps, step_dir
from gopt.errors import InputError
from gopt.system.staging_names import displaced_copies
from gopt.text.sanitize import show
from gopt.text.suggestions import LISTED, files_with_suffix, near_file


def check_folder(path: Path, *, checkpoints: bool = False) -> None:
    """Raise InputError for anything but an output folder; ``checkpoints``: a step of a checkpoint is accepted, too."""
    steps = complete_steps(path)
    if steps:
        newest = path / step_dir(steps[-1])
        holds = f"holds {len(steps)} checkpoint{'s' * (len(steps) != 1)}"
        if checkpoints:
            raise InputError(f"{path} {holds}", f"name one: {newest}{' is the newest' * (len(steps) != 1)}")
        raise InputError(f"{path} is not an output folder: it {holds}", *_of_checkpoint(newest))
    if (path / INDEX_FILE).is_file():
        if not checkpoints:
            raise InputError(f"{path} is not an output folder: it is a checkpoint", *_of_checkpoint(path))
    elif not (path / "manifest.json").is_file():
        raise InputError(f"{path} is not an output folder: {_lacks(path)}", *_of_other(path, checkpoints))


def model_is_folder(path: Path) -> InputError:
    """The error for a folder where a model is expected."""
    error = f"{path}: is a folder, not a file"
    if steps := complete_steps(path):
        return InputError(error, _merges(path / step_dir(steps[-1])))
    if (path / INDEX_FILE).is_file():
        return InputError(error, _merges(path))
    if (path / "manifest.json").is_file():
        return InputError(error, f"it is an output folder: gopt reshard {path} makes other ranks of it", _merges(path))
    models = files_with_suffix(str(path), ".onnx")[:LISTED]
    if not models:
        return InputError(error, "it has no .onnx file: give a model")
    return InputError(error, f"give one of its files: {', '.join(map(show, models))}")


def _of_checkpoint(step: Path) -> tuple[str, str]:
    home = step.parent
    return (
        f"gopt run DIR --data FILE --steps N --checkpoint {home} --resume continues from it",
        f"gopt reshard {step} --ranks N -o DIR makes ranks of it",
    )


def _merges(path: Path) -> str:
    return f"gopt merge {path} -o MODEL makes a model of it"


def _lacks(path: Path) -> str:
    if not path.exists():
        return "there is no such folder"
    return "it has no manifest.json" if path.is_dir() else "it is a model" if path.suffix == ".onnx" else "it is a file"


def _of_other(path: Path, checkpoints: bool) -> tuple[str, ...]:
    aside = [] if path.exists() else displaced_copies(path)
    if aside:
        return (f"a process died while it replaced this folder: mv {aside[0]} {path} puts it back",)
    if path.is_file() and any((path.parent / name).is_file() for name in ("manifest.json", INDEX_FILE)):
        return (f"it is a part of one: give {path.parent}",)
    if path.is_file() and path.suffix == ".onnx":
        return (f"shard it first: gopt shard {path} --ranks N",)
    if not path.exists() and (near := near_file(path, folders=True)):
        return near
    if checkpoints:
        return ("give a folder of gopt shard, or a checkpoint of gopt run --checkpoint, such as CKPT/step_00000100",)
    return ("make one with gopt shard",)
