"""Writes a model and the file of the values so that at any moment the old or the new pair is in place.

The name of the values contains their digest. So a new pair never overwrites the old values: new values are put beside
first, the model is replaced in one step, and only then the old values go.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from gopt.artifact.output_paths import check_not_inside, existing
from gopt.artifact.serialize import model_bytes
from gopt.artifact.states_file import StatesFile
from gopt.errors import OptionError
from gopt.ir.graph import Graph
from gopt.system.files import digest_of, is_regular_file, remove
from gopt.system.hashed import hashed
from gopt.system.signals import defer_signals
from gopt.system.staging import Staged, staged_file
from gopt.system.staging_names import find_staged

_DIGITS = 8
LARGEST = 512 << 20
"""Maximum size in bytes of a model file that gopt writes; larger models store their values in a file beside it."""


_NO_MODELS = (".pt", ".pth", ".safetensors", ".npz", ".npy")
"""Endings of files of values, which no model is found under again."""


def check_model(target: Path, *, shown: Path, force: bool, option: str = "-o") -> None:
    """Raise OptionError for a model path that must not be written; ``option``: of the path, -o for an ONNX file."""
    if option == "-o" and shown.suffix in _NO_MODELS:
        raise OptionError(
            f"{shown} would be an ONNX model under the name of a file of values",
            "let its name end in .onnx; gopt merge STEP --state-dict FILE writes .pt and .safetensors files",
        )
    if os.path.lexists(target):
        if not force:
            raise existing(shown, "name", option, lambda: _check_file(target, shown, option))
        _check_file(target, shown, option)
    check_not_inside(shown, target)


def _check_file(target: Path, shown: Path, option: str) -> None:
    """Raise OptionError for anything but a regular file: --force does not replace it."""
    if not is_regular_file(target):
        what = "a link" if target.is_symlink() else "a folder" if target.is_dir() else "no file"
        raise OptionError(f"{shown} is {what}: --force replaces only files", f"choose another name with {option}")


def write_model(target: Path, graph: Graph, values: StatesFile, *, force: bool) -> str:
    """Write a graph, with ``values``, if any, in a file beside; returns the file's name, or nothing.

    Raises OptionError for an existing target without ``force``, OSError.
    """
    if not values.offset:
        with staged_file(target) as staged:
            old = old_data(target)
            _fill(staged, model_bytes(graph, {}, "", {}))
            with defer_signals():
                put_file(staged, target, force)
                _tidy(target, "", old, {staged.path})
        return ""
    with staged_file(target) as data, staged_file(target) as staged:
        old = old_data(target)
        with data.open() as file, hashed(file) as written:
            written.writelines(values.chunks())
        name = data_name(target, written.sha256)
        _fill(staged, model_bytes(graph, values.offset, name, {}))
        with defer_signals():
            moved = _put_data(data, target.with_name(name), force)
            try:
                put_file(staged, target, force)
            except BaseException:
                if moved and old_data(target) != target.with_name(name):
                    remove(target.with_name(name))
                raise
            _tidy(target, name, old, {staged.path, data.path})
    return name


def data_name(target: Path, digest: str) -> str:
    """The file of a model's values."""
    return f"{target.name}.{digest[:_DIGITS]}.data"


def old_data(target: Path) -> Path | None:
    """Return the file of values beside a model from ``write_model``, if it exists now."""
    if not is_regular_file(target) or target.stat().st_size > LARGEST:
        return None
    model = onnx.ModelProto()
    try:
        model.ParseFromString(target.read_bytes())
    except (OSError, DecodeError):
        return None
    named = {
        entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }  # fmt: skip
    if len(named) == 1 and _data_of(target).fullmatch(name := named.pop()) and is_regular_file(target.with_name(name)):
        return target.with_name(name)
    return None


def _fill(staged: Staged, content: bytes) -> None:
    with staged.open() as file:
        file.write(content)


def put_file(staged: Staged, target: Path, force: bool) -> None:
    """Move the staged file into place. Raises OptionError for a file created meanwhile."""
    try:
        staged.commit_over() if force else staged.commit()
    except FileExistsError:
        raise OptionError(f"{target} was created by another command in the meantime", "choose another name") from None


def _put_data(data: Staged, target: Path, force: bool) -> bool:
    """Move the file of values into place, unless an identical file exists; returns whether the file was moved.

    Raises OptionError for other files without ``force``: the name says that the file was gopt's.
    """
    data.target = target
    if is_regular_file(target) and digest_of(target) == digest_of(data.path):
        return False
    if os.path.lexists(target):
        if not force or not is_regular_file(target):
            raise OptionError(f"{target} exists already", "choose another name with -o")
        data.commit_over()
        return False
    data.commit()
    return True


def _tidy(target: Path, name: str, old: Path | None, mine: set[Path]) -> None:
    """Remove values of earlier models of this name: of the ``old`` model, and of dead processes, known by the digest in
    the name.

    Values in use by a model in the folder stay, such as a copy of the old model."""
    with suppress(OSError):
        if any(staged.path not in mine for staged in find_staged(target.parent, target)):
            return  # another command is about to refer to its values
        for path in target.parent.iterdir():
            match = _data_of(target).fullmatch(path.name)
            if match and path.name != name and is_regular_file(path):
                ours = path == old or digest_of(path).hex().startswith(match[1])
                if ours and not any(_mentions(model, path.name) for model in {target, *target.parent.glob("*.onnx")}):
                    remove(path)


def _data_of(target: Path) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(target.name)}\.([0-9a-f]{{{_DIGITS}}})\.data")


def _mentions(model: Path, name: str) -> bool:
    """Return whether a model may refer to a file; assumed for a model too large to read."""
    if not model.is_file():
        return False
    return model.stat().st_size > LARGEST or os.fsencode(name) in model.read_bytes()
