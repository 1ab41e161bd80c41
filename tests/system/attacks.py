"""What stands around a command is hostile: ``nice python tests/system/attacks.py [KIND,...] [EVERY]``.

``things``: a pipe, a socket, a device, a link, a huge file without contents in the place of each file that is read;
``names``: outputs with names that no shell likes; ``limits``: of files, of open files, of memory, modes, another user,
a clock that goes backwards; ``links``: a second process exchanges the output, or the folder that it lies in, for a link
or for the user's own; ``variables``: values of the environment; ``killed``: a launcher or a rank is stopped or killed.
EVERY: each so-manieth shot alone. Right is an exit code of the README but 70, no traceback, the user's own files as
they were, no process and no shared memory left, and a next run that works and leaves no draft.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import every
from signal_sweep import GOPT, orphans
from streams import run, warm
from sweep import tree

Act = Callable[[], object]
"""Something done in the command's process before it, or in its folder."""
CODES = {0, 1, 2, 3, 4, 5}
MUTE = "files of 0"
"""What takes no error either: stderr is a file here."""
TABLE = {**every.TABLE, "run-keeps": every.MORE["run-keeps"]}
WRITES = ("shard", "split", "merge", "reshard", "load-state", "report", "golden update", "seal", "run-keeps", "import",
          "derive", "reduce", "demo", "init")  # fmt: skip
READS = ("merge", "inspect", "verify", "run", "seal", "reshard", "report", "explain", "diff", "plan")
SHARED = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Shot:
    """A command. ``before``: in its process; ``place``: in its folder; ``beside``: again and again while it runs;
    ``next``: whether it works afterwards, where nothing disturbs it."""

    name: str
    words: list[str]
    before: Act = lambda: None
    place: Act = lambda: None
    beside: Act | None = None
    next: bool = True


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _bare(path: Path) -> None:
    path.mkdir()
    (path / "file").write_text("mine")


THINGS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo, "socket": _socket, "huge": _huge, "folder": _bare, "empty": Path.touch,
    "device": lambda path: path.symlink_to("/dev/zero"), "nowhere": lambda path: path.symlink_to("nowhere"),
    "itself": lambda path: path.symlink_to(path.name), "self": lambda path: path.symlink_to("."),
}  # fmt: skip
READ = {
    "in.ranks/manifest.json": READS, "in.ranks/report.json": READS, "in.ranks/source.onnx": READS,
    "in.ranks/states.bin": READS, "in.ranks/rank_0001.onnx": READS, "step.onnx": ("shard", "split", "load-state"),
    "values.npz": ("load-state",), "data.npz": ("run", "run-keeps"), "failure.zip": ("reproduce",),
    "goldens/gopt-golden.toml": ("golden update", "golden check"), "forward.onnx": ("derive",),
    "kept/manifest.json": ("run-keeps",), "kept/source.onnx": ("run-keeps",), "kept/.gopt.lock": ("run-keeps",),
    "ort/checkpoint": ("import",), "in.split/server_0000.onnx": ("run-split",), "gopt.toml": ("shard", "plan"),
}  # fmt: skip


def things() -> Iterator[Shot]:
    """Each kind of thing in the place of each file, for a command that reads it."""
    for turn, (file, names) in enumerate(READ.items()):
        for more, (kind, make) in enumerate(THINGS.items()):
            name = names[(turn + more) % len(names)]

            def place(path: Path = Path(file), make: Callable[[Path], object] = make) -> None:
                if path.is_file():
                    path.unlink()
                path.parent.mkdir(exist_ok=True)
                make(path)

            words = {**TABLE, **every.MORE}[name].split()
            yield Shot(f"{kind} as {file}", words, place=place, next=False)


NAMES = ("a\nb.onnx", "\udcff\udcfe.onnx", "n" * 250, "n" * 300, "d/" * 120 + "x.onnx", "d/" * 3000 + "x", " ", "..",
         ".", "", "/", "/dev/null", "/proc/self/fd/1", "/dev/fd/9", "~", "-", "$(x)`y`;.onnx", "a/../b.onnx",
         "step.onnx/x", "in.ranks", "data.npz", "\u202e\x1b[31m.onnx", "/nowhere/x" * 2, "kept/.",
         "mine/file")  # fmt: skip


def names() -> Iterator[Shot]:
    """Each odd name as the output of two commands, one with and one without --force."""
    outputs = [name for name in WRITES if " -o " in TABLE[name]] + ["report"]
    for turn, odd in enumerate(NAMES):
        for more in range(2):
            name = outputs[(turn + 3 * more) % len(outputs)]
            words = [word for word in TABLE[name].split() if more or word != "--force"]
            words[words.index("--html" if name == "report" else "-o") + 1] = odd
            yield Shot(f"output {odd[:20]!r}", words, next=False)


