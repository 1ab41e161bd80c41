"""One batch again and again for ``gopt run --data probe:batches``; on the way it notes what the rank does.

So what is measured is the command that a user runs. Environment: ``GOPT_BENCH_BATCH``, the batch (.npz), and
``GOPT_BENCH_NOTES``, the folder for the notes of each rank; ``GOPT_BENCH_WIRE``, to count what loopback sends.
Times are the machine's, as in a trace.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from counters import memory, wire

Span = tuple[float, float]


class Notes:
    """``steps``: when each began, ``wire``: bytes sent by the machine until then; ``sessions`` and ``agreed``: when
    sessions ran and words were exchanged; ``calls``: begin, operator, ranks, bytes handed in and out."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.wire: list[int] = []
        self.sessions: list[Span] = []
        self.agreed: list[Span] = []
        self.calls: list[tuple[float, str, int, int, int]] = []

    def step(self) -> None:
        if "GOPT_BENCH_WIRE" in os.environ:  # reading the counters takes some 50 µs
            self.wire.append(wire())
        self.steps.append(time.time())

    def watch(self) -> None:
        """Note from here on what the runtime and the engine do. A call is one more Python frame slower."""
        from onnxruntime import InferenceSession

        from gopt.runtime.engines.mpi import MpiEngine

        InferenceSession.run_with_iobinding = _timed(InferenceSession.run_with_iobinding, self.sessions)
        MpiEngine.gather = _timed(MpiEngine.gather, self.agreed)
        made = MpiEngine.call

        def call(engine: Any, index: int, node: Any, inputs: list[Any], *more: Any) -> list[Any]:
            begin, given = time.time(), sum(each.nbytes for each in inputs)
            results = made(engine, index, node, inputs, *more)
            ranks = engine._groups[node.attributes["group"]].size
            self.calls.append((begin, node.op_type, ranks, given, sum(each.nbytes for each in results)))
            return results

        MpiEngine.call = call

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self) | {"peak": memory()[1]}))


def _timed(function: Callable[..., Any], spans: list[Span]) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        begin = time.time()
        try:
            return function(*arguments, **named)
        finally:
            spans.append((begin, time.time()))

    return timed


def batches(part: int, parts: int) -> Iterator[dict[str, Any]]:
    batch = dict(np.load(os.environ["GOPT_BENCH_BATCH"]))
    notes = Notes()
    notes.watch()
    atexit.register(notes.write, Path(os.environ["GOPT_BENCH_NOTES"], f"{part}.json"))
    while True:
        notes.step()
        yield batch
