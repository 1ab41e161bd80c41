"""Edits of rank files, one after the other: ``cd tests && python -m edit_gen --seed 1 --minutes 5``.

Each seed is a folder of a drawn step, ``--edits`` of them each. ``WRONG``: proven, but the numbers differ, or a right
folder's certificate is checked for the edited one; ``ALIKE``: called different, but no number differs, to be looked at;
``UNRUN``: proven, but it does not run.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import draws

from edit_gen.edits import EDITS
from edit_gen.folders import KINDS, drawn_kind
from edit_gen.judge import OF_MANIFEST, Folder, judged
from edit_gen.models import NODES
from edit_gen.models import judged as of_models


def cases(seed: int, kind: str, edits: range, only: str) -> Iterator[draws.Case]:
    told, write = KINDS[kind or drawn_kind(seed)](seed)
    with tempfile.TemporaryDirectory() as home:
        folder = Folder.of(write, Path(home))
        if isinstance(folder, draws.Verdict):
            yield draws.Case.of(seed, told, folder)
            return
        for number in edits:
            for done, verdict in judged(folder, seed, number, only):
                name = f"seed {seed} edit {number}"
                yield draws.Case(name, f"{name}: {told}\n    {done}", verdict.outcome, verdict.why, verdict.kind)


def models(seed: int, edits: int, kind: str) -> Iterator[draws.Case]:
    """Drawn models in the place of folders."""
    with tempfile.TemporaryDirectory() as home:
        for done, verdict in of_models(seed, edits, Path(home), kind):
            name = f"seed {seed} {done}"
            yield draws.Case(name, name, verdict.outcome, verdict.why, verdict.kind)


def main() -> int:
    parser = draws.parser("edit_gen", __doc__)
    parser.add_argument("--kind", choices=[*KINDS, *NODES], default="", help="of folders")
    parser.add_argument("--only", choices=[*EDITS, *OF_MANIFEST], default="", help="the kind of edits")
    parser.add_argument("--edits", type=int, default=30, help="of each folder")
    parser.add_argument("--edit", type=int, help="this one alone")
    options = parser.parse_args()
    edits = range(options.edits) if options.edit is None else range(options.edit, options.edit + 1)
    seeds = range(options.seed, options.seed + options.count) if options.count else count(options.seed)
    if options.kind in NODES:
        every = (case for seed in seeds for case in models(seed, options.edits, options.kind))
    else:
        every = (case for seed in seeds for case in cases(seed, options.kind, edits, options.only))
    quiet = ("equal", "different", "refused", "unproven", "unrun", "starts", "near", "call", "proven")
    return draws.run(every, options.minutes, quiet=quiet, wrong=("WRONG", "UNRUN", "CRASH").__contains__)


if __name__ == "__main__":
    sys.exit(main())
