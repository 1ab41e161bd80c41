"""Values of states into a model, and out of ranks or a checkpoint as a state dict for PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gopt import api
from gopt.analysis.training import StateKind
from gopt.artifact.checkpoint_index import open_index
from gopt.artifact.model_file import check_model, put_file
from gopt.artifact.output_paths import resolve_output
from gopt.artifact.safetensors_file import safetensors_chunks
from gopt.documents.records import OPTIONAL, key, to_document
from gopt.documents.torch_record import NO_RECORD, TorchRecord
from gopt.errors import InputError, OptionError, RunError
from gopt.ir.external_data import load_state
from gopt.ir.graph import Graph
from gopt.ir.load import load
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.offline.folder_contents import read_folder, step_at
from gopt.offline.merge import save_model
from gopt.offline.unused_values import refuse_unused
from gopt.system.files import make_folders, reason
from gopt.system.signals import defer_signals, raise_on_signals
from gopt.system.staging import staged_file
from gopt.text.sanitize import show
from gopt.text.suggestions import did_you_mean

OF_MODULE = (StateKind.PARAMETER, StateKind.STATISTIC)
"""States that a PyTorch module has: parameters and running statistics."""
TORCH_FILES = (".pt", ".pth")
"""Endings of files that ``torch.save`` writes."""
DCP_FILE = ".metadata"
"""The file that a folder of ``torch.distributed.checkpoint`` has."""


@dataclass(frozen=True, slots=True)
class StateDict:
    """Result of ``save_state_dict``: the number of tensors, and the bytes.

    ``missing``: states without a value.
    """

    file: str = field(metadata=key("state_dict"))
    tensors: int = field(metadata=key("states"))
    nbytes: int = field(metadata=key("bytes"))
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The record that ``gopt merge --state-dict --json`` prints."""
        return {"format": "gopt-merge/1"} | to_document(self)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of ``load_values``.

    ``data``: the file of values beside the model, or ''. ``loaded``: the number of states with a value from the file.
    ``kept``: states outside the file. ``unknown``: names that are not states, ignored. ``notes``: options of optimizers
    unlike the step's."""

    model: str
    data: str
    loaded: int
    kept: tuple[str, ...]
    unknown: tuple[str, ...]
    notes: tuple[str, ...] = field(default=(), metadata=OPTIONAL)

    def to_json(self) -> dict[str, Any]:
        """The record that ``gopt load-state --json`` prints."""
        return {"format": "gopt-load-state/1"} | to_document(self)


@dataclass(frozen=True, slots=True)
class StepValues:
    """The values of a folder, checkpoint or step. ``record``: PyTorch's names of the values, if the step was exported;
    ``step``: of the checkpoint, 0 for a folder, None for a file."""

    graph: Graph
    kinds: Mapping[str, StateKind]
    record: TorchRecord | None
    step: int | None

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> StepValues:
        """The values of ``path``; raises as ``step_at``."""
        target = Path(path)
        if target.is_file():
            training = step_at(target).training
            kinds, graph, step = {state.tensor: state.kind for state in training.states}, training.graph, None
        else:
            folder = read_folder(path)
            kinds, graph = {state.tensor: state.kind for state in folder.manifest.states}, folder.graph
            step = open_index(target).step if folder.trained else 0
        return cls(graph, kinds, TorchRecord.of(graph.metadata, str(path)), step)

    def of_module(self) -> dict[str, str]:
        """Name in the module's state dict -> value of the step; without a record, parameters and running statistics
        under their own names."""
        if self.record is not None:
            return dict(self.record.module)
        return {name: name for name, kind in self.kinds.items() if kind in OF_MODULE}


def save_state_dict(
    path: str | os.PathLike[str], output: str | os.PathLike[str], *, all_states: bool = False, force: bool = False
) -> StateDict:
    """Write the values of a folder's or checkpoint's ranks, or of a step, as one safetensors file.

    Of a step exported by ``gopt export``: the input of ``module.load_state_dict``, with tied, frozen and counted
    tensors; of others parameters and running statistics. ``all_states``: all states by the step's names instead. Raises
    OptionError where the file exists and ``force`` is not given, InputError for incomplete ranks, RunError when the
    file cannot be written."""
    shown = Path(output)
    if shown.suffix != ".safetensors":
        raise OptionError(f"{shown} is not a safetensors file", "let its name end in .safetensors or .pt")
    target = new_file(output, force)
    step_values = StepValues.at(path)
    wanted = {name: name for name in step_values.kinds} if all_states else step_values.of_module()
    initializers = step_values.graph.initializers
    values = {name: initializers[value] for name, value in wanted.items() if value in initializers}
    types = {name: tensor.type for name, tensor in values.items()}

    def write(file: IO[bytes]) -> None:
        for chunk in safetensors_chunks(types, (tensor.read() for tensor in values.values())):
            file.write(chunk)

    put_new(target, shown, force, write)
    missing = [name for name in wanted if name not in values]
    lost = () if all_states or step_values.record is None else step_values.record.lost
    return StateDict(str(shown), len(values), sum(type.nbytes for type in types.values()), (*missing, *lost))


