"""Kill, interrupt or fail a command at every one of its writes, and judge each by one rule.

The rule: under its name stands the old output whole or the new one whole; nothing else has changed; and the next run
of the command works, and leaves nothing but its output. ``python tests/disk/sweep.py --help`` sweeps from a shell.

Commands run in forks of one process that has everything imported, so that a point costs milliseconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import PAST, Fault, Layer, Point

Tree = dict[str, str]
"""Path -> digest of its content."""
_TOKEN = re.compile(r"\.gopt-[0-9a-f]{16}\.")
KILLS = (Fault.KILL, Fault.TORN)


@dataclass(frozen=True)
class Case:
    """A command, and what it finds."""

    name: str
    prepare: Callable[[Path], None]
    """Put into an empty folder what the command finds."""
    command: Sequence[str]
    outputs: str
    """A pattern of the paths that the command writes: all others stay as they are."""
    again: Sequence[str] = ()
    """The next run, where it differs from the command."""
    added: bool = False
    """The output is a folder of checkpoints: steps in it are whole one by one."""
    exchange: bool = True


@dataclass
class Found:
    """What a sweep saw."""

    points: Counter[str] = field(default_factory=Counter)
    """Fault -> how often it was made."""
    calls: int = 0
    """Writes of the command."""
    faults: list[str] = field(default_factory=list)
    """What broke the rule."""
    states: int = 0
    """Different folders that were left, each of which was run on."""


@dataclass(frozen=True)
class Run:
    """How a command ended."""

    code: int
    said: str
    points: tuple[tuple[Point, str, str], ...]


def tree(root: Path) -> Tree:
    """All files and folders, by content; drafts by a name without what is random in it."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = _TOKEN.sub(".gopt-TOKEN.", str(path.relative_to(root)))
        while name in found:
            name += "'"
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
    return found