def _limit(which: int, value: int) -> Act:
    return lambda: resource.setrlimit(which, (value, value))


def _memory(more: int) -> Act:
    def act() -> None:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + more, size + more))

    return act


def _backwards() -> None:
    now, draw = time.time, random.Random(1)
    time.time = lambda: now() - draw.random() * 1e9
    time.time_ns = lambda: int(time.time() * 1e9)


LIMITS: dict[str, Act] = {
    **{f"files of {size}": _limit(resource.RLIMIT_FSIZE, size) for size in (0, 50, 3000)},
    **{f"{count} open files": _limit(resource.RLIMIT_NOFILE, count) for count in (3, 4, 5, 7, 10)},
    **{f"{more >> 10} KiB more": _memory(more) for more in (0, 1 << 20, 16 << 20)},
    "no process": _limit(resource.RLIMIT_NPROC, 0), "umask 777": lambda: os.umask(0o777),
    "another user": lambda: (os.chmod(".", 0o555), os.setgid(65534), os.setuid(65534)), "backwards": _backwards,
}  # fmt: skip


def limits() -> Iterator[Shot]:
    for limit, before in LIMITS.items():
        for name in WRITES:
            yield Shot(limit, TABLE[name].split(), before)


def _exchanged(path: Path) -> Act:
    """Exchange a name for what ``_theirs`` has made beside it, and back."""
    aside, theirs = path.with_name(f"{path.name}.aside"), path.with_name(f"{path.name}.theirs")

    def act() -> None:
        for one, two in ((path, aside), (theirs, path), (path, theirs), (aside, path)):
            with contextlib.suppress(OSError):
                if not os.path.lexists(two):
                    one.rename(two)
            time.sleep(0.002)

    return act


OUTPUTS = {
    "shard": "out", "split": "split", "merge": "merged.onnx", "reshard": "resharded", "load-state": "loaded.onnx",
    "report": "page.html", "run-keeps": "kept", "golden update": "goldens/golden", "demo": "sample",
}  # fmt: skip


def _theirs(path: Path, other: str, before: Act) -> Act:
    """A link to ``other``, or a folder of the user's where that is '', beside a path."""

    def act() -> None:
        before()
        theirs = path.with_name(f"{path.name}.theirs")
        theirs.symlink_to(other) if other else _bare(theirs)

    return act


def _are_there(home: Path) -> bool:
    """Whether what ``_theirs`` has made is somewhere."""
    found = [path for path in home.rglob("*") if "mine" not in path.relative_to(home).parts]
    return any(path.is_symlink() or (path.name == "file" and path.read_text() == "mine") for path in found)


def links() -> Iterator[Shot]:
    """The output, or the folder around it, is exchanged while a command writes, three times each."""
    for name, output in OUTPUTS.items():
        linked = _link_hard if output.endswith(".onnx") else lambda: None
        places = [(output, other, linked) for other in ("mine", "mine/file", "nowhere", "")]
        places += [("around", other, _around) for other in ("mine", "") if name != "golden update"]
        for path, other, before in 3 * places:
            words = [f"around/{word}" if word == output and path == "around" else word for word in TABLE[name].split()]
            place = _theirs(Path(path), other, before)
            yield Shot(f"{path} and {other!r}", words, place=place, beside=_exchanged(Path(path)))


def _around() -> None:
    Path("around").mkdir()


def _link_hard() -> None:
    """Outputs that are other names of files of the user's."""
    for name in ("merged.onnx", "loaded.onnx"):
        Path(name).unlink(missing_ok=True)
        os.link("mine/file", name)


VALUES = (
    "",
    "0",
    "-1",
    "9" * 30,
    "mine",
    "/dev/full",
    "nowhere/x",
    "a\nb",
    "\udcff",
    "%s%n",
    "../..",
    "=,=",
    "x" * 100_000,
)
VARIABLES = ("COLUMNS", "GOPT_HEARTBEATS", "TMPDIR", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "NO_COLOR",
             "HOME", "NCCL_MULTI_RANK_GPU_ENABLE", "GOPT_LIMITS", "LINES", "TERM", "LANG", "PATH")  # fmt: skip


def variables() -> Iterator[Shot]:
    """Each value of each variable, for a command that goes round; limits are read when a process starts."""
    for turn, variable in enumerate(VARIABLES):
        for more, value in enumerate(VALUES):
            name = ("run", "shard", "merge", "verify", "inspect", "doctor", "run-keeps")[(turn + more) % 7]
            words = TABLE[name].split()
            env = {**os.environ, variable: value}

            def before(env: dict[str, str] = env, words: list[str] = words) -> None:
                os.execve(sys.executable, [*GOPT, *words], env)

            def changed(variable: str = variable, value: str = value) -> None:
                os.environ[variable] = value
                tempfile.tempdir = None

            yield Shot(f"{variable}={value[:20]!r}", words, before if variable == "GOPT_LIMITS" else changed)


