"""Stop signals at drawn times over the start and the end of every command: one, or two in a row.

``python tests/system/signal_sweep.py [COUNT] [SEED] [NAME,...]``: COUNT shots at each. A shot is right where the exit
code is that of the signal, or of a run that was over before; where stderr has one line of an error at most, and no
traceback; where no process is left; and where the same command, resumed, ends with 0 or finds all done.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import every

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "fixtures" / "mlp_adamw.onnx"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WINDOW = 2.0
"""Seconds from the start, and up to the usual end, over which times are drawn."""
ENDS = (1, 2)
"""Exit codes of commands of the table that end otherwise than with 0: a difference, and no PyTorch."""
LIMIT = 180.0
"""Seconds that no command takes, on however busy a machine."""
GOPT = [sys.executable, "-P", "-m", "gopt.cli"]


@dataclass(frozen=True, slots=True)
class Scene:
    """A command. ``folder``: what it runs; ``more``: its options; ``keeps``: whether it writes checkpoints. Or
    ``words``: a command of the table of all commands, in their folder."""

    folder: str = ""
    more: tuple[str, ...] = ()
    keeps: bool = True
    words: tuple[str, ...] = ()

    def place(self, home: Path) -> Path:
        """The folder that it runs in."""
        return home / "every" if self.words else home


SCENES = {
    "threads": Scene("ranks"),
    "launch": Scene("ranks", ("--launch", "2")),
    "stages": Scene("stages"),
    "stages-launch": Scene("stages", ("--launch", "2")),
    "sync": Scene("sync"),
    "sync-launch": Scene("sync", ("--launch", "3")),
    "async": Scene("async"),
    "async-launch": Scene("async", ("--launch", "3")),
    "geo": Scene("geo"),
    "geo-launch": Scene("geo", ("--launch", "3")),
    "verify": Scene("ranks", (), keeps=False),
    "verify-mpi": Scene("ranks", ("--engine", "mpi"), keeps=False),
}
COMMANDS = {name: Scene(keeps=False, words=tuple(text.split())) for name, text in every.TABLE.items()}
"""Every command that click knows."""


def prepare(home: Path, *folders: str) -> None:
    """Write the data and the folders that scenes use: all, or these."""
    generator = np.random.default_rng(0)
    np.savez(home / "data.npz", x=generator.standard_normal((64, 32)).astype("f4"), y=generator.integers(0, 10, 64))
    made = {
        "ranks": ["shard", "--ranks", "2"], "sync": ["split", "--trainers", "2", "--servers", "1"],
        "stages": ["shard", "--mesh", "pp=2", "--micro-batches", "2"],
        "async": ["split", "--trainers", "2", "--servers", "1", "--mode", "async"],
        "geo": ["split", "--trainers", "2", "--servers", "1", "--mode", "geo"],
    }  # fmt: skip
    if "every" in folders or not folders:
        (home / "every").mkdir()
        every.prepare(home / "every")
    for name in [each for each in folders if each != "every"] if folders else made:
        verb, *options = made[name]
        subprocess.run([*GOPT, verb, str(FIXTURE), *options, "-o", str(home / name)], check=True, capture_output=True)


def command(scene: Scene, home: Path, kept: Path) -> list[str]:
    """The command of a scene; it goes on from the checkpoints that there are."""
    if scene.words:
        return [*GOPT, *scene.words]
    if not scene.keeps:
        return [*GOPT, "verify", str(home / scene.folder), *scene.more]
    return [
        *GOPT, "run", str(home / scene.folder), "--data", str(home / "data.npz"), "--steps", "12", "--set", "lr=1e-3",
        "--checkpoint", str(kept), "--every", "1", "--resume", *scene.more,
    ]  # fmt: skip


def shoot(
    scene: Scene, home: Path, kept: Path, number: signal.Signals, moment: float, again: float | None = None
) -> list[str]:
    """What is wrong after a signal at a moment, in seconds from the start, and a second one so much later."""
    arguments, place = command(scene, home, kept), scene.place(home)
    begun = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=place)
    time.sleep(moment)
    begun.send_signal(number)
    if again is not None:
        time.sleep(again)
        begun.send_signal(number)
    try:
        said = begun.communicate(timeout=LIMIT)[1]
    except subprocess.TimeoutExpired:
        begun.kill()
        return ["it does not end"]
    wrong = []
    if begun.returncode not in (0, 128 + number, -number, *(ENDS if scene.words else ())):
        wrong.append(f"exit code {begun.returncode}")
    errors = [line for line in said.splitlines() if "gopt: error:" in line]
    if "Traceback" in said or len(errors) > 1 or "defect" in said:
        wrong.append("it prints more than one error")
    if left := orphans(place if scene.words else home / scene.folder):
        wrong.append(f"processes are left: {left}")
    if scene.keeps:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=LIMIT)
        if done.returncode != 0 or not list(kept.glob("step_*12/index.json")):
            wrong.append(f"the next run ends with {done.returncode}: {done.stderr.strip()}")
        drafts = [path.name for path in kept.glob(".*") if path.name.endswith((".new", ".old"))]
        if drafts:
            wrong.append(f"drafts are left: {drafts}")
    if scene.words:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=LIMIT, cwd=place)
        if done.returncode not in (0, *ENDS):
            wrong.append(f"the next run ends with {done.returncode}: {done.stderr.strip()}")
        if drafts := [path.name for path in place.rglob(".*.gopt-*")]:
            wrong.append(f"drafts are left: {drafts}")
    return [f"{each}; stderr: {said.strip()[-300:]}" for each in wrong]


def orphans(folder: Path) -> list[int]:
    """Processes that run a folder, or in it, a moment after the end of their command."""
    until = time.monotonic() + 5
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                here = bytes(folder) in (path / "cmdline").read_bytes() or os.readlink(path / "cwd") == str(folder)
                if here and state != "Z" and int(path.name) != os.getpid():
                    found.append(int(path.name))
            except OSError:
                continue
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.1)


def usual(scene: Scene, home: Path, kept: Path) -> float:
    """Seconds that a command takes undisturbed."""
    begin = time.monotonic()
    done = subprocess.run(command(scene, home, kept), capture_output=True, timeout=LIMIT, cwd=scene.place(home))
    assert done.returncode in (0, *(ENDS if scene.words else ())), done.stderr
    return time.monotonic() - begin


def sweep(home: Path, names: Sequence[str], count: int, seed: int) -> list[str]:
    """So many shots at each scene; returns what was wrong, with what repeats it."""
    found = []
    for name in names:
        draw = random.Random(f"{name} {seed}")
        scene = ALL[name]
        whole = usual(scene, home, home / f"{name}.usual") if count > 1 else WINDOW
        for shot in range(count):
            late = shot % 2 and whole > WINDOW
            moment = draw.uniform(whole - WINDOW, whole) if late else draw.uniform(0, min(WINDOW, whole))
            number = SIGNALS[(shot // 2 + draw.randrange(3)) % 3]
            again = draw.uniform(0, 0.5) if shot % 3 == 2 else None
            wrong = shoot(scene, home, home / f"{name}.{seed}.{shot}", number, moment, again)
            twice = "" if again is None else f" and {again:.3f} s later"
            found += [f"{name}: {number.name} after {moment:.3f}{twice} of {whole:.1f} s: {each}" for each in wrong]
    return found


ALL = SCENES | COMMANDS


def main(count: str = "20", seed: str = "1", names: str = ",".join(ALL)) -> int:
    chosen = names.split(",")
    with tempfile.TemporaryDirectory(prefix="gopt.signals.") as folder:
        prepare(Path(folder))
        found = []
        for name in chosen:
            wrong = sweep(Path(folder), [name], int(count), int(seed))
            print(f"{name}: {count} shots, {len(wrong)} wrong", *wrong, sep="\n  ", flush=True)
            found += wrong
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