def new_file(output: str | os.PathLike[str], force: bool, option: str = "--state-dict") -> Path:
    """The resolved path of a file to write, named by ``option``; raises OptionError for a taken path."""
    target = resolve_output(output)
    check_model(target, shown=Path(output), force=force, option=option)
    return target


def put_new(target: Path, shown: Path, force: bool, write: Callable[[IO[bytes]], object]) -> None:
    """The file filled by ``write`` takes its place at once, or not at all; raises RunError."""
    try:
        make_folders(target.parent)
        with raise_on_signals(), staged_file(target) as staged:
            with staged.open() as file:
                write(file)
            with defer_signals():
                put_file(staged, target, force)
    except OSError as error:
        raise RunError(f"cannot write {shown}: {reason(error)}", "choose another path") from error


StateReader = Callable[[str, TorchRecord, Mapping[str, TensorType], list[str]], Mapping[str, Tensor]]
"""Reads values of a path by names of the step or of the module's state dict, for states and constants of these types,
and adds notes to the list; the record is empty for a step of another origin."""


def shared_prefix(names: Iterable[str], own_names: Collection[str]) -> str:
    """The text before names of the step in all names, such as the ``module.`` and ``_orig_mod.`` of wrappers; '' where
    a name is a name of the step."""
    names = [*names]
    if not names or any(name in own_names for name in names):
        return ""
    parts = names[0].split(".")
    for prefix in ("".join(f"{part}." for part in parts[:count]) for count in range(1, len(parts))):
        if all(name.startswith(prefix) for name in names) and any(
            name.removeprefix(prefix) in own_names for name in names
        ):
            return prefix
    return ""


def load_values(
    model: str | os.PathLike[str], state: str | os.PathLike[str], output: str | os.PathLike[str], *,
    ignore_unknown: bool = False, force: bool = False, read: StateReader = lambda path, *_: load_state(path),
) -> Loaded:  # fmt: skip
    """Write a step with values of a file, by state name; other states keep their values.

    ``read``: by default of safetensors and ``.npz``. Raises InputError for a tensor of another type or shape, for a
    value that the next step would not read, and for an unknown name unless ``ignore_unknown`` is given; OptionError,
    RunError as ``merge``."""
    target = resolve_output(output)
    check_model(target, shown=Path(output), force=force)
    graph = load(model)
    record = TorchRecord.of(graph.metadata, os.fsdecode(model)) or NO_RECORD
    training = api.alone(lambda roles: api.find_roles(graph.twin(), Path(model).name, roles)[0])
    states = training.state_of()
    types = {name: graph.types[name] for name in (*states, *sorted(record.held & graph.initializers.keys()))}
    notes: list[str] = []
    file = read(os.fsdecode(state), record, types, notes)
    sources = _own_names(file, record.module, types, os.fsdecode(state))
    unknown = tuple(name for name in sources if name not in types)
    if unknown and not ignore_unknown:
        more = f", nor are {len(unknown) - 1} others" if len(unknown) > 1 else ""
        raise InputError(
            f"{state}: {show(unknown[0])} is not a state of the model{more}",
            did_you_mean(unknown[0], states) or "gopt inspect MODEL lists its states",
            "--ignore-unknown leaves it out",
        )
    loaded = {name: file[source] for name, source in sources.items() if name in types}
    graph.initializers.update(loaded)
    refuse_unused(training, {name: loaded[name] for name in loaded if name in states}, os.fsdecode(state))
    data = save_model(target, graph, Path(output), force=force)
    unset = tuple(name for name in states if name not in sources)
    return Loaded(str(Path(output)), data, len(loaded), unset, unknown, tuple(dict.fromkeys(notes)))


def _own_names(
    tensors: Mapping[str, Tensor], names: Mapping[str, str], types: Mapping[str, TensorType], file: str
) -> dict[str, str]:
    """Name in the step -> name in the file. ``names``: of the module's state dict, where a tied tensor has several.

    Raises InputError for a tensor of another type than ``types``, and for two values of one tensor under two names."""
    names_of: dict[str, str] = {}
    prefix = shared_prefix(tensors, types.keys() | names.keys())
    for name, tensor in tensors.items():
        short = name.removeprefix(prefix)
        target = short if short in types else names.get(short, short)
        if tensor.type != types.get(target, tensor.type):
            raise InputError(
                f"{file}: {show(name)} is {tensor.type}, the model says {types[target]}",
                "convert it, or leave it out of the file: that state keeps its value",
            )
        if target in names_of and tensor.numpy().tobytes() != tensors[names_of[target]].numpy().tobytes():
            raise InputError(
                f"{file}: {show(name)} and {show(names_of[target])} have two values, and are one tensor in the module",
                "leave one of them out",
            )
        names_of[target] = name
    return names_of
