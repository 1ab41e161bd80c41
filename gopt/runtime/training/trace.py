"""A timeline of the ranks in Chrome's trace format: open the file in Perfetto, or in the browser at about:tracing."""

from __future__ import annotations

import json
import time
from pathlib import Path

from gopt.documents.records import to_document
from gopt.documents.trace_record import TraceEvent, TraceFile
from gopt.errors import RunError
from gopt.runtime.engines.base import Engine
from gopt.system.files import reason

_LANES = ("compute", "calls")


def check_writable(path: Path) -> None:
    """Raise RunError when a trace cannot be written, before the first step rather than after the last."""
    existed = path.exists()
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise RunError(f"cannot write {path}: {reason(error)}", "choose another path with --trace") from error


class Trace:
    """The events of one rank: segments on one line, calls on another. Times are of the machine's clock, in
    microseconds."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._events: list[tuple[int, str, float, float]] = []
        """Line, name, begin, end: made presentable at the end, for noting it down is part of a step."""
        # Processes of one machine share the clock behind perf_counter only by chance: the wall's is common.
        self._offset = time.time() - time.perf_counter()

    def segment(self, name: str, begin: float, end: float) -> None:
        self._events.append((0, name, begin, end))

    def call(self, name: str, begin: float, end: float) -> None:
        self._events.append((1, name, begin, end))

    def write(self, engine: Engine, path: Path) -> None:
        """Write the events of all ranks to one file; every rank calls this method, the first rank writes. Raises
        RunError."""
        mine = [
            (name, "X", self._rank, lane, round((begin + self._offset) * 1e6, 1), round((end - begin) * 1e6, 1))
            for lane, name, begin, end in self._events
        ]
        events = [TraceEvent(*event) for rank in engine.gather(mine) for event in rank]
        if engine.rank:
            return
        ranks = sorted({event.pid for event in events})
        named = [
            TraceEvent("thread_name", "M", rank, lane, args={"name": _LANES[lane]})
            for rank in ranks for lane in range(len(_LANES))
        ]  # fmt: skip
        named += [TraceEvent("process_name", "M", rank, args={"name": f"rank {rank}"}) for rank in ranks]
        try:
            path.write_text(json.dumps(to_document(TraceFile((*named, *events)))), encoding="utf-8")
        except OSError as error:
            raise RunError(f"cannot write {path}: {reason(error)}", "choose another path with --trace") from error
