"""An order of messages that follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gopt.runtime.messages.message import Header
from gopt.runtime.messages.order import Serial


class Seeded(Serial):
    """Receives messages in a random order that follows from a seed. On threads, endpoints run one at a time, so that
    the whole run follows from the seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def ready(self, receiver: int, heads: Sequence[Header]) -> bool:
        return bool(heads)

    def choose(self, receiver: int, heads: Sequence[Header]) -> int:
        return self._random.choice(sorted(head.source for head in heads))

    def pick(self, numbers: Sequence[int]) -> int:
        return self._random.choice(sorted(numbers))
