"""Collective calls bound to a rank's memory, and calls in flight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from gopt.errors import RunError
from gopt.runtime.device import Device
from gopt.runtime.host_value import address_of
from gopt.runtime.memory import packed_view
from gopt.runtime.partition import CallStep
from gopt.runtime.planner.buffers import Buffers
from gopt.runtime.shared_memory import CallBuffer


class CollectiveFuture(Protocol):
    """The outputs of a started call, as in ``concurrent.futures.Future``."""

    def result(self) -> list[Any]: ...


CollectiveCallback: TypeAlias = Callable[..., list[Any] | CollectiveFuture]
"""Makes a collective: number of the call in the file, its node, its inputs -> its outputs, or a future of them.

Programs for training may pass a fourth argument, a ``CallBuffer``: memory that the call may write. For a reduction it
holds the inputs, for a gather it is where the result is to lie.
"""


class BoundCall:
    """A call with the memory of its inputs and results, where the memory is the same in every step.

    ``may_lack``: values that are undefined on some ranks. ``donatable``: the call may overwrite its inputs. ``buffer``:
    memory for the call to write. ``gathered``: values over the buffer, in the order of the outputs."""

    overwrites: frozenset[str] = frozenset()

    def __init__(
        self, call: CallStep, device: Device, buffers: Buffers, may_lack: Collection[str], donatable: bool,
        buffer: CallBuffer | None, gathered: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.node, self.inputs, self.outputs = call.node, call.inputs, call.outputs
        self.number, self._device, self._donatable, self._buffer = call.index, device, donatable, buffer
        self._may_lack = tuple(name for name in call.inputs if name in may_lack)
        self._sent = buffers.send_views
        fixed = all(name in self._sent for name in call.inputs)
        self._operands = [self._sent[name] for name in call.inputs] if fixed else None
        self._gathered = gathered
        self._must_copy = any(name in buffers.gathered_views for name in gathered)
        self._first: Any = None
        """The first of the last results that lie in the buffer, and stay there; ``_persistent``: the values of all, and
        ``_place``: its address."""
        self._persistent: Mapping[str, Any] = {}
        self._place: int | None = None
        self._home = self._memory_range()

    def start(self, values: Mapping[str, Any], call: CollectiveCallback) -> list[Any] | CollectiveFuture:
        """Start the call; returns the outputs or their future. Raises RunError where an input is undefined."""
        for name in self._may_lack:
            if name not in values:
                raise RunError(f"{name!r} is undefined on this rank, and {self.node.op_type} reads it")
        operands = self._operands
        if operands is None:
            view = self._device.view
            operands = [self._sent[name] if name in self._sent else view(values[name]) for name in self.inputs]
        buffer = packed_view(operands) if self._buffer is None and self._donatable else self._buffer
        return (
            call(self.number, self.node, operands) if buffer is None else call(self.number, self.node, operands, buffer)
        )

    def store(self, results: Sequence[Any]) -> Mapping[str, Any]:
        """Return the values of the call's results by name; the dict is empty where the outputs are undefined on this
        rank.

        Results outside the planned buffer are copied into the buffer. Raises RunError on a wrong number of results."""
        names = self.node.outputs
        if not results:
            return {}
        if len(results) != len(names):
            raise RunError(f"{self.node.op_type} {self.node.label!r} gave {len(results)} values, not {len(names)}")
        if results[0] is self._first:
            return self._persistent
        if (address := self._place_of(results[0])) is not None:
            self._first = results[0]
            if address != self._place:  # else other arrays over the same memory: segments are bound to it already
                self._place, self._persistent = address, self._gathered or self._new_values(results)
                for value in self._persistent.values():
                    value.persistent = True
            return self._persistent
        if not self._must_copy:
            return self._new_values(results)
        for name, result in zip(names, results):
            if name:
                np.copyto(self._gathered[name].array, result)
        return self._gathered

    def _memory_range(self) -> tuple[int, int] | None:
        """The addresses [begin, end) at which the first result may begin; None for results without fixed memory."""
        if self._gathered:
            begin = address_of(next(iter(self._gathered.values())).array)
            return begin, begin + 1
        memory = self._buffer if isinstance(self._buffer, np.ndarray) else getattr(self._buffer, "memory", None)
        return None if memory is None else (address_of(memory), address_of(memory) + memory.nbytes)

    def _place_of(self, result: Any) -> int | None:
        """The address of the first result where results lie in fixed memory, else None. The other results follow the
        first."""
        if self._home is None:
            return None
        address = address_of(result)
        begin, end = self._home
        return address if begin <= address < end and (self._gathered or result.size) else None

    def _new_values(self, results: Sequence[Any]) -> dict[str, Any]:
        to_device = self._device.to_device
        return {name: to_device(result) for name, result in zip(self.node.outputs, results) if name}


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call that has started, with outputs not available yet."""

    call: BoundCall
    future: CollectiveFuture

    def resolve(self, values: dict[str, Any], pending: dict[str, PendingCall]) -> None:
        """Wait for the call, and add the outputs to ``values``."""
        values.update(self.call.store(self.future.result()))
        for name in [name for name, pending_call in pending.items() if pending_call is self]:
            del pending[name]
