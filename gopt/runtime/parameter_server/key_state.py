"""One key of an asynchronous server: states, counters, the version, and the versions pulled by trainers.

One thread writes a key. Updates write into two sets of arrays in turn, so a pull gives a copy: the copy does not change
while sent, and stays the trainer's value where delays are compensated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gopt.errors import InputError
from gopt.ir.graph import Graph
from gopt.ir.types import TensorType, numpy_dtype
from gopt.parameter_server.blocks import Block
from gopt.runtime.device import Host
from gopt.runtime.execution_plan import plan_execution
from gopt.runtime.executor import Executor
from gopt.runtime.session import Array, SessionCache
from gopt.runtime.training.hyper_parameters import HyperParameter

_DAMAGED = "its newest step is damaged: move that away, and --resume takes the one before it"
CHIEF = 0
"""The trainer whose pushes count, where the rule is ``chief``."""


@dataclass(slots=True)
class Counting:
    """When the counters of a key advance. ``advances``: how often they have. ``due``: pushes since the last advance."""

    rule: str
    advances: int = 0
    due: int = 0

    def accept(self, trainer: int, trainers: int) -> bool:
        """Record an accepted push, and return whether the counters advance now.

        ``trainers``: the number of participating trainers. When one leaves, the remaining trainers make a round."""
        self.due += 1
        enough = self.rule == "push" or self.due >= trainers
        goes_on = trainer == CHIEF if self.rule == "chief" else enough
        if goes_on:
            self.advances, self.due = self.advances + 1, 0
        return goes_on


class Part:
    """A part of a block, compiled."""

    def __init__(self, graph: Graph, results: Mapping[str, str], device: Host, cache: SessionCache) -> None:
        """``results``: name of a result -> the graph output with the value."""
        self.results, self._inputs = results, graph.inputs
        self._program = Executor(plan_execution(graph, {}, device), cache)

    def __call__(self, *sources: Mapping[str, Array]) -> dict[str, Array]:
        """New values of the states. Inputs are taken from ``sources``."""
        feeds = {name: value for values in sources for name, value in values.items() if name in self._inputs}
        outputs = self._program.run(feeds)
        return {name: outputs[new] for name, new in self.results.items()}


class BlockState(ABC):
    """The common base of keys and parts of tables. ``states``: the server's at the start. ``hyper``:
    hyper-parameters by the number of a round."""

    @property
    @abstractmethod
    def states(self) -> Mapping[str, Array]:
        """All states, flattened, as in the manifest."""

    def __init__(
        self, block: Block, states: Mapping[str, Array], rule: str, hyper: Sequence[HyperParameter], device: Host,
        cache: SessionCache,
    ) -> None:  # fmt: skip
        self.block, self.counting = block, Counting(rule)
        self.counters = {name: states[name] for name in block.counters}
        self.version = 0
        """Pushes that were applied."""
        self.pulled: dict[int, int] = {}
        """Trainer -> the version that it has."""
        self._first_version = 0
        """The version of a trainer that has pulled nothing in this run."""
        self._hyper = [parameter for parameter in hyper if parameter.name in block.hyper]
        self._counter = Part(block.counter, block.counters, device, cache) if block.counter is not None else None

    def _fed(self) -> dict[str, Array]:
        """Hyper-parameters of the next update."""
        return {parameter.name: parameter.at(self.counting.advances) for parameter in self._hyper}

    def _count(self, trainer: int, trainers: int, fed: Mapping[str, Array]) -> int:
        """Advance the version after an update; returns how many updates late the push was."""
        late = self.version - self.pulled.get(trainer, self._first_version)
        self.version += 1
        if self.counting.accept(trainer, trainers) and self._counter is not None:
            self.counters = self._counter(fed, self.counters)
        return late

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def root(self) -> str:
        """The first part of the value names in a checkpoint."""
        return f"gopt.async.key{self.block.key}"

    def extra(self, trainers: int) -> dict[str, Array]:
        """Values of a checkpoint beside the manifest's states, by name."""
        numbers = np.array([self.version, self.counting.advances, self.counting.due], np.int64)
        counters = {f"{self.root}.counter{n}": value for n, value in enumerate(self.counters.values())}
        return {f"{self.root}.numbers": numbers, **counters}

    def restore(self, read: Callable[[str], Array | None]) -> None:
        """Take over the values of ``extra``.

        ``read``: name -> value, or None. New trainers get the current values. Raises InputError where a value is
        missing."""
        numbers = read(f"{self.root}.numbers")
        if numbers is None:
            raise InputError(f"the checkpoint does not say how often {self.block.entry.name!r} was updated", _DAMAGED)
        self.version, self.counting.advances, self.counting.due = map(int, numbers)
        self._first_version = self.version
        for n, name in enumerate(self.counters):
            value = read(f"{self.root}.counter{n}")
            if value is None:
                raise InputError(f"the checkpoint has no {name!r} of {self.block.entry.name!r}", _DAMAGED)
            self.counters[name] = value


class KeyState(BlockState):
    """One key of a server."""

    def __init__(
        self, block: Block, states: Mapping[str, Array], rule: str, hyper: Sequence[HyperParameter], device: Host,
        cache: SessionCache,
    ) -> None:  # fmt: skip
        super().__init__(block, states, rule, hyper, device, cache)
        self._states: Mapping[str, Array] = {name: states[name] for name in block.states}
        self.backups: dict[int, Array] = {}
        """Trainer -> the parameter that it has, where delays are compensated."""
        self._first = self.value if block.backup else None
        """The value of a trainer that has pulled nothing in this run, where delays are compensated."""
        self._update = Part(block.update, block.states, device, cache)

    @property
    def states(self) -> Mapping[str, Array]:
        return self._states

    @property
    def type(self) -> TensorType:
        """The type of a pushed gradient."""
        return self.block.update.inputs[self.block.pushed]

    @property
    def value(self) -> Array:
        """The parameter."""
        return self.states[self.block.entry.inputs[0]]

    def push(self, trainer: int, pushed: Array, trainers: int) -> int:
        """Apply a trainer's push; returns by how many updates the push is late."""
        block = self.block
        gradient = pushed.reshape(self.type.dims).astype(numpy_dtype(self.type.dtype), copy=False)
        fed = self._fed() | {block.pushed: gradient}
        if block.backup:
            fed[block.backup] = self._backup(trainer)
        self._states = self._update(fed, self._states, self.counters)
        return self._count(trainer, trainers, fed)

    def _backup(self, trainer: int) -> Array:
        backup = self.backups.get(trainer, self._first)
        assert backup is not None
        return backup

    def pull(self, trainer: int) -> Array:
        """A copy of the parameter, with the current version, recorded for the trainer."""
        self.pulled[trainer] = self.version
        value = self.value.copy()
        if self.block.backup:
            self.backups[trainer] = value
        return value

    def extra(self, trainers: int) -> dict[str, Array]:
        values = super().extra(trainers)
        if self.block.backup:
            values.update((f"{self.root}.backup{n}", self._backup(n)) for n in range(trainers))
        return values

    def restore(self, read: Callable[[str], Array | None]) -> None:
        super().restore(read)
        n = 0
        while self.block.backup and (value := read(f"{self.root}.backup{n}")) is not None:
            self.backups[n], n = value, n + 1
