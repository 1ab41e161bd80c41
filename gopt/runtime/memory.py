"""Memory that is used again. A fresh page costs more than the work that is done on it: a step should ask for none."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from gopt.runtime.session import Array


class Pool:
    """Arrays whose memory is used again once nobody has a view of it any more. Threads may share one."""

    def __init__(self) -> None:
        self._held: dict[int, list[Array]] = {}
        self._lock = threading.Lock()
        self._alone = _references([np.empty(1, np.uint8)], 0)

    def take(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """An array with values of no meaning."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            held = self._held.setdefault(size, [])
            place = next((n for n in range(len(held)) if _references(held, n) == self._alone), len(held))
            if place == len(held):
                held.append(np.empty(size, np.uint8))
            return held[place].view(dtype).reshape(shape)


def _references(held: list[Array], place: int) -> int:
    """Of an array in a list, counted alike each time: views of it count, whoever has them."""
    return sys.getrefcount(held[place])
