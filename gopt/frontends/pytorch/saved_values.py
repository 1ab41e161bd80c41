"""Values of a file of ``torch.save`` by names of a step, the inverse of ``state_file``. No code of a file is run."""

from __future__ import annotations

import math
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
import torch

from gopt.documents.torch_record import TorchGroup, TorchOptimizer, TorchRecord
from gopt.errors import InputError
from gopt.frontends.pytorch.state_file import group_options, states_in
from gopt.frontends.pytorch.tracing import EPOCH
from gopt.ir.external_data import naming, regular_size
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, known, numpy_dtype
from gopt.offline.state_values import shared_prefix
from gopt.runtime.pytorch.tensors import array_over
from gopt.text.sanitize import show

_MODULES = ("model", "state_dict", "model_state_dict")
"""Keys of the module's state dict among a training's keys."""
_OPTIMIZERS = ("optimizer", "optimizers", "optimizer_state_dict", "optimizer_states")
"""Keys of the optimizers' state dicts."""
SCHEDULERS = ("scheduler", "lr_scheduler")

_TURNS = (0, 1, 1 << 30)
"""Numbers of steps at which changing options differ."""
_SAVE = "save state dicts alone: torch.save(module.state_dict(), FILE)"
_OPTIMIZER = "torch.save({'model': module.state_dict(), 'optimizer': optimizer.state_dict()}, FILE)"
_OTHER = "export the step with the optimizer of the file, or leave its states out"


def read_torch(path: str, record: TorchRecord, types: Mapping[str, TensorType], notes: list[str]) -> dict[str, Tensor]:
    """The values of a state dict, or of a dict of several; raises InputError. A ``StateReader``."""
    with naming(path):
        regular_size(path)
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise InputError("is a compressed archive", "write it with torch.save")
        return SavedValues(record, types, notes).of_file(load_weights(path))


