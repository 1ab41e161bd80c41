"""Values of a folder, checkpoint or step as a file of ``torch.save``, loadable with ``weights_only=True``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gopt.documents.torch_record import TorchGroup, TorchOptimizer, TorchRecord
from gopt.errors import InputError, OptionError
from gopt.frontends.pytorch.module_record import scheduler_state
from gopt.frontends.pytorch.tracing import BACKOFF, EPOCH, GROWTH, INTERVAL
from gopt.frontends.pytorch.value_trees import find
from gopt.ir.tensor import Tensor
from gopt.offline.state_values import StateDict, StepValues, new_file, put_new
from gopt.runtime.pytorch.tensors import tensor_over
from gopt.runtime.training.schedules import default_schedule
from gopt.text.sanitize import show


def save_torch(
    path: str | os.PathLike[str], output: str | os.PathLike[str], *, all_states: bool = False, force: bool = False
) -> StateDict:
    """Write the module's state dict, or with ``all_states`` a dict of several: ``model``, ``optimizer`` (a list where
    there are several), ``step``, and, where the step has one, ``scheduler``, ``scaler``, ``ema`` and ``loss``.

    Raises OptionError and RunError as ``save_state_dict``, OptionError for ``all_states`` of a step not exported from
    PyTorch, InputError for a state without a value.
    """
    target, step_values = new_file(output, force), StepValues.at(path)
    content: dict[str, Any] = module_values(step_values)
    if all_states:
        content = {"model": content, **training_values(step_values)}
    put_new(target, Path(output), force, lambda file: torch.save(content, file))
    return summary(Path(output), content, step_values)


def summary(output: Path, content: Mapping[str, Any], step_values: StepValues) -> StateDict:
    """The result of writing state dicts."""
    record, values = step_values.record, step_values.graph.initializers
    tensors = _tensors(content)
    missing = [key for key, name in step_values.of_module().items() if name not in values]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return StateDict(str(output), len(tensors), nbytes, (*missing, *(record.lost if record else ())))


def module_values(step_values: StepValues) -> dict[str, torch.Tensor]:
    """The argument of ``module.load_state_dict``, without tensors that have no value."""
    values = _Values(step_values.graph.initializers)
    return {key: values[name] for key, name in step_values.of_module().items() if name in values}


def training_values(step_values: StepValues) -> dict[str, Any]:
    """State dicts beside the module's: ``optimizer``, ``step``, and, where the step has one, ``scheduler``, ``scaler``,
    ``ema`` and ``loss``. Raises OptionError for a step not exported from PyTorch, InputError for a state without a
    value."""
    record = step_values.record
    if record is None:
        raise OptionError(
            "the step does not say which optimizer its states are of", "export it with gopt export, or leave out "
            "--all-states",
        )  # fmt: skip
    return _others(record, _Values(step_values.graph.initializers), _steps(step_values, record))


class _Values(Mapping[str, torch.Tensor]):
    """Values of a step as tensors of PyTorch."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._held = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._held:
            raise InputError(f"{show(name)} has no value", "merge a checkpoint, or a folder with values")
        return tensor_over(np.array(self._held[name].numpy()))  # its own memory

    def __iter__(self) -> Any:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def _steps(step_values: StepValues, record: TorchRecord) -> int:
    """The number of steps behind the values."""
    counted = step_values.graph.initializers.get(EPOCH)
    if record.scheduler is not None and counted is not None:
        return int(counted.numpy()) - record.scheduler.first
    scheduled = any(group.rate is not None for optimizer in record.optimizers for group in optimizer.groups)
    if step_values.step is None and scheduled:
        raise OptionError(
            "a file does not say how many steps its values have behind them, and the learning rate depends on that",
            "give the checkpoint in place of the model that was merged from it",
        )
    return step_values.step or 0


