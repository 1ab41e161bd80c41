"""Folders of ``torch.distributed.checkpoint``, without a process group: the layouts of FSDP2 and torchtitan."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException

from gopt.artifact.output_folder import replaced_folder
from gopt.artifact.output_paths import check_not_inside, resolve_output
from gopt.documents import read_bytes
from gopt.documents.torch_record import TorchGroup, TorchOptimizer, TorchRecord
from gopt.errors import GoptError, InputError, InvariantError, OptionError, RunError, UnsupportedError
from gopt.frontends.pytorch.saved_values import SCHEDULERS, SavedValues, load_weights, plain_tensor, plain_type
from gopt.frontends.pytorch.state_file import module_values, summary, training_values
from gopt.frontends.pytorch.tracing import EPOCH
from gopt.ir.external_data import DataFolder, check_dims, naming
from gopt.ir.file_reads import read_values
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, numpy_dtype
from gopt.offline.state_values import DCP_FILE, StateDict, StepValues, shared_prefix
from gopt.system.background import held
from gopt.system.files import create, sync
from gopt.text.sanitize import show

_CLASSES = {
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        (module, f"{system}Path"): getattr(pathlib, f"Pure{system}Path")
        for module in ("pathlib", "pathlib._local") for system in ("Posix", "Windows")
    },
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}  # fmt: skip
"""All that may stand in the metadata of a folder."""
_STATE = re.compile(r"(?:app\.)?optim(?:izers?)?\.state\.(.+)")
_GROUPS = re.compile(r"(?:app\.)?optim(?:izers?)?\.param_groups\.(.+)\.([^.]+)")
_AGAIN = "copy the whole folder again, as torch.distributed.checkpoint.save wrote it"
_PREFIXES = ("app.model.", "model.", "state_dict.", "states.")


class _Metadata(pickle.Unpickler):
    """Reads metadata, and refuses anything else by its name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CLASSES:
            raise InputError(
                f"has {show(f'{module}.{name}')}, which is no part of metadata: nothing of it was run", _AGAIN
            )
        return _CLASSES[module, name]


class DcpFolder:
    """The entries of a folder by their keys, read on demand."""

    def __init__(self, path: str) -> None:
        file = os.path.join(path, DCP_FILE)
        self._path, self._folder = path, DataFolder(file)
        data = read_bytes(file, "DOCUMENT_BYTES")
        with naming(file):
            try:
                content = _Metadata(io.BytesIO(data)).load()
                entries, self._storage = dict(content.state_dict_metadata), dict(content.storage_data)
            except InputError:
                raise
            except Exception as error:  # whatever damaged bytes make of pickle
                raise InputError(
                    f"has no metadata of a checkpoint, or is damaged: {show(str(error))}", _AGAIN
                ) from None
            kinds = (metadata.TensorStorageMetadata, metadata.BytesStorageMetadata)
            if not all(isinstance(key, str) and isinstance(entry, kinds) for key, entry in entries.items()):
                raise InputError("has entries of other kinds than tensors and bytes", _AGAIN)
        self.entries: Mapping[str, Any] = entries

    def is_tensor(self, key: str) -> bool:
        return isinstance(self.entries[key], metadata.TensorStorageMetadata)

    def value(self, key: str) -> Any:
        """A tensor, joined of its pieces when it is read, or what the bytes of another entry hold. Raises InputError,
        and on reading too."""
        with naming(self._path):
            if not self.is_tensor(key):
                return self._load(metadata.MetadataIndex(key), key)
            entry = self.entries[key]
            try:
                type = plain_type(key, entry.properties.dtype, tuple(entry.size))
                pieces = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            except (AttributeError, TypeError):
                raise InputError(f"the entry of {show(key)} is malformed", _AGAIN) from None
            check_dims(type.dims, type.dtype, show(key))
            return Tensor(type, reader=lambda: self._joined(key, type, pieces))

    def _joined(self, key: str, type: TensorType, pieces: list[tuple[Any, Any]]) -> np.ndarray:
        whole, filled = np.empty(type.dims, numpy_dtype(type.dtype)), np.zeros(type.dims, bool)
        with naming(self._path):
            for offsets, sizes in pieces:
                value = self._load(metadata.MetadataIndex(key, offsets), key)
                part = plain_tensor(key, value) if isinstance(value, torch.Tensor) else None
                ends = [start + size for start, size in zip(offsets, sizes)]
                inside = len(offsets) == len(type.dims) and all(
                    0 <= start <= end <= size for start, end, size in zip(offsets, ends, type.dims)
                )
                if part is None or part.type != TensorType(type.dtype, sizes) or not inside:
                    raise InputError(
                        f"the piece of {show(key)} at {show(list(offsets))} differs from the metadata", _AGAIN
                    )
                place = tuple(map(slice, offsets, ends))
                whole[place], filled[place] = part.numpy(), True
            if not filled.all():
                raise InputError(f"the pieces of {show(key)} do not make {type}", "all files of the folder are needed")
        return whole

    def _load(self, index: metadata.MetadataIndex, key: str) -> Any:
        info = self._storage.get(index)
        if not isinstance(info, filesystem._StorageInfo):
            raise InputError(f"{show(key)} is in no file of the folder", _AGAIN)
        if getattr(info, "transform_descriptors", None):
            raise UnsupportedError(f"{show(key)} is stored compressed", "save the checkpoint without extensions")
        file, size = self._folder.find(info.relative_path, show(key))
        start, length = info.offset, info.length
        if type(start) is not int or type(length) is not int or not 0 <= start <= start + length <= size:
            raise InputError(f"{show(info.relative_path)} has {size} bytes, and does not hold {show(key)}", _AGAIN)
        return load_weights(io.BytesIO(read_values(file, start, TensorType("uint8", (length,))).data))


