"""The names that PyTorch has for the states of a step, in its metadata: the one reader and the one writer of that text.

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
    """A parameter of an optimizer. ``name``: its value in the step; ``states``: key of its state -> the step's state;
    ``numbers``: those that are numbers of Python; ``others``: what is no tensor and no number."""

    name: str
    states: Mapping[str, str] = field(default_factory=dict)
    numbers: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    others: Mapping[str, Any] | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchGroup:
    """A group of parameters. ``rate``: its learning rate in each step; ``counters``: option -> the step's state."""

    parameters: tuple[TorchParameter, ...]
    options: Mapping[str, Any]
    rate: DefaultValue | None = field(default=None, metadata=OPTIONAL)
    counters: Mapping[str, str] | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptimizer:
    """An optimizer. ``started``: the step's state that is 0 as long as the optimizer has no states."""

    name: str
    groups: tuple[TorchGroup, ...]
    started: str = field(default="", metadata=OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchScheduler:
    """A scheduler whose state is its count of steps. ``first``: that count before the first step; ``others``: what else
    it asks for."""

    name: str
    first: int
    others: Mapping[str, Any] | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRecord:
    """The training code that a step was exported from.

    ``module``, ``loss``: name in their state dict -> value of the step; ``averages``: value of the step -> its moving
    average; ``scaler``: key of the gradient scaler -> the step's state; ``lost``: names of the module's state dict
    that are no tensors of it; ``outputs``: values of the step that the module returns; ``inputs``: argument of its
    ``forward`` -> value of the step that it was called with.
    """

    module: Mapping[str, str]
    loss: Mapping[str, str] | None = field(default=None, metadata=OPTIONAL)
    averages: Mapping[str, str] | None = field(default=None, metadata=OPTIONAL)
    optimizers: tuple[TorchOptimizer, ...]
    scheduler: TorchScheduler | None = field(default=None, metadata=OPTIONAL)
    scaler: Mapping[str, str] | None = field(default=None, metadata=OPTIONAL)
    lost: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    outputs: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    inputs: Mapping[str, str] | None = field(default=None, metadata=OPTIONAL)

    @classmethod
    def of(cls, metadata: Mapping[str, str], name: str) -> TorchRecord | None:
        """The record in a model's metadata, if there is one; ``name`` is the file in errors. Raises InputError."""
        text = metadata.get(KEY)
        return None if text is None else from_document(cls, parse_json(text, TORCH, f"{name}: {KEY}"))

    @property
    def held(self) -> frozenset[str]:
        """Values of the step that state dicts have."""
        return frozenset((*self.module.values(), *(self.loss or {}).values()))

    def text(self) -> str:
        return json.dumps(to_document(self), ensure_ascii=False)


NO_RECORD = TorchRecord(module={}, optimizers=())