def _others(record: TorchRecord, values: Mapping[str, torch.Tensor], step: int) -> dict[str, Any]:
    optimizers = [_optimizer(optimizer, values, step) for optimizer in record.optimizers]
    state_dict: dict[str, Any] = {"optimizer": optimizers if len(optimizers) > 1 else optimizers[0], "step": step}
    if record.scheduler is not None:
        rates = [group["lr"] for optimizer in optimizers for group in optimizer["param_groups"]]
        state_dict["scheduler"] = scheduler_state(record.scheduler, step, rates)
    if record.scaler is not None:
        scaler = {key: values[name].item() for key, name in record.scaler.items()}
        options_of_scaler = {"growth_factor": GROWTH, "backoff_factor": BACKOFF, "growth_interval": INTERVAL}
        state_dict["scaler"] = {**scaler, **options_of_scaler}
    if record.averages is not None:
        averaged = {key: record.averages.get(name, name) for key, name in record.module.items()}
        state_dict["ema"] = {key: values[name] for key, name in averaged.items()}
    if record.loss is not None:
        state_dict["loss"] = {key: values[name] for key, name in record.loss.items()}
    return state_dict


def _optimizer(record: TorchOptimizer, values: Mapping[str, torch.Tensor], step: int) -> dict[str, Any]:
    """The argument of ``optimizer.load_state_dict``: states by the number of their parameter, and all groups."""
    fresh = bool(record.started) and not values[record.started].item()
    states: dict[int, dict[str, Any]] = {}
    groups = []
    start = 0
    for group in record.groups:
        for number, parameter in enumerate(group.parameters, start):
            if (parameter.states or parameter.others) and not fresh:
                table = {key: values[name] for key, name in parameter.states.items()}
                table |= {key: _number(table[key]) for key in parameter.numbers}
                states[number] = table | _filled(parameter.others, values)
        numbers = list(range(start, start + len(group.parameters)))
        counters = {key: _number(values[name]) for key, name in (group.counters or {}).items()}
        carried = counters | _filled(None if fresh else group.states, values)
        groups.append({**group_options(group, step), **carried, "params": numbers})
        start += len(numbers)
    return {"state": states | ({} if fresh else _filled(record.unowned, values)), "param_groups": groups}


def _filled(trees: Mapping[str, Any] | None, values: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {key: _value(tree, values) for key, tree in (trees or {}).items()}


def group_options(group: TorchGroup, step: int) -> dict[str, Any]:
    """The options of a group behind a step."""
    options = {key: _value(option_value) for key, option_value in group.options.items()}
    for name, default in {**(group.moved or {}), **({"lr": group.rate} if group.rate is not None else {})}.items():
        schedule, (option, _, member) = default_schedule(name, default), name.rpartition("_")
        value = schedule.at(step if schedule.steps is None else min(step, schedule.steps - 1))
        if name in options:
            options[name] = value
        else:  # a member of a tuple
            members = options[option]
            options[option] = (*members[: int(member)], value, *members[int(member) + 1 :])
    return options


def _value(plain_value: Any, values: Mapping[str, torch.Tensor] | None = None) -> Any:
    """An option for PyTorch, from the form in JSON; ``values``: of states."""
    if isinstance(plain_value, Mapping) and "dict" in plain_value:
        return {_value(key): _value(inner, values) for key, inner in plain_value["dict"]}
    if isinstance(plain_value, Mapping) and "tuple" in plain_value:
        return tuple(_value(part, values) for part in plain_value["tuple"])
    if isinstance(plain_value, Mapping):
        assert values is not None
        return _number(values[plain_value["number"]]) if "number" in plain_value else values[plain_value["state"]]
    return [_value(part, values) for part in plain_value] if isinstance(plain_value, list) else plain_value


def _number(value: torch.Tensor) -> int | float:
    number = float(value)
    return int(number) if number.is_integer() else number


def states_in(tree: Any, content: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names of states in a plain form, with the saved values, or None."""
    if isinstance(tree, list):
        tree = {"tuple": tree}
    if not isinstance(tree, Mapping):
        return
    for kind in tree.keys() & {"state", "number"}:
        yield tree[kind], content
    for key, inner in tree.get("dict", ()):
        yield from states_in(inner, find(content, (_value(key),)))
    for position, inner in enumerate(tree.get("tuple", ())):
        yield from states_in(inner, find(content, (position,)))


def _tensors(content: Any) -> Sequence[torch.Tensor]:
    if isinstance(content, torch.Tensor):
        return [content]
    parts = content.values() if isinstance(content, dict) else content if isinstance(content, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]