def read_dcp(path: str, record: TorchRecord, types: Mapping[str, TensorType], notes: list[str]) -> dict[str, Tensor]:
    """The values of a folder by names of a step; raises InputError. A ``StateReader``."""
    folder, saved = DcpFolder(path), SavedValues(record, types, notes)
    names = types.keys() | record.module.keys()
    places = dict(_places(record))
    states: dict[int, dict[int, dict[str, Any]]] = {}
    values = {}
    of_state = {key: match[1] for key in folder.entries if (match := _STATE.fullmatch(key))}
    wrapper = shared_prefix(of_state.values(), places)
    shorts = {key: next((key.removeprefix(part) for part in _PREFIXES if key.startswith(part)), key)
              for key in folder.entries}  # fmt: skip
    inner = shared_prefix([short for key, short in shorts.items() if short != key], names)
    for key in folder.entries:
        home = places.get(of_state.get(key, "").removeprefix(wrapper))
        if home is not None:
            optimizer, position, name = home
            states.setdefault(optimizer, {}).setdefault(position, {})[name] = folder.value(key)
        elif folder.is_tensor(key) and not _GROUPS.fullmatch(key):
            short = shorts[key].removeprefix(inner)
            values[short if key not in names and short in names else key] = folder.value(key)
    scheduled = [f"{key}.last_epoch" for key in SCHEDULERS if f"{key}.last_epoch" in folder.entries]
    if EPOCH in types and scheduled:
        values[EPOCH] = saved.value(EPOCH, folder.value(scheduled[0]))
    step = folder.value("step") if "step" in folder.entries else None
    with naming(path):
        for number, entries in states.items():
            values |= saved.of_optimizer(record.optimizers[number], entries, step)
    groups = _groups(record)
    for key in folder.entries:
        match = _GROUPS.fullmatch(key)
        group = match and groups.get(match[1].removeprefix(wrapper))
        if match and group and match[2] in group.options:
            saved.compare(group, {match[2]: folder.value(key)}, step)
    return values


