"""Many cases, one after the other: which commands ran, how they ended, and which went wrong."""

from __future__ import annotations

import pkgutil
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import onnxruntime  # noqa: F401  each child would import it anew
from gopt.cli.main import COMMANDS, main

import gopt
from fuzz.cases import KINDS, Command, Corpus
from fuzz.child import Outcome, in_child
from fuzz.judge import fault, untrue


@dataclass(frozen=True)
class Finding:
    """A command that went wrong: case ``kind``/``seed`` makes it again."""

    kind: str
    seed: int
    command: Command
    what: str
    ended: Outcome

    def __str__(self) -> str:
        last = (self.ended.said.strip().splitlines() or [""])[-1][:300]
        return f"{self.kind} {self.seed}: {self.what}: gopt {' '.join(self.command)[:200]}\n    {last}"


def import_all() -> None:
    """Import all of gopt once: each child would import anew what its command needs, for a second."""
    for each in pkgutil.walk_packages([str(Path(gopt.__file__).parent)], "gopt."):
        with suppress(ImportError):  # of what is not installed
            if not each.name.endswith("__main__"):
                import_module(each.name)
    for name in COMMANDS:
        import_module(f"gopt.cli.{name.replace('-', '_')}")


class Campaign:
    """Cases of several kinds in turn; faulty files are kept in ``keep``/KIND-SEED."""

    def __init__(self, kinds: Sequence[str], keep: Path) -> None:
        import_all()
        self.kinds, self.keep = list(kinds), keep
        self.findings: list[Finding] = []
        self.codes: Counter[tuple[str, int | None]] = Counter()
        self.peak, self.slowest = 0, 0.0
        self._home = tempfile.TemporaryDirectory(prefix="gopt-fuzz-")
        home = Path(self._home.name) / "corpus"
        home.mkdir()
        self.corpus = Corpus.make(home)

    def one(self, seed: int) -> None:
        """Run the case of a seed, kinds in turn."""
        kind = self.kinds[seed % len(self.kinds)]
        folder = Path(self._home.name) / "case"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for command in KINDS[kind](self.corpus, folder, random.Random(f"{kind} {seed}")):
            if command[0] in ("verify", "merge", "reshard") and "out" in command and not (folder / "out").exists():
                continue
            ended = in_child(lambda command=command: main(command), folder)
            self.codes[command[0], ended.code] += 1
            self.peak, self.slowest = max(self.peak, ended.peak), max(self.slowest, ended.seconds)
            what = fault(command, ended, folder)
            if kind == "models":
                what = what or untrue(command, ended)
            if what:
                self._found(Finding(kind, seed, command, what, ended), folder)

    def _found(self, finding: Finding, folder: Path) -> None:
        self.findings.append(finding)
        print(finding, flush=True)
        kept = self.keep / f"{finding.kind}-{finding.seed}"
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(folder, kept, symlinks=True, ignore=_no_pipes)
        (kept / "said.txt").write_text(f"gopt {' '.join(finding.command)}\n\n{finding.ended.said}", errors="replace")

    def summary(self) -> str:
        """Counts of commands by how they ended."""
        total = sum(self.codes.values())
        lines = [f"{total} commands, {len(self.findings)} went wrong"]
        lines.append(f"at most {self.peak >> 20} MiB and {self.slowest:.1f} s")
        for (name, code), count in sorted(self.codes.items(), key=str):
            lines.append(f"  {name:8} exit {code}: {count}")
        return "\n".join(lines)


def _no_pipes(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not (Path(folder) / name).is_file() and not (Path(folder) / name).is_dir()]
