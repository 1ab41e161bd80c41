"""Kill, interrupt or fail a command at every one of its writes, and judge each by one rule.

The rule: under its name stands the old output whole or the new one whole; nothing else has changed; and the next run
of the command works, and leaves nothing but its output. ``python tests/system/sweep.py --help`` sweeps from a shell.

Commands run in forks of one process that has everything imported, so that a point costs milliseconds.
"""

from __future__ import annotations

import argparse
import ctypes
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
_CHILD_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER."""
_NAMED = re.compile(r"gopt: error: .*(out|golden|ck|\.json|\.onnx|\.safetensors|\.html|\.data|\.zip|\.dcp)\b.*: ")
"""An error that says which file or folder it is about."""
PATIENCE = 20.0
"""Seconds after which a process that its command has left is said to stay."""
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
    code: int = 0
    """What it ends with undisturbed: a failing command writes a reproducer."""


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
    orphans: int = 0
    """Its processes that lived on."""


def adopt_orphans() -> None:
    """Become the parent of processes whose parent has died, so that they are seen."""
    assert ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1) == 0


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


def _meets(fault: Fault, place: int, name: str) -> bool:
    """Whether a fault is another one at this point: short writes begin with the first."""
    if fault is Fault.SHORT:
        return not place
    return fault is not Fault.TORN or name == "write"


class NotWorkingError(Exception):
    """The undisturbed command fails."""


class Sweep:
    """Every point of one case."""

    def __init__(self, case: Case, scratch: Path, work: Path | None = None) -> None:
        self.case, self.scratch = case, scratch
        self.before, self.work = scratch / "before", work or scratch / "work"
        shutil.rmtree(self.before, ignore_errors=True)
        self.before.mkdir(parents=True)
        case.prepare(self.before)
        self.found = Found()
        self._start()
        first = self.run(case.command)
        if first.code != case.code:
            raise NotWorkingError(f"{case.name}: it does not work at all: {first.said}")
        shutil.rmtree(scratch / "after", ignore_errors=True)
        shutil.copytree(self.work, scratch / "after", symlinks=True)
        self.old, self.new = tree(self.before), tree(self.work)
        self._outputs = [self._output(folder) for folder in (self.before, self.work)]
        self._rest(self.new, "the undisturbed run")
        self.points = first.points
        self.found.calls = len(first.points)
        self.said: set[str] = set()
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
        return Run(os.waitstatus_to_exitcode(status), said.read_text(), points, self._orphans())

    @staticmethod
    def _orphans() -> int:
        """Wait for what a dead command has left; returns how many of them live on."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                number, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 0
            if not number:
                time.sleep(0.001)
        own = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for each in own:
            os.kill(int(each), signal.SIGKILL)
            os.waitpid(int(each), 0)
        return len(own)

    def _live(self, command: Sequence[str], layer: Layer, said: Path) -> int:
        try:
            out = os.open(said, os.O_WRONLY | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.chdir(self.work)
            tempfile.tempdir = str(self.scratch)  # a command that is killed leaves its scratch files
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

    def all(self, faults: Iterable[Fault], some: Iterable[Fault] = (), every: int = 1, first: bool = False) -> Found:
        """Make ``faults`` at every point and ``some`` at every n-th; ``first``: until one breaks the rule."""
        for turn, fault in enumerate((*faults, *some)):
            step = every if fault in some else 1
            for place, (point, name, path) in enumerate(self.points):
                if first and self.found.faults:
                    return self.found
                if place % step == turn % step and _meets(fault, place, name):
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
        self.said.update(_TOKEN.sub(".gopt-TOKEN.", line) for line in done.said.splitlines() if "gopt:" in line)
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
        if fault in (Fault.FULL, Fault.QUOTA) and (name == "fsync" or (not self.case.exchange and self._aside(left))):
            return []  # names cannot be changed back on a disk that takes nothing
        return [f"leaves {litter}"]

    def _aside(self, left: Tree) -> bool:
        """Whether the old output lies whole beside its place: the next run puts it back, and is judged for it."""
        return ".old" in str(left) and not any(re.match(self.case.outputs, name) for name in left)

    def _ended(self, fault: Fault, done: Run) -> list[str]:
        """Whether the exit code is one of those that the fault allows."""
        allowed = {
            Fault.KILL: {-9}, Fault.TORN: {-9}, Fault.FULL: {5, 0}, Fault.QUOTA: {5, 0}, Fault.BROKEN: {5, 0},
            Fault.SHORT: set(), Fault.INTERRUPT: {130, 0}, Fault.TERMINATE: {143, 0, -15},
        }[fault]  # fmt: skip
        if fault not in KILLS:
            allowed |= {self.case.code}
        wrong = [] if done.code in allowed else [f"exit code {done.code}"]
        if done.code == PAST or "Traceback" in done.said:
            wrong.append("a traceback, or writes past the layer")
        if done.orphans:
            wrong.append(f"{done.orphans} processes stay")
        if done.code == 5 and not _NAMED.search(done.said):
            wrong.append("the error names no file")
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
        if self._output(self.work) in self._outputs:
            return wrong
        if not self.case.exchange and self._aside(left):
            return wrong
        return [*wrong, f"neither old nor new: {sorted(name for name in left if mine.match(name))}"]

    def _output(self, root: Path) -> Tree:
        """What the command writes, but for values that no model refers to: they come before it, and go after it."""
        models = b"".join(path.read_bytes() for path in root.glob("*.onnx"))
        found = {name: each for name, each in tree(root).items() if re.match(self.case.outputs, name)}
        return {name: each for name, each in found.items() if not name.endswith(".data") or name.encode() in models}

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
        for name in ("ck/manifest.json", "ck/report.json", "ck/source.onnx"):
            known = (self.old.get(name), self.new.get(name))
            if left.get(name) not in known and not (name.endswith("manifest.json") and self._between(name)):
                wrong.append(f"{name} is neither old nor new")
        source = self.new if left.get("ck/source.onnx") == self.new.get("ck/source.onnx") else self.old
        for name in (each for each in source if re.fullmatch(r"ck/source.*\.bin", each)):
            if "ck/source.onnx" in left and left.get(name) != source[name]:
                wrong.append(f"{name} is not what the source refers to")
        if max(now, default="") < max(old, default=""):
            wrong.append(f"steps {sorted(old)} became {sorted(now)}")
        for step, files in now.items():
            for known in (old.get(step), new.get(step)):
                if known is not None and files != known:
                    wrong.append(f"{step} is not whole")
        return [*wrong, *self._best(left)]

    def _best(self, left: Tree) -> list[str]:
        """The best step is there where one was, and whole: that of a step on the way as well."""
        index = self.work / "ck/best/index.json"
        if "ck/best/index.json" not in left:
            return ["best is gone"] if "ck/best/index.json" in self.old or "ck/best" in left else []
        files = json.loads(index.read_text())["files"]
        found = {name: hashlib.sha256((index.parent / name).read_bytes()).hexdigest() for name in files}
        return [f"best/{name} is not whole" for name in files if found[name] != files[name]["sha256"]]

    def _between(self, name: str) -> bool:
        """Whether a manifest is the new one without digests of files that are about to be replaced."""
        try:
            now, new = (json.loads((root / name).read_text()) for root in (self.work, self.scratch / "after"))
        except ValueError:  # torn
            return False
        files, known = now.pop("files"), new.pop("files")
        del now["seal"], new["seal"]
        return bool(now == new and files.items() < known.items())

    def _next(self, left: Tree) -> list[str]:
        """The next run works, gives what an undisturbed one gives, and leaves nothing else."""
        command = self.case.again or self.case.command
        done = self.run(command)
        now = tree(self.work)
        if done.code == 2 and "exists already" in done.said and "--force" not in command and now == self.new:
            return []
        if done.code != self.case.code:
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
    return Path(
        tempfile.mkdtemp(prefix="sweep-of-writes-", dir=shared if os.access(shared, os.W_OK) else None)
    ).resolve()


def _cpu() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def planted(name: str, case: Case, fault: Fault, scratch: Path) -> bool:
    """Whether a mistake is found, in a process of its own that makes it."""
    child = os.fork()
    if not child:
        try:
            from planted import PLANTS

            PLANTS[name].make()
            sweep = Sweep(case, scratch / name)
            os._exit(1 if sweep.all([fault], first=True).faults or sweep.unsynced() else 0)
        except NotWorkingError as error:
            os._exit(1 if "past the layer" in str(error) else 2)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def main() -> int:
    """Sweep from a shell; ends with 1 when a fault broke the rule."""
    from planted import PLANTS
    from swept import CASES, warm

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all where none is named")
    parser.add_argument("--faults", default=",".join(fault.value for fault in Fault if fault is not Fault.NONE))
    parser.add_argument("--some", default="", help="faults to make here and there")
    parser.add_argument("--every", type=int, default=7, help="points from one of those to the next")
    parser.add_argument("--say", action="store_true", help="print every error once")
    parser.add_argument(
        "--plants", action="store_true", help="make mistakes instead, of these cases: all must be found"
    )
    given = parser.parse_args()
    faults, some = ([Fault(name) for name in text.split(",") if text] for text in (given.faults, given.some))
    bad, scratch = 0, scratch_folder()
    warm()
    adopt_orphans()
    try:
        for name, plant in PLANTS.items() if given.plants else ():
            if given.cases and plant.case not in given.cases:
                continue
            found = planted(name, CASES[plant.case], plant.fault, scratch)
            print(json.dumps({"plant": name, "found": found}), flush=True)
            bad += not found
        for name in () if given.plants else given.cases or CASES:
            begin, spent = time.monotonic(), _cpu()
            sweep = Sweep(CASES[name], scratch)
            found = sweep.all(faults, some, given.every)
            record = {
                "case": name, "writes": found.calls, "faults": dict(found.points), "states": found.states,
                "broken": found.faults, "unsynced": sweep.unsynced(),
                **({"said": sorted(sweep.said)} if given.say else {}),
                "seconds": round(time.monotonic() - begin, 1), "cpu": round(_cpu() - spent, 1),
            }  # fmt: skip
            print(json.dumps(record), flush=True)
            bad += len(found.faults) + len(sweep.unsynced())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
