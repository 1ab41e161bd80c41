"""The names PyTorch has for the states of a step, in the metadata: the one reader and the one writer of that text.

With it the values of a checkpoint become what ``module.load_state_dict`` and ``optimizer.load_state_dict`` take.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gopt.documents import TORCH, parse_json
from gopt.documents.default_values import DefaultValue
from gopt.documents.records import OPTIONAL, from_document, to_document

KEY = "pytorch.training"
"""The entry. Entries that begin with ``gopt.`` are of one file; this one stays with a step through all of its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchParameter:
    """A parameter of an optimizer."""

    name: str
    """The state or constant of the step has the parameter."""
    states: Mapping[str, str] = field(default_factory=dict)
    """The table has the keys of the parameter's state. The value is the step's state for the key."""
    numbers: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    """The list has the keys whose values are numbers of Python; the key is absent when all are tensors. Each item is a
    key of the parameter's state."""
    others: Mapping[str, Any] | None = field(default=None, metadata=OPTIONAL)
    """The table has keys of the parameter's state with values that are no tensors and no numbers; the key is absent
    without such keys. A table with the key dict is a dict as pairs. A table with the key state or number has the name
    of the step's state there, a tensor or a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchGroup:
    """A group of parameters."""

    parameters: tuple[TorchParameter, ...]
    """The list has the parameters in the order of the group."""
    options: Mapping[str, Any]
    """The table has the options of the group; a tuple is a table with the one key tuple."""
    rate: DefaultValue | None = field(default=None, metadata=OPTIONAL)
    """The learning rate of the group follows this value; the key is absent where the group has none."""
    counters: Mapping[str, str] | None = field(default=None, metadata=OPTIONAL)
    """The table has options that each step changes; the key is absent without such options. The value is the step's
    state that has the option that the key names."""
    states: Mapping[str, Any] | None = field(default=None, metadata=OPTIONAL)
    """The table has options with tensors that each step changes, in the form of a parameter's others; the key is absent
    without such options."""
    moved: Mapping[str, DefaultValue] | None = field(default=None, metadata=OPTIONAL)
    """The table has options beside the rate that a scheduler moves, with the values that they follow, such as momentum;
    betas_0 is the first member of betas. The key is absent without such options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptimizer:
    """An optimizer."""

    name: str
    """The optimizer is of this class."""
    groups: tuple[TorchGroup, ...]
    """The list has the groups of parameters in the order of the optimizer."""
    started: str = field(default="", metadata=OPTIONAL)
    """The state of this name is 0 as long as the optimizer has no states; the key is absent where states of zero are
    the same as none."""
    unowned: Mapping[str, Any] | None = field(default=None, metadata=OPTIONAL)
    """The table has the optimizer's states without a parameter, in the form of a parameter's others; the key is absent
    without such states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchScheduler:
    """A scheduler with its count of steps as state."""

    name: str
    """The scheduler is of this class."""
    first: int
    """The scheduler's count of steps has this value before the first step."""
    others: Mapping[str, Any] | None = field(default=None, metadata=OPTIONAL)
    """The table has what else the scheduler asks for; the key is absent when that is nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRecord:
    """The names PyTorch has for the states of a step stand as JSON text in the metadata of a step gopt export wrote,
    under the key pytorch.training."""

    module: Mapping[str, str]
    """The table has the names of the module's state dict, tied ones and frozen ones among them. The value is the state
    or constant of the step that has the tensor that the key names."""
    loss: Mapping[str, str] | None = field(default=None, metadata=OPTIONAL)
    """The table has the names of the state dict of a loss that is a module; the key is absent where it has none. The
    value is the state or constant of the step that has the tensor that the key names."""
    averages: Mapping[str, str] | None = field(default=None, metadata=OPTIONAL)
    """The table has the parameters with moving averages in the step; the key is absent without moving averages. The
    value is the state that has the average of the parameter that the key names."""
    optimizers: tuple[TorchOptimizer, ...]
    """The list has the optimizers in the order in which the factory returned them."""
    scheduler: TorchScheduler | None = field(default=None, metadata=OPTIONAL)
    """The learning rate follows this scheduler; the key is absent without a scheduler, or where its count of steps is
    not all of its state."""
    scaler: Mapping[str, str] | None = field(default=None, metadata=OPTIONAL)
    """The table has keys of the gradient scaler's state dict; the key is absent where the loss is not scaled
    dynamically. The value is the step's state for the key."""
    lost: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    """The list has names of the module's state dict whose values are no tensors of the module; the key is absent
    without such names. Each item is a name of the module's state dict."""
    outputs: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    """The list has the values of the step that the module returns; the key is absent when none is known. Each item is
    the name of a value."""
    inputs: Mapping[str, str] | None = field(default=None, metadata=OPTIONAL)
    """The table has the tensors that the module's forward was called with, by their names there; the key is absent
    without such tensors. The value is the input or other value of the step for the argument that the key names."""

    @classmethod
    def of(cls, metadata: Mapping[str, str], name: str) -> TorchRecord | None:
        """The record in a model's metadata, if any; ``name``: the file in errors. Raises InputError."""
        text = metadata.get(KEY)
        return None if text is None else from_document(cls, parse_json(text, TORCH, f"{name}: {KEY}"))

    @property
    def held(self) -> frozenset[str]:
        """Values of the step for state dicts."""
        return frozenset((*self.module.values(), *(self.loss or {}).values()))

    def text(self) -> str:
        return json.dumps(to_document(self), ensure_ascii=False)


NO_RECORD = TorchRecord(module={}, optimizers=())
