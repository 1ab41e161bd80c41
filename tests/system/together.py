"""Two commands on one target at once, from the first moment: one of them wins, or both end whole, and none mixes.

``python tests/system/together.py [COUNT] [SEED] [NAME,...]``: COUNT pairs of each, the second begun at a drawn moment
of the first. A pair is right where each ends with 0 or a refusal, one of them with 0; where what stands there is what
one of them leaves alone, or one after the other; where no draft stays; and where the next command works.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import swept
from gopt.cli.main import main as gopt_main
from sweep import NotWorkingError, Tree, scratch_folder, tree

Words = Sequence[str]
REFUSED = (2, 3, 5)
"""A target that exists, an input that was replaced meanwhile, a folder that another job has."""


@dataclass(frozen=True)
class Pair:
    """Two commands. ``outputs``: a pattern of what they write."""

    prepare: Callable[[Path], None]
    one: Words
    other: Words
    outputs: str


def _split(text: str) -> list[str]:
    return text.split()


def _shards(folder: Path) -> None:
    swept._old_folder(folder, "shard")


def _run(more: str) -> list[str]:
    return [*swept._RUN, *_split(more)]


PAIRS = {
    name: Pair(prepare, _split(one), _split(other), outputs) for name, prepare, one, other, outputs in (
        ("shard", swept._step, "shard step.onnx --ranks 2 -o out", "shard step.onnx --ranks 3 -o out", r"out(/|$)"),
        ("shard-force", _shards, "shard step.onnx --ranks 2 -o out --force",
         "shard step.onnx --ranks 4 -o out --force", r"out(/|$)"),
        ("shard-split", _shards, "shard step.onnx --ranks 2 -o out --force",
         "split step.onnx --trainers 2 --servers 1 -o out --force", r"out(/|$)"),
        ("shard-merge", _shards, "shard step.onnx --ranks 2 -o out --force", "merge out -o m.onnx",
         r"out(/|$)|m\.onnx"),
        ("reshard", swept._ranks, "reshard in.ranks --ranks 3 -o out", "reshard in.ranks --ranks 1 -o out",
         r"out(/|$)"),
        ("golden", swept._goldens, "golden update g", "golden update g", r"g/golden(/|$)"),
        ("merge", swept._state, "merge in.ranks -o new.onnx", "merge x.ranks -o new.onnx", r"new\.onnx"),
        ("merge-force", swept._state, "merge in.ranks -o m.onnx --force", "merge x.ranks -o m.onnx --force",
         r"m\.onnx"),
        ("merge-load", swept._state, "merge in.ranks -o m.onnx --force",
         "load-state step.onnx w.npz -o m.onnx --force", r"m\.onnx"),
        ("state-dict", swept._state, "merge in.ranks --state-dict v.safetensors --force",
         "merge x.ranks --state-dict v.safetensors --force", r"v\.safetensors"),
        ("report", swept._page, "report in.ranks --html p.html --force", "report in.ranks --html p.html --force",
         r"p\.html"),
        ("seal", swept._edited, "seal in.ranks", "seal in.ranks", r"in\.ranks/manifest\.json"),
        ("seal-merge", swept._edited, "seal in.ranks", "merge in.ranks -o m.onnx", r"in\.ranks/manifest\.json|m\.onnx"),
    )
} | {
    "run": Pair(swept._data, _run("--steps 3"), _run("--steps 2 --shuffle 1"), r"ck(/|$)"),
    "resume": Pair(swept._checkpoints, _run("--steps 4 --resume"), _run("--steps 3 --resume"), r"ck(/|$)"),
    "run-shard": Pair(swept._data, _run("--steps 3"), _split("seal in.ranks"), r"ck(/|$)|in\.ranks"),
}  # fmt: skip


class Together:
    """Pairs of one kind."""

    def __init__(self, pair: Pair, scratch: Path) -> None:
        self.pair, self.work, self.said = pair, scratch / "work", scratch / "said"
        self.before = scratch / "before"
        shutil.rmtree(self.before, ignore_errors=True)
        self.before.mkdir(parents=True)
        pair.prepare(self.before)
        self.known: list[Tree] = []
        self.takes = 0.0
        for order in ((pair.one,), (pair.other,), (pair.one, pair.other), (pair.other, pair.one)):
            self._start()
            begin = time.monotonic()
            codes = [self._end(self._begin(words, 0.0)) for words in order]
            self.takes = self.takes or time.monotonic() - begin
            if codes[0] != 0 and self._only_after(order):
                continue
            if codes[0] != 0 or not set(codes) <= {0, *REFUSED}:
                raise NotWorkingError(f"{order}: {codes}: {self.said.read_text()}")
            self.known.append(self._output())

    def _only_after(self, order: Sequence[Words]) -> bool:
        """Whether the first reads what the other makes whole: it is refused before that."""
        return order[0][0] == "merge" and self.pair.one[0] == "seal"

    def _start(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.before, self.work, symlinks=True)
        self.said.write_bytes(b"")

    def _begin(self, words: Words, moment: float) -> int:
        child = os.fork()
        if not child:
            code = 98
            try:
                out = os.open(self.said, os.O_WRONLY | os.O_APPEND)
                os.dup2(out, 1)
                os.dup2(out, 2)
                os.chdir(self.work)
                time.sleep(moment)
                code = gopt_main(list(words))
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        return child

    @staticmethod
    def _end(child: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _output(self) -> Tree:
        models = b"".join(path.read_bytes() for path in self.work.glob("*.onnx"))
        found = {name: each for name, each in tree(self.work).items() if re.match(self.pair.outputs, name)}
        return {name: each for name, each in found.items() if not name.endswith(".data") or name.encode() in models}

    def one(self, moment: float, swap: bool) -> list[str]:
        """What is wrong after both, the second begun so much later."""
        self._start()
        pair = (self.pair.other, self.pair.one) if swap else (self.pair.one, self.pair.other)
        codes = [self._end(each) for each in (self._begin(pair[0], 0.0), self._begin(pair[1], moment))]
        said, wrong = self.said.read_text(), []
        if 0 not in codes or not set(codes) <= {0, *REFUSED} or "Traceback" in said:
            wrong.append(f"exit codes {codes}")
        if self._output() not in self.known:
            wrong.append(f"a mixture of both: {sorted(self._output())}")
        wrong += self._drafts("")
        code = self._end(self._begin(self.pair.one, 0.0))
        if code not in (0, *REFUSED):
            wrong.append(f"the next run ends with {code}")
        return [f"{each} [{said.strip()[-600:]}]" for each in wrong + self._drafts(" by the next run")]

    def _drafts(self, whose: str) -> list[str]:
        left = [name for name in tree(self.work) if "TOKEN" in name]
        return [f"drafts are left{whose}: {left}"] if left else []

    def all(self, count: int, draw: random.Random) -> list[str]:
        found = []
        for shot in range(count):
            moment = 0.0 if shot % 3 == 0 else draw.uniform(0, self.takes)
            found += [f"{moment * 1000:.1f} ms later: {each}" for each in self.one(moment, bool(shot % 2))]
        return found


def main(count: str = "20", seed: str = "1", names: str = ",".join(PAIRS)) -> int:
    scratch, bad = scratch_folder(), 0
    swept.warm()
    tempfile.tempdir = str(scratch)
    try:
        for name in names.split(","):
            wrong = Together(PAIRS[name], scratch).all(int(count), random.Random(f"{name} {seed}"))
            print(f"{name}: {count} shots, {len(wrong)} wrong", *wrong, sep="\n  ", flush=True)
            bad += len(wrong)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
