"""Batches for the tests of ``gopt run``; FAULT in the environment lets rank 1 fail at step 8.

``allocate`` and ``map`` let it run on, but refuse it memory to share, or the others' files. ``beside`` lets calls of
all ranks run beside the graph, ``late`` too, where rank 1 takes its time (``LATE`` seconds each time); with
``unordered`` nobody minds. Where rank 1 is to hang, the others wait ``PATIENCE`` seconds from step 8 on: until then the
deadline is one that no busy machine exceeds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

if os.environ.get("FAULT") in ("allocate", "map") and os.environ.get("PMI_RANK") == "1":

    def refuse(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    setattr(os, {"allocate": "posix_fallocate", "map": "readlink"}[os.environ["FAULT"]], refuse)

if os.environ.get("FAULT") in ("beside", "late", "unordered"):  # as on a host with processors to spare
    from gopt.runtime.engines.mpi import MpiEngine

    MpiEngine.overlaps = property(lambda engine: True)

if os.environ.get("FAULT") in ("late", "unordered") and os.environ.get("PMI_RANK") == "1":
    from gopt.runtime.device import BoundSegment

    soon = BoundSegment.run

    def late(piece: Any, values: Any) -> Any:
        time.sleep(float(os.environ.get("LATE", 0.02)))
        return soon(piece, values)

    BoundSegment.run = late

if os.environ.get("FAULT") == "unordered":
    from gopt.runtime.planner.hazards import HappensBefore

    HappensBefore.last = lambda *_: -1  # as if nobody read what others write


def truncating(step: int) -> float:
    """A learning rate; at the third step the file that TRUNCATE names loses its end."""
    if step == 2:
        os.truncate(os.environ["TRUNCATE"], 300)
    return 0.05


PATIENCE = 1.5
_watchdogs: list[Any] = []

if os.environ.get("FAULT") in ("stop", "sleep"):
    from gopt.runtime.engines.watchdog import Watchdog

    real = Watchdog.on
    Watchdog.on = lambda watchdog, what: (_watchdogs.append(watchdog), real(watchdog, what))[1]


def batches(part: int, parts: int) -> Iterator[dict[str, Any]]:
    generator = np.random.default_rng(part)
    fault = os.environ.get("FAULT", "") if part == parts - 1 else ""
    for step in range(1, 10_000):
        x = generator.standard_normal((4, 3)).astype(np.float32)
        if step == 8:
            for watchdog in _watchdogs[-1:]:
                watchdog._deadline = PATIENCE
            if os.environ.get("FAULT") == "all":
                raise ValueError("a bad\nsample")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "raise":
                raise ValueError("a bad sample")
            if fault == "sleep":
                time.sleep(1000)
            if fault == "exit":
                sys.exit(3)
            if fault == "end":
                return
            if fault == "nan":
                x[:] = np.nan
        yield {"x": x, "y": np.ones((4, 4), np.float32) * x.mean()}
