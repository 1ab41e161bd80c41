"""Drawn steps between trainers and servers, with options drawn together, through ``gopt verify`` and ``gopt prove``."""

from __future__ import annotations

import contextlib
import io
import random
import traceback
from dataclasses import dataclass
from pathlib import Path

from draws import Verdict
from gopt.cli.main import main

import gopt
from gopt.errors import OptionError, UnsupportedError
from gopt.verification.proof.result import ProofVerdict
from option_gen.life import split_words
from option_gen.make import Setting

MORE = (
    ("--wire", ("float16", "bfloat16"), 0.15), ("--table", ("*=modulo", "*=range", "*=columns", "*=whole"), 0.25),
    ("--loss-reduction", ("sum",), 0.1), ("--count", ("push", "chief"), 0.1), ("--every", ("1", "2"), 0.1),
    ("--delay-compensation", ("0.04",), 0.1),
)  # fmt: skip
"""Options that ``gopt reshard`` does not take, too."""
REFUSED = (2, 3, 4)


@dataclass(frozen=True, slots=True)
class Split:
    """A step, and the words of ``gopt split``."""

    step: Setting
    words: tuple[str, ...]

    @classmethod
    def draw(cls, seed: int, step: str | None = None) -> Split:
        setting, r = Setting.draw(seed, step), random.Random(f"servers {seed}")
        words = [word for option, values, often in MORE if r.random() < often for word in (option, r.choice(values))]
        return cls(setting, (*split_words(r), *words))

    def told(self) -> str:
        """As a command line."""
        return " ".join(["split", f"{self.step.step}.onnx", *self.words])


def judge(split: Split, folder: Path) -> Verdict:
    """``right``; ``refused``; ``unproven``; ``unverified``, where updates follow an order, or nothing is confirmed;
    ``WRONG`` and ``CRASH`` are faults."""
    try:
        return _judged(split, folder)
    except Exception:
        return Verdict("CRASH", traceback.format_exc(limit=-3))


def _judged(split: Split, folder: Path) -> Verdict:
    try:
        step, said = split.step.file(folder), io.StringIO()
    except UnsupportedError as error:
        return Verdict("refused", str(error))
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(["split", str(step), *split.words, "-o", str(folder / "split"), "--quiet"])
    if code:
        return Verdict("refused" if code in REFUSED else "CRASH", said.getvalue())
    for read in (gopt.inspect, gopt.report):
        read(folder / "split").to_json()
    try:
        found = gopt.verify(folder / "split", steps=2, confirm=False)
        proof = gopt.prove(folder / "split")
    except (OptionError, UnsupportedError) as error:
        return Verdict("unverified", str(error))
    if found.outcome == "different" or proof.verdict is ProofVerdict.DIFFERENT:
        wrong = [claim for claim in proof.claims if claim.verdict is ProofVerdict.DIFFERENT]
        return Verdict("WRONG", f"{found.reason()} {wrong}")
    if not proof.proven:
        return Verdict("unproven", str([claim.name for claim in proof.claims if claim.mismatch is not None]))
    return Verdict("right" if found.equal else "unverified", "" if found.equal else found.reason())
