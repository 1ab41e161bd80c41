"""Commands whose children hang, stop or die: old whole or new whole, and no process stays.

``python tests/system/hanging.py CASE ...`` prints a line of JSON per case, as ``sweep.py`` does. Each child of a
command in turn gets no further; when its parent waits for it, one of ``ENDS`` happens.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import Fault, Layer
from sweep import Run, Sweep, adopt_orphans, scratch_folder, tree
from swept import CASES, warm

from gopt.system import background

_CUT = "cut"
_EXIT = "exit"
ENDS: dict[str, tuple[int | str, bool, set[int]]] = {
    "interrupted": (signal.SIGINT, False, {130}),
    "terminated": (signal.SIGTERM, False, {143}),
    "hung up": (signal.SIGHUP, False, {129}),
    "killed": (signal.SIGKILL, False, {-9}),
    "child killed": (signal.SIGKILL, True, {5}),
    "child terminated": (signal.SIGTERM, True, {5}),
    "child ends": (_EXIT, True, {5}),
    "child's answer is cut": (_CUT, True, {5}),
}
"""What happens -> the signal or the way to end, whether it is the child's, and the exit codes of the command."""


class Hanging(Sweep):
    """A case, one of whose children hangs."""

    def hang(self, number: int, end: str) -> bool:
        """Let the child of this number hang, and end it; returns whether there is such a child."""
        how, of_child, allowed = ENDS[end]
        self._start()
        told, tell = os.pipe()
        said, notes = self.scratch / "said", self.scratch / "notes"
        said.write_bytes(b"")
        command = os.fork()
        if not command:
            os.close(told)
            _hang(number, how if of_child and isinstance(how, str) else "", tell)
            os._exit(self._live(self.case.command, Layer(self.work, Fault.NONE, None, notes), said))
        os.close(tell)
        with os.fdopen(told, "rb") as file:
            line = file.readline()  # empty where the command ended without this child
        if line and isinstance(how, int):
            os.kill(int(line) if of_child else command, how)
        _, status = os.waitpid(command, 0)
        done = Run(os.waitstatus_to_exitcode(status), said.read_text(), (), self._orphans())
        if not line:
            return False
        self._hold(f"child {number}, {end}", done, allowed, killed=done.code == -signal.SIGKILL)
        return True

    def every_end(self, number: int) -> bool:
        """As ``hang``, for all that can happen."""
        there = [self.hang(number, end) for end in ENDS]
        return all(there)

    def _hold(self, where: str, done: Run, allowed: set[int], *, killed: bool) -> None:
        self.found.points[where] += 1
        left = tree(self.work)
        wrong = [] if done.code in allowed else [f"exit code {done.code}"]
        if done.orphans:
            wrong.append(f"{done.orphans} processes stay")
        if "Traceback" in done.said or (not killed and done.said.count("gopt: error: ") != 1):
            wrong.append("no error in one line")
        if "TOKEN" in str(left) and not killed:
            wrong.append("leaves a draft")
        wrong += self._state(left) + self._next(left)
        self.found.faults += [f"{self.case.name}: {where}: {each} [{done.said[-300:]}]" for each in wrong]


def _hang(number: int, end: str, tell: int) -> None:
    """Let a child of this process hang, or end in a way, and say its number once this process waits for it."""
    fork, result, answer = background._Child.fork, background._Child.result, background._answer
    made: list[Any] = []

    def forked(works: Sequence[Callable[[], Any]]) -> Any:
        mine = len(made) == number

        def hung() -> tuple[bool, Any]:
            while not end:
                signal.pause()
            if end == _EXIT:
                os._exit(0)
            return True, Cut()

        background._answer = (lambda _: hung()) if mine else answer
        made.append(fork(works))
        background._answer = answer
        return made[-1]

    said: list[int] = []

    def waited(child: Any, place: int) -> Any:
        if len(made) > number and child is made[number] and not said:
            said.append(child._number)
            os.write(tell, b"%d\n" % child._number)
            os.close(tell)
        return result(child, place)

    background._Child.fork = forked  # type: ignore[method-assign, assignment]
    background._Child.result = waited  # type: ignore[method-assign]


class Cut:
    """What cannot be written to its end: behind some bytes there is no more room."""

    def __reduce__(self) -> Any:
        raise OSError(28, "No space left on device")


def main() -> None:
    warm()
    adopt_orphans()
    scratch = scratch_folder()
    try:
        for name in sys.argv[1:]:
            sweep = Hanging(CASES[name], scratch)
            number = 0
            while sweep.every_end(number):
                number += 1
            found = sweep.found
            record = {"case": name, "children": number, "faults": dict(found.points), "broken": found.faults}
            print(json.dumps(record), flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