def _groups(record: TorchRecord) -> dict[str, TorchGroup]:
    """A group by its number among the groups of all optimizers, and by the names of its parameters in the module."""
    groups = [group for optimizer in record.optimizers for group in optimizer.groups]
    by_name = {parameter.name: group for group in groups for parameter in group.parameters}
    owners = {key: by_name[name] for key, name in record.module.items() if name in by_name}
    return {str(number): group for number, group in enumerate(groups)} | owners


def _places(record: TorchRecord) -> Iterator[tuple[str, tuple[int, int, str]]]:
    """Key of an optimizer's state, by the parameter's name or number, -> optimizer, position of the parameter, key."""
    for number, optimizer in enumerate(record.optimizers):
        for position, parameter in enumerate(_parameters(optimizer)):
            owners = [name for name, value in record.module.items() if value == parameter.name]
            for owner in (*owners, *([str(position)] if len(record.optimizers) == 1 else [])):
                for key in parameter.states:
                    yield f"{owner}.{key}", (number, position, key)


def _parameters(optimizer: TorchOptimizer) -> list[Any]:
    return [parameter for group in optimizer.groups for parameter in group.parameters]


class _Files(filesystem.FileSystem):
    """Files written as all files of gopt are."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode != "wb":
            raise InvariantError(f"a writer of checkpoints opens a file as {mode}")
        with create(Path(path)) as file:
            yield file

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """A name is given to what the disk has."""
        sync(Path(path))
        os.rename(path, new_path)


class _Writer(filesystem.FileSystemWriter):
    """A writer without a random number and the path of a draft in the metadata."""

    def storage_meta(self) -> None:
        return None


def save_dcp(path: str | os.PathLike[str], output: str | os.PathLike[str], *, all_states: bool = False) -> StateDict:
    """Write the module's state dict as a new folder, under ``model``; with ``all_states`` the optimizers' states by
    the names of parameters too, under ``optim``, as FSDP2 has them.

    Raises OptionError where the folder exists, or for ``all_states`` of a step not exported from PyTorch, InputError
    for a state without a value, RunError for a failed write."""
    shown, whole = Path(output), resolve_output(output)
    _refuse_existing(shown, whole)
    check_not_inside(shown, whole, "choose another folder with --dcp")
    step_values = StepValues.at(path)
    content: dict[str, Any] = {"model": module_values(step_values)}
    if all_states:
        training = training_values(step_values)
        assert step_values.record is not None
        content |= {"optim": _by_names(step_values.record, training["optimizer"])}
        content |= {key: training[key] for key in ("step", "scheduler") if key in training}
    with held(), replaced_folder(shown, whole, lambda _: _refuse_existing(shown, whole)) as draft:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is no process group
                writer = _Writer(draft, sync_files=False)  # all are synced at the end
                writer.fs = _Files()
                dcp.save(content, storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            for failure, _ in error.failures.values():  # interrupts are among them
                if isinstance(failure, OSError | GoptError) or not isinstance(failure, Exception):
                    raise failure from None
            raise RunError(f"cannot write {shown}: {error}") from error
    return summary(shown, content, step_values)


def _refuse_existing(shown: Path, whole: Path) -> None:
    if os.path.lexists(whole):
        raise OptionError(f"{shown} exists already", "--dcp writes a new folder: choose another one, or remove it")


def _by_names(record: TorchRecord, state_dicts: Any) -> dict[str, Any]:
    """The state dicts of optimizers as one, by the names of the parameters in the module."""
    owners = {name: key for key, name in reversed([*record.module.items()])}
    states: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    optimizers = state_dicts if isinstance(state_dicts, list) else [state_dicts]
    for optimizer, state_dict in zip(record.optimizers, optimizers):
        names = [owners.get(parameter.name, parameter.name) for parameter in _parameters(optimizer)]
        states |= {names[number]: entry for number, entry in state_dict["state"].items()}
        groups += [
            {**group, "params": [names[number] for number in group["params"]]} for group in state_dict["param_groups"]
        ]
    return {"state": states, "param_groups": groups}