def load_weights(source: str | IO[bytes]) -> Any:
    """Tensors in containers, in host memory; raises InputError for any other class, and for damage.

    Not mapped: a file shortened meanwhile would end the process."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other protocols of pickle
            return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes torch.load raise
        text = str(error)
        if match := re.search(r"GLOBAL (\S+)", text) or re.search(r"[Tt]rying to load unsupported GLOBAL (\S+)", text):
            message = f"has {show(match[1])}, which is code and no tensor: nothing of it was run"
            raise InputError(message, _SAVE) from None
        reason = text.strip().partition("\n")[0] or type(error).__name__
        raise InputError(f"is no file of torch.save, or is damaged: {show(reason)}", _SAVE) from None


class SavedValues:
    """Values by names of a step with a record, and notes on options unlike the step's."""

    def __init__(self, record: TorchRecord, types: Mapping[str, TensorType], notes: list[str]) -> None:
        self._record, self._types, self._notes = record, types, notes

    def of_file(self, content: Any) -> dict[str, Tensor]:
        """The values of what ``torch.save`` wrote."""
        if isinstance(content, Mapping) and {"state", "param_groups"} <= content.keys():
            content = {"optimizer": content}
        if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
            raise InputError(f"has no state dict, but {type(content).__name__}", _SAVE)
        modules = [content[key] for key in _MODULES if isinstance(content.get(key), Mapping)]
        optimizers = [content[key] for key in _OPTIMIZERS if isinstance(content.get(key), Mapping | list | tuple)]
        module = modules[0] if modules else {} if optimizers else content
        prefix = shared_prefix(module, self._types.keys() | self._record.module.keys())
        values = dict(self.tensors("", {key.removeprefix(prefix): value for key, value in module.items()}))
        if modules or optimizers:
            values |= self._of_training(content, [part for entry in optimizers for part in _each_optimizer(entry)])
        if not values:
            raise InputError("has no tensors under names", f"a dict has its state dict under {show(_MODULES[0])}")
        return values

    def _of_training(self, content: Mapping[str, Any], optimizers: Sequence[Any]) -> dict[str, Tensor]:
        """Values beside the module's."""
        record, values = self._record, dict[str, Tensor]()
        if optimizers and record.optimizers and len(optimizers) != len(record.optimizers):
            raise InputError(f"has {len(optimizers)} optimizers, the step {len(record.optimizers)}", _OTHER)
        for number, state_dict in enumerate(optimizers):
            if number >= len(record.optimizers):  # of a step of another origin
                values |= self.tensors("optimizer.state", state_dict.get("state", {}))
                continue
            optimizer = record.optimizers[number]
            states, groups = _by_position(optimizer, state_dict)
            values |= self.of_optimizer(optimizer, states, content.get("step"))
            for group, options in zip(optimizer.groups, groups):
                self.compare(group, options, content.get("step"))
                for key, name in (group.counters or {}).items():
                    values[name] = self.value(name, _item(options.get(key)))
                values |= self._in_trees(group.states, options if states or not optimizer.started else None)
            values |= self._in_trees(
                optimizer.unowned, state_dict["state"] if states or not optimizer.started else None
            )
        values |= self._scalars(content)
        if record.averages is None:
            averages = {}
        else:
            averages = {key: record.averages.get(name, "") for key, name in record.module.items()}
        values |= self.tensors("ema", _table(content, "ema"), averages)
        return values | dict(self.tensors("loss", _table(content, "loss"), record.loss))

    def _scalars(self, content: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The states of scheduler and scaler."""
        record = self._record
        for key in SCHEDULERS:
            if EPOCH in self._types and "last_epoch" in _table(content, key):
                yield EPOCH, self.value(EPOCH, content[key]["last_epoch"])
        for key, name in (record.scaler or {}).items():
            if key in _table(content, "scaler"):
                yield name, self.value(name, content["scaler"][key])

    def of_optimizer(
        self, optimizer: TorchOptimizer, states: Mapping[int, Mapping[str, Any]], step: Any = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The values of an optimizer's states, by the position of their parameter. ``step``: the number of steps, if
        known."""
        began = any(states.values())
        if optimizer.started:
            steps = step if isinstance(step, int) and step > 0 else 1
            yield optimizer.started, self.value(optimizer.started, steps if began else 0)
        if optimizer.started and not began:
            return
        parameters = [parameter for group in optimizer.groups for parameter in group.parameters]
        for number, parameter in enumerate(parameters):
            entry = states.get(number, {})
            for key, name in parameter.states.items():
                value = entry.get(key)
                if value is not None:
                    yield name, self.value(name, _item(value) if key in parameter.numbers else value)
                elif optimizer.started or (entry and key not in entry):
                    raise InputError(f"the optimizer has no {show(key)} of {show(parameter.name)}", _OTHER)
                else:  # no state is a state of zeros
                    yield name, _zeros(self._types[name])
            yield from self._in_trees(parameter.others, entry, zeros=not entry)
            known_keys = {*parameter.states, *(parameter.others or {})}
            rest = {key: value for key, value in entry.items() if key not in known_keys}
            yield from self.tensors(f"optimizer.state.{parameter.name}", rest)

    def _in_trees(
        self, trees: Mapping[str, Any] | None, content: Mapping[Any, Any] | None, *, zeros: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """The values of states in containers, with ``zeros`` for lost values; none without content."""
        if content is None:
            return
        for key, tree in (trees or {}).items():
            for name, value in states_in(tree, content.get(key)):
                if value is None and not zeros:
                    raise InputError(f"the optimizer has no {show(name)} in {show(key)}", _OTHER)
                yield name, _zeros(self._types[name]) if value is None else self.value(name, value)

    def compare(self, group: TorchGroup, options: Mapping[str, Any], step: Any = None) -> None:
        """Note the options of a group unlike the step's. ``step``: as for ``of_optimizer``; without a number, options
        changing with the step are left out."""
        due, *more = (group_options(group, turn) for turn in ([step] if isinstance(step, int) else _TURNS))
        for key, number in due.items():
            value = _item(options.get(key))
            if all(table[key] == number for table in more) and _differs(value, number):
                self._notes.append(
                    f"{key} is {show(value)} in the file, {show(number)} in the step, which counts "
                    f"({show(group.parameters[0].name)} and its group)"
                )

    def tensors(
        self, label: str, table: Mapping[Any, Any], names: Mapping[str, str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a table under ``names`` of the step, '' for no name; others under their key and a label."""
        for key, value in table.items():
            whole = f"{label}.{key}" if label else str(key)
            if isinstance(value, torch.Tensor):
                if name := (names or {}).get(key, whole):
                    yield name, plain_tensor(whole, value)
            elif isinstance(value, Mapping) and label:
                yield from self.tensors(whole, value)

    def value(self, name: str, value: Any) -> Tensor:
        """The value of a state, a tensor or a number."""
        if isinstance(value, Tensor):
            return value
        if isinstance(value, torch.Tensor):
            return plain_tensor(name, value)
        type = self._types[name]
        try:
            if not isinstance(value, int | float) or type.elements != 1:
                raise TypeError
            number = np.full(type.dims, value, numpy_dtype(type.dtype))
        except (OverflowError, ValueError, TypeError):
            raise InputError(
                f"{show(name)} is {show(value)}, the model says {type}", "correct it in the file"
            ) from None
        return Tensor(type, array=number)


def _item(value: Any) -> Any:
    """The number of a tensor of a single element; any other value as it is."""
    if isinstance(value, Tensor):
        return value.numpy().item() if value.type.elements == 1 else value
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _differs(left: Any, right: Any) -> bool:
    """Return whether options are different numbers, or tuples with different numbers."""
    if isinstance(left, tuple | list) and isinstance(right, tuple | list):
        return any(map(_differs, left, right))
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    return numbers and not math.isclose(left, right, rel_tol=1e-6)


def _zeros(type: TensorType) -> Tensor:
    return Tensor(type, reader=lambda: np.zeros(type.dims, numpy_dtype(type.dtype)))


def plain_type(name: str, dtype: torch.dtype, dims: tuple[int, ...]) -> TensorType:
    """The type of a tensor of PyTorch; raises InputError for an element type unknown to ONNX."""
    word = str(dtype).removeprefix("torch.").replace("_", "").replace("e8m0fnu", "e8m0")
    if not known(word):
        raise InputError(f"{show(name)} has the element type {dtype}, which ONNX does not have", "convert it")
    return TensorType(word, dims)


def plain_tensor(name: str, value: torch.Tensor) -> Tensor:
    """A tensor of PyTorch, read on demand; raises InputError for one of another form, or of a type unknown to ONNX."""
    plain = value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or not plain:
        form = f"{type(value).__name__} of {value.dtype}, {value.layout}"
        raise InputError(f"{show(name)} is no plain tensor, but {form}", "save it as a full tensor of the host")
    whole = plain_type(name, value.dtype, tuple(value.shape))
    return Tensor(whole, reader=lambda: array_over(value.resolve_conj().resolve_neg()))


def _table(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = content.get(key)
    return table if isinstance(table, Mapping) else {}


def _each_optimizer(entry: Any) -> Iterable[Mapping[str, Any]]:
    """The state dicts of optimizers: of a single one, of a list, or by names."""
    if isinstance(entry, Mapping):
        return [entry] if "param_groups" in entry else _each_optimizer(list(entry.values()))
    if not all(isinstance(part, Mapping) and "param_groups" in part for part in entry):
        raise InputError("has no optimizer.state_dict() where it names an optimizer", _OPTIMIZER)
    return list(entry)


def _by_position(
    optimizer: TorchOptimizer, state_dict: Mapping[str, Any]
) -> tuple[dict[int, Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """The states by the position of their parameter among all groups, and the groups; raises InputError for other
    groups than the step's."""
    groups: Any = state_dict["param_groups"]
    states: Any = state_dict.get("state")
    try:
        numbers = [list(group["params"]) for group in groups]
        result = {
            position: states[number]
            for position, number in enumerate(number for group in numbers for number in group)
            if number in states
        }
        whole = all(isinstance(entry, Mapping) for entry in (*groups, *result.values()))
    except (KeyError, TypeError):
        whole = False
    if not whole:
        raise InputError("has no optimizer.state_dict() where it names an optimizer", _OPTIMIZER)
    sizes, wanted = [len(group) for group in numbers], [len(group.parameters) for group in optimizer.groups]
    if sizes != wanted:
        raise InputError(
            f"the optimizer has groups of {sizes} parameters, the step's optimizer of {wanted}",
            _OTHER,
        )
    return result, groups