class Sweep:
    """Every point of one case."""

    def __init__(self, case: Case, scratch: Path) -> None:
        self.case, self.scratch = case, scratch
        self.before, self.work = scratch / "before", scratch / "work"
        shutil.rmtree(self.before, ignore_errors=True)
        self.before.mkdir(parents=True)
        case.prepare(self.before)
        self.found = Found()
        self._start()
        first = self.run(case.command)
        if first.code:
            raise RuntimeError(f"{case.name}: it does not work at all: {first.said}")
        self.old, self.new = tree(self.before), tree(self.work)
        self._rest(self.new, "the undisturbed run")
        self.points = first.points
        self.found.calls = len(first.points)
        self._judged: dict[str, list[str]] = {}

    def _start(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.before, self.work, symlinks=True)

    def run(self, command: Sequence[str], fault: Fault = Fault.NONE, at: Point | None = None) -> Run:
        """The command in a fork of this process."""
        said, notes = self.scratch / "said", self.scratch / "notes"
        said.write_bytes(b"")
        notes.write_bytes(b"")
        child = os.fork()
        if not child:
            os._exit(self._live(command, Layer(self.work, fault, at, notes, self.case.exchange), said))
        _, status = os.waitpid(child, 0)
        seen = [json.loads(line) for line in notes.read_text().splitlines()]
        points = tuple((Point(thread, number), name, path) for thread, number, name, path in seen)
        return Run(os.waitstatus_to_exitcode(status), said.read_text(), points)

    def _live(self, command: Sequence[str], layer: Layer, said: Path) -> int:
        try:
            out = os.open(said, os.O_WRONLY | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.chdir(self.work)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            from gopt.cli.main import main

            layer.install()
            code = layer.ended(main(list(command)))
            sys.stdout.flush()
            sys.stderr.flush()
            return code
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            return 98

    def all(self, faults: Iterable[Fault], every: int = 1, offset: int = 0) -> Found:
        """Make every fault at every point, or at every n-th."""
        for fault in faults:
            for place, (point, name, path) in enumerate(self.points):
                if place % every == offset % every and (fault is not Fault.TORN or name == "write"):
                    self.one(
                        fault, point, f"{self.case.name}: {fault.value} at {point.thread} {point.number}, {name} {path}"
                    )
        self.found.states = len(self._judged)
        return self.found

    def unsynced(self) -> list[str]:
        """What takes a name before the disk has it: a machine that stops would leave it empty."""
        loose: dict[str, int] = {}
        late = []
        for place, (_, name, path) in enumerate(self.points):
            if name in ("open", "write", "mkdir"):
                loose[os.path.abspath(self.work / path)] = place
            elif name == "fsync":
                loose.pop(os.path.abspath(self.work / path), None)
            elif name in ("renameat2", "rename", "replace"):
                draft = os.path.abspath(self.work / path)
                late += [each for each in loose if each == draft or each.startswith(draft + "/")]
        return late

    def one(self, fault: Fault, point: Point, where: str) -> None:
        """Make one fault and judge what comes of it."""
        self._start()
        done = self.run(self.case.command, fault, point)
        self.found.points[fault.value] += 1
        wrong = self._ended(fault, done)
        left = tree(self.work)
        key = json.dumps(left)
        if key not in self._judged:
            self._judged[key] = self._state(left) + self._next(left)
        wrong += self._judged[key]
        wrong += self._litter(left, fault, next((name for each, name, _ in done.points if each == point), ""))
        self.found.faults += [f"{where}: {each} [exit {done.code}: {done.said.strip()[-300:]}]" for each in wrong]

    def _litter(self, left: Tree, fault: Fault, name: str) -> list[str]:
        """What a run that could clean up after itself has left."""
        litter = [each for each in left if "TOKEN" in each]
        if not litter or fault in KILLS or (fault is Fault.BROKEN and name in ("unlink", "rmdir", "remove")):
            return []
        if fault is Fault.FULL and (name == "fsync" or (not self.case.exchange and self._aside(left))):
            return []  # names cannot be changed back on a disk that takes nothing
        return [f"leaves {litter}"]

    def _aside(self, left: Tree) -> bool:
        """Whether the old output lies whole beside its place: the next run puts it back, and is judged for it."""
        return ".old" in str(left) and not any(re.match(self.case.outputs, name) for name in left)

    def _ended(self, fault: Fault, done: Run) -> list[str]:
        """Whether the exit code is one of those that the fault allows."""
        allowed = {
            Fault.KILL: {-9}, Fault.TORN: {-9}, Fault.FULL: {5, 0}, Fault.BROKEN: {5, 0}, Fault.INTERRUPT: {130, 0},
            Fault.TERMINATE: {143, 0, -15},
        }[fault]  # fmt: skip
        wrong = [] if done.code in allowed else [f"exit code {done.code}"]
        if done.code == PAST or "Traceback" in done.said:
            wrong.append("a traceback, or writes past the layer")
        return wrong

    def _state(self, left: Tree) -> list[str]:
        """The old output or the new one, and all else as it was."""
        wrong = []
        mine = re.compile(self.case.outputs)
        for name in sorted({*self.old, *left}):
            if not mine.match(name) and "TOKEN" not in name and self.old.get(name) != left.get(name):
                wrong.append(f"{name} has changed")
        if self.case.added:
            return wrong + self._steps(left)
        old, new, now = ({k: v for k, v in each.items() if mine.match(k)} for each in (self.old, self.new, left))
        if self._main(now) in (self._main(old), self._main(new)):
            return wrong
        if not self.case.exchange and self._aside(left):
            return wrong
        return [*wrong, f"neither old nor new: {sorted(now)}"]

    def _main(self, now: Tree) -> Tree:
        """Without values that no model refers to: they are put in place before it, and go after it."""
        models = {name for name in now if name.endswith(".onnx") and "/" not in name}
        if not models:
            return {name: each for name, each in now.items() if not name.endswith(".data")}
        refers = {name for name in now if name.endswith(".data") and self._refers(name)}
        return {name: each for name, each in now.items() if not name.endswith(".data") or name in refers}

    def _refers(self, data: str) -> bool:
        for folder in (self.work, self.before):
            model = folder / data.split(".onnx.")[0]
            model = model.with_name(model.name + ".onnx")
            if model.is_file() and data.encode() in model.read_bytes():
                return True
        return False

    def _steps(self, left: Tree) -> list[str]:
        """Steps that have an index are whole, and at least as new as those before."""

        def whole(of: Tree) -> dict[str, Tree]:
            homes = [name for name in of if re.fullmatch(r".*/step_\d+/index.json", name)]
            return {
                home.split("/")[-2]: {k: v for k, v in of.items() if k.startswith(os.path.dirname(home) + "/")}
                for home in homes
            }

        old, new, now = whole(self.old), whole(self.new), whole(left)
        wrong = []
        if max(now, default="") < max(old, default=""):
            wrong.append(f"steps {sorted(old)} became {sorted(now)}")
        for step, files in now.items():
            for known in (old.get(step), new.get(step)):
                if known is not None and files != known:
                    wrong.append(f"{step} is not whole")
        return wrong

    def _next(self, left: Tree) -> list[str]:
        """The next run works, gives what an undisturbed one gives, and leaves nothing else."""
        command = self.case.again or self.case.command
        done = self.run(command)
        now = tree(self.work)
        if done.code == 2 and "exists already" in done.said and "--force" not in command and now == self.new:
            return []
        if done.code:
            return [f"the next run ends with {done.code}: {done.said.strip()[-400:]}"]
        return self._rest(now, "the next run")

    def _rest(self, now: Tree, who: str) -> list[str]:
        wrong = [f"{who} leaves {sorted(name for name in now if 'TOKEN' in name)}"] if "TOKEN" in str(now) else []
        if now != self.new:
            differs = sorted(name for name in {*now, *self.new} if now.get(name) != self.new.get(name))
            wrong.append(f"{who} gives other files: {differs}")
        return wrong


def scratch_folder() -> Path:
    """Where sweeps work: in memory where that is possible, for they sync thousands of times."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="gopt-sweep-", dir=shared if os.access(shared, os.W_OK) else None)).resolve()


def _cpu() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def main() -> int:
    """Sweep from a shell; ends with 1 when a fault broke the rule."""
    from cases import CASES, warm
    from planted import PLANTS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all where none is named")
    parser.add_argument("--faults", default="kill,torn,full,broken,interrupt,terminate")
    parser.add_argument("--every", type=int, default=1, help="every n-th point only")
    parser.add_argument("--offset", type=int, default=0, help="the first of them")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plant", choices=PLANTS, help="a mistake that must be found")
    given = parser.parse_args()
    faults = [Fault(name) for name in given.faults.split(",")]
    bad, scratch = 0, scratch_folder()
    warm()
    if given.plant:
        PLANTS[given.plant]()
    try:
        for name in given.cases or CASES:
            begin, spent = time.monotonic(), _cpu()
            sweep = Sweep(CASES[name], scratch)
            found = sweep.all(faults, given.every, given.offset)
            record = {
                "case": name, "writes": found.calls, "faults": dict(found.points), "states": found.states,
                "broken": len(found.faults), "seconds": round(time.monotonic() - begin, 1),
                "cpu": round(_cpu() - spent, 1), "unsynced": sweep.unsynced(),
            }  # fmt: skip
            print(json.dumps(record | ({"what": found.faults} if given.json else {})), flush=True)
            for each in () if given.json else found.faults[:20]:
                print("   ", each)
            bad += len(found.faults)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