def one(shot: Shot, kept: Path, home: Path, codes: Counter[int]) -> list[str]:
    """What is wrong after one shot, whose exit code is counted."""
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(kept, home, symlinks=True)
    with contextlib.chdir(home):
        shot.place()
    until, beside = time.monotonic() + 60, 0
    if shot.beside is not None:
        beside = os.fork()
        if not beside:
            os.chdir(home)
            while time.monotonic() < until:
                shot.beside()
            os._exit(0)
    done = run(shot.words, home, before=shot.before)
    if beside:
        os.kill(beside, signal.SIGKILL)
        os.waitpid(beside, 0)
    codes[done.code] += 1
    wrong = [] if done.code in CODES else [f"exit code {done.code}"]
    for word in (b"Traceback", b"Exception ignored", b"defect"):
        if word in done.err:
            wrong.append(f"{word.decode()} is printed")
    if done.code in (2, 3, 5) and b"gopt: error: " not in done.err and shot.name != MUTE:
        wrong.append("no error is printed")
    for name, theirs in tree(kept / "mine").items():
        if tree(home / "mine").get(name) != theirs:
            wrong.append(f"mine/{name} is changed")
    if shot.beside is not None and not _are_there(home):
        wrong.append("what is the user's is gone")
    if shot.next and not shot.beside:
        again = run(shot.words, home)
        if again.code:
            wrong.append(f"the next run ends with {again.code}: {again.err[-300:]!r}")
        if drafts := [path.name for path in home.rglob(".*.gopt-*")]:
            wrong.append(f"drafts are left: {drafts}")
    said = done.err.decode(errors="replace").strip()[-400:]
    return [f"{' '.join(shot.words)[:90]}: {shot.name}: {each}; exit {done.code}, stderr {said}" for each in wrong]


def killed(count: int, home: Path, seed: int) -> tuple[int, list[str]]:
    """So many jobs of two ranks, of which a process is stopped for a while, or killed with its launcher or alone."""
    draw, wrong = random.Random(seed), []
    words = [*GOPT, *every.MORE["run-keeps"].replace("--steps 1", "--steps 6").split(), "--every", "1", "--launch", "2"]
    words += ["--deadline", "20"]
    for shot in range(count):
        before, folders = set(os.listdir(SHARED)), set(Path(tempfile.gettempdir()).glob("gopt.*"))
        job = subprocess.Popen(words, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(draw.uniform(0, 6))
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
        ranks = [int(each) for each in children.read_text().split()] if children.exists() else []
        target = draw.choice([job.pid, *ranks])
        how = ("kill", "stop")[shot % 2]
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            if how == "stop":
                time.sleep(draw.uniform(0, 3))
                os.kill(target, signal.SIGCONT)
        said = job.communicate(timeout=180)[1]
        what = f"{how} {'launcher' if target == job.pid else 'rank'}"
        found = [] if job.returncode in (0, 5, -9) and "Traceback" not in said else [f"exit {job.returncode}: {said}"]
        if left := orphans(home):
            found.append(f"processes stay: {left}")
        again = subprocess.run([*words, "--resume"], cwd=home, capture_output=True, text=True, timeout=180)
        if again.returncode:
            found.append(f"the next run ends with {again.returncode}: {again.stderr.strip()}")
        if new := set(os.listdir(SHARED)) - before:
            found.append(f"shared memory stays: {new}")
        if new := set(Path(tempfile.gettempdir()).glob("gopt.*")) - folders - {home}:
            found.append(f"folders stay: {new}")
        wrong += [f"{what}: {each}" for each in found]
        shutil.rmtree(home / "kept", ignore_errors=True)
    return count, wrong


KINDS = {"things": things, "names": names, "limits": limits, "links": links, "variables": variables}


def main(kinds: str = ",".join(KINDS), each: str = "1", count: str = "12") -> int:
    """Counts on stdout; ends with 1 where something was wrong."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.modules["llvmlite"] = None  # type: ignore[assignment]
    base, bad = Path(tempfile.mkdtemp(prefix="attacks.")).resolve(), 0
    kept, home = base / "kept", base / "home"
    kept.mkdir()
    try:
        warm([text.split() for name, text in TABLE.items() if name in {*WRITES, *READS, "doctor", "reproduce"}], kept)
        _bare(kept / "mine")
        for path in (base, *base.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)
        for kind in kinds.split(","):
            codes: Counter[int] = Counter()
            if kind == "killed":
                shots, wrong = killed(int(count), kept, int(each))
            else:
                chosen = list(KINDS[kind]())[:: int(each)]
                shots, wrong = len(chosen), [fault for shot in chosen for fault in one(shot, kept, home, codes)]
            print(json.dumps({"kind": kind, "shots": shots, "codes": codes, "broken": wrong}), flush=True)
            bad += bool(wrong)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
