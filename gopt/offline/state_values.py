"""Values of states into a model, and out of ranks or a checkpoint as a state dict for PyTorch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gopt import api
from gopt.analysis.training import StateKind
from gopt.artifact.model_file import check_model, put_file
from gopt.artifact.output_paths import resolve_output
from gopt.artifact.safetensors_file import safetensors_chunks
from gopt.disk.files import make_folders, reason
from gopt.disk.signals import defer_signals, raise_on_signals
from gopt.disk.staging import staged_file
from gopt.errors import InputError, OptionError, RunError
from gopt.ir.external_data import load_state
from gopt.ir.load import load
from gopt.offline.folder_contents import read_folder
from gopt.offline.merge import save_model
from gopt.offline.unused_values import refuse_unused
from gopt.sanitize import show
from gopt.suggestions import did_you_mean

OF_MODULE = (StateKind.PARAMETER, StateKind.STATISTIC)
"""States that a PyTorch module has: parameters and running statistics."""


@dataclass(frozen=True, slots=True)
class StateDict:
    """Result of ``save_state_dict``: the number of tensors, and their bytes.

    ``missing``: states without a value.
    """

    file: str
    tensors: int
    nbytes: int
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The record that ``gopt merge --state-dict --json`` prints."""
        return {
            "format": "gopt-merge/1", "state_dict": self.file, "states": self.tensors, "bytes": self.nbytes,
            "missing": list(self.missing),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of ``load_values``.

    ``data``: the file of values beside the model, or ''. ``loaded``: the number of states that got a value. ``kept``:
    states that the file does not contain. ``unknown``: names that are not states, and were ignored.
    """

    model: str
    data: str
    loaded: int
    kept: tuple[str, ...]
    unknown: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The record that ``gopt load-state --json`` prints."""
        return {
            "format": "gopt-load-state/1", "model": self.model, "data": self.data, "loaded": self.loaded,
            "kept": list(self.kept), "unknown": list(self.unknown),
        }  # fmt: skip


def save_state_dict(
    path: str | os.PathLike[str], output: str | os.PathLike[str], *, all_states: bool = False, force: bool = False
) -> StateDict:
    """Write the values that the ranks of a folder or checkpoint hold as one safetensors file, by the source's names.

    Parameters and running statistics: what ``module.load_state_dict`` takes of a step that ``gopt export`` made.
    ``all_states``: optimizer states and counters too. Raises OptionError where the file exists and ``force`` is not
    given, InputError for ranks that are incomplete, RunError when it cannot be written.
    """
    target, shown = resolve_output(output), Path(output)
    if shown.suffix != ".safetensors":
        raise OptionError(f"{shown} is not a safetensors file", "let its name end in .safetensors")
    check_model(target, shown=shown, force=force)
    held = read_folder(path)
    wanted = [each.tensor for each in held.manifest.states if all_states or each.kind in OF_MODULE]
    values = {name: held.graph.initializers[name] for name in wanted if name in held.graph.initializers}
    types = {name: tensor.type for name, tensor in values.items()}
    try:
        make_folders(target.parent)
        with raise_on_signals(), staged_file(target) as staged:
            with staged.open() as file:
                for chunk in safetensors_chunks(types, (tensor.read() for tensor in values.values())):
                    file.write(chunk)
            with defer_signals():
                put_file(staged, target, force)
    except OSError as error:
        raise RunError(f"cannot write {shown}: {reason(error)}", "choose another path") from error
    missing = tuple(name for name in wanted if name not in values)
    return StateDict(str(shown), len(values), sum(type.nbytes for type in types.values()), missing)


def load_values(
    model: str | os.PathLike[str], state: str | os.PathLike[str], output: str | os.PathLike[str], *,
    ignore_unknown: bool = False, force: bool = False,
) -> Loaded:  # fmt: skip
    """Write a step with values of a ``.safetensors`` or ``.npz`` file, by the names of its states; other states keep
    theirs.

    Raises InputError for a tensor of another type or shape, for one that the next step would not read, and for a name
    that is not a state unless ``ignore_unknown`` is given; OptionError, RunError as ``merge``.
    """
    target = resolve_output(output)
    check_model(target, shown=Path(output), force=force)
    graph = load(model)
    training = api.find_roles(graph.twin(), Path(model).name)[0]
    states = training.state_of()
    given = load_state(state)
    unknown = tuple(name for name in given if name not in states)
    if unknown and not ignore_unknown:
        others = f", nor are {len(unknown) - 1} others" if len(unknown) > 1 else ""
        raise InputError(
            f"{state}: {show(unknown[0])} is not a state of the model{others}",
            did_you_mean(unknown[0], states) or "gopt inspect MODEL lists its states",
            "--ignore-unknown leaves it out (a tied weight is one state, under its first name)",
        )  # fmt: skip
    taken = [name for name in given if name in states]
    for name in taken:
        tensor = given[name]
        if tensor.type != graph.types[name]:
            raise InputError(
                f"{state}: {show(name)} is {tensor.type}, the model says {graph.types[name]}",
                "convert it, or leave it out of the file: that state keeps its value",
            )
        graph.initializers[name] = tensor
    refuse_unused(training, {name: given[name] for name in taken}, os.fsdecode(state))
    data = save_model(target, graph, Path(output), force=force)
    kept = tuple(name for name in states if name not in given)
    return Loaded(str(Path(output)), data, len(taken), kept, unknown)
