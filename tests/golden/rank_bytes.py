"""Digests of all files that gopt writes for every fixture and set of options: for changes that change no byte.

    python tests/golden/rank_bytes.py write BEFORE.txt [--part fixtures|families|cases|plain]
    ... the change ...
    python tests/golden/rank_bytes.py compare BEFORE.txt

A line: fixture, options, and the digest of all files of the folder, or of the text with which it is refused.
``compare`` makes them again, prints the lines that differ, and ends with 1 if there are any.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import gopt
from gopt.errors import GoptError

FIXTURES = Path(__file__).parents[2] / "fixtures"
PARTS = {
    "fixtures": ("*.onnx", "real/*.onnx"), "families": ("families/*.onnx", "optim/*.onnx"),
    "cases": ("cases/**/*.onnx",), "plain": ("plain/**/*.onnx",),
}  # fmt: skip
"""Folders of source steps."""
SHARDED: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"mesh": "shard=2", "stage": stage} for stage in range(4)},
    "rows": {"mesh": "shard=3", "partition": "rows"},
    "whole": {"mesh": "shard=3", "partition": "whole"},
    "hybrid": {"mesh": "dp=2,shard=2", "stage": 3, "bucket_mb": 0.001},
    "micro": {"mesh": "shard=2", "accumulate": 2, "statistics": "mean"},
    "sync": {"mesh": "dp=2", "statistics": "sync"},
    "packed": {"mesh": "shard=2", "bucket_mb": 0.0001, "passes": {"fuse-collectives": {"max-tensors": 3}}},
    "reductions": {"mesh": "shard=2", "passes": {"shard": {"reduce-dtype": "float16"}, "overlap": {"prefetch": 2}}},
    "tensor": {"mesh": "shard=2,tp=2", "stage": 1},
    "context": {"mesh": "cp=2"},
    "expert": {"mesh": "dp=2,ep=2"},
    "rows of images": {"mesh": "h=2"},
}
SPLIT = {
    "servers": gopt.SplitOptions(trainers=2, servers=2),
    "without rounds": gopt.SplitOptions(trainers=2, servers=1, mode="async"),
}
"""Sets of options, by a name for each line."""


def cases(part: str) -> Iterator[tuple[Path, str]]:
    """Every fixture with every set of options."""
    for pattern in PARTS[part]:
        for path in sorted(FIXTURES.glob(pattern)):
            for name in (*SHARDED, *SPLIT):
                yield path, name


def line(case: tuple[Path, str]) -> str:
    """The line of one case."""
    path, name = case
    head = f"{path.relative_to(FIXTURES)} | {name} |"
    try:
        source = gopt.load(path)
        made = gopt.shard(source, **SHARDED[name]) if name in SHARDED else gopt.split(source, SPLIT[name])
        with tempfile.TemporaryDirectory() as folder:
            made.write(Path(folder, "out"))
            return f"{head} {digest(Path(folder, 'out'))}"
    except GoptError as error:
        text = "; ".join((error.message, *error.hints))
        return f"{head} refused {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def digest(folder: Path) -> str:
    """One digest of the names and bytes of all files."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()[:16]


def main() -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--part", choices=PARTS, action="append")
    given = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        lines = [each for part in given.part or PARTS for each in pool.map(line, cases(part), chunksize=4)]
    for name in (*SHARDED, *SPLIT):
        if all("refused" in each for each in lines if f"| {name} |" in each):
            print(f"{name}: every fixture is refused, and nothing is compared")
            return 1
    if given.action == "write":
        given.file.write_text("\n".join(lines) + "\n")
        return 0
    before = given.file.read_text().splitlines()
    apart = sorted({*before} ^ {*lines})
    print(
        "\n".join([f"{'-' if each in {*before} else '+'} {each}" for each in apart] or ["all equal"]),
        f"({len(lines)} folders)",
    )
    return bool(apart)


if __name__ == "__main__":
    sys.exit(main())
