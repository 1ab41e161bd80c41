"""What a process took and what the machine sent, as Linux counts it."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

WARMUP = 5
"""Steps before those that count, of every contestant alike."""
_BETWEEN = 1 << 24
"""Elements."""


def sent_on(table: str, interface: str = "lo") -> int:
    """Bytes sent so far by an interface, from the text of ``/proc/net/dev``; raises KeyError."""
    for line in table.splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            return int(numbers.split()[8])
    raise KeyError(interface)


def wire() -> int:
    """Bytes that the loopback interface has sent so far; whoever else uses it counts as well."""
    return sent_on(Path("/proc/net/dev").read_text())


def quiet_rate(seconds: float = 1.0) -> float:
    """Bytes a second on the loopback interface while nothing is measured."""
    before = wire()
    time.sleep(seconds)
    return (wire() - before) / seconds


def memory(status: str | None = None) -> tuple[int, int]:
    """Bytes resident now, and at most so far; of this process, or from the text of a ``/proc/PID/status``.

    The peak is that of this program: ``ru_maxrss`` would begin at its parent's.
    """
    lines = (status or Path("/proc/self/status").read_text()).splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    now, peak = (int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak


def memory_pass(elements: int, seconds: float) -> list[float]:
    """Seconds of passes over what AdamW touches: four float32 arrays read, three of them written, one add each.

    In tiles, so that the gradient is read from memory once. Between passes other memory is written, as a step does.
    Passes are made for ``seconds``, at least five.
    """
    import numpy as np

    tile = 1 << 15
    parameter, gradient, first, second = (np.full(elements, number, np.float32) for number in range(4))
    other = np.zeros(_BETWEEN, np.float32)
    found: list[float] = []
    start = time.perf_counter()
    while len(found) < 5 or time.perf_counter() - start < seconds:
        np.add(other, 1, out=other)
        begin = time.perf_counter()
        for place in range(0, elements, tile):
            given = gradient[place : place + tile]
            for row in (first, second, parameter):
                part = row[place : place + tile]
                np.add(part, given, out=part)
        found.append(time.perf_counter() - begin)
    return found


def imports() -> int:
    """Bytes resident once everything is imported that a rank of gopt imports."""
    for name in (
        "gopt.cli.main",
        "gopt.runtime.training.train",
        "gopt.runtime.engines.mpi",
        "onnxruntime",
        "mpi4py.MPI",
    ):
        importlib.import_module(name)
    return memory()[0]


if __name__ == "__main__":
    import json

    if sys.argv[1] == "imports":
        print(json.dumps({"imports": imports()}))
    else:
        print(json.dumps({"seconds": memory_pass(int(sys.argv[1]), float(sys.argv[2]))}))
