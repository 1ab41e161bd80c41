"""A server without rounds, with a watch on its messages, updates and answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from gopt.runtime.memory import unpack_views
from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.parameter_server.async_server import AsyncServer
from gopt.runtime.parameter_server.key_state import BlockState
from gopt.runtime.parameter_server.table_state import TableState
from gopt.verification.compare import Values

BlockKey = tuple[int, Kind, int]
"""Server, kind of its pushes, and number of the key or table."""


class Watch(Protocol):
    """The observer of a server."""

    def pulled(self, message: Message, key: BlockKey, state: BlockState, value: np.ndarray, ids: Any = None) -> None:
        """A server answers a pull with a ``value``, of a table with the rows ``ids``."""

    def gave(self, message: Message, key: BlockKey, gradient: np.ndarray) -> None:
        """A trainer pushed the gradient of a key, flat."""

    def applied(
        self, message: Message, key: BlockKey, state: BlockState, before: Values, touched: np.ndarray | None
    ) -> None:  # fmt: skip
        """A server applied a push. ``before``: states and counters of the key before the push; ``touched``: the rows
        changed by the update, None for all."""

    def ended(self, message: Message, server: int) -> None:
        """A trainer told a server the end of a round's pushes."""


class WatchedServer(AsyncServer):
    """A server that tells a watch its actions."""

    def __init__(self, watch: Watch, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._watch = watch

    def _push(self, message: Message) -> None:
        parts = self._parts(message)
        before: list[Values] = []
        for state, _, _ in parts:
            states: Mapping[str, Any] = {name: np.array(value) for name, value in state.states.items()}
            before.append({**states, **state.counters})
        accepted = self.usage.accepted
        for state, gradient, _ in parts:
            self._watch.gave(message, self._key(message, state), gradient)
        super()._push(message)
        if self.usage.accepted > accepted:
            for (state, _, touched), old in zip(parts, before, strict=True):
                self._watch.applied(message, self._key(message, state), state, old, touched)

    def _parts(self, message: Message) -> list[tuple[BlockState, np.ndarray, np.ndarray | None]]:
        """The keys of a push, with gradients, flat, and the rows changed by the updates, None for all."""
        if message.kind is Kind.PUSH:
            keys = self._bucket(message)
            flat = np.array(message.arrays[0]).reshape(-1)
            return [
                (key, part.reshape(-1), None)
                for key, part in zip(keys, unpack_views(flat, [key.type.dims for key in keys]), strict=True)
            ]
        table = self._table(message)
        ids, rows = (np.array(array) for array in message.arrays)
        whole = np.zeros((table.rows.rows, table.rows.columns), rows.dtype)
        whole[ids] = rows.reshape(ids.size, table.rows.columns)
        lazy = self.server_job.plan.tables[message.key].update == "lazy"
        touched = np.isin(np.arange(table.rows.rows), ids) if lazy else None
        return [(table, whole.reshape(-1), touched)]

    def _key(self, message: Message, state: BlockState) -> BlockKey:
        rows = isinstance(state, TableState)
        return self.number, Kind.PUSH_ROWS if rows else Kind.PUSH, state.block.key

    def _values(self, message: Message) -> Message:
        answer = super()._values(message)
        for state, value in zip(self._bucket(message), answer.arrays, strict=True):
            self._watch.pulled(message, self._key(message, state), state, np.array(value))
        return answer

    def _rows(self, message: Message) -> Message:
        answer, table = super()._rows(message), self._table(message)
        self._watch.pulled(message, self._key(message, table), table, np.array(answer.arrays[0]), message.arrays[0])
        return answer

    def _end_round(self, message: Message) -> None:
        super()._end_round(message)
        self._watch.ended(message, self.number)
