"""The blocks of a page, and what runs them: in order, in one folder.

A page says how its blocks are run in HTML comments, which no reader sees:

``<!-- files: step.onnx=fixtures/gpt_adamw.onnx -->``  files of the repository that the page takes for granted
``<!-- not run: needs PyTorch -->``                    the next block is left out, and why

A ``bash`` block is run line by line. ``gopt`` and ``python FILE.py`` run in this process, anything else in a shell. A
line may end in the comment ``# exit code 1``. A ``python`` or ``toml`` block whose first line is ``# FILE.py`` or
``# FILE.toml`` is written to that file; other ``python`` blocks are executed.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gopt.cli.main import main

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*\Z", re.S)
FILES = re.compile(r"<!-- files: (.+?) -->", re.S)
SHELL = re.compile(r"&&|[|<>;$`]")
ENDINGS = {"python": "py", "toml": "toml"}
CODE = re.compile(r"\s# exit code (\d+)\b")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its line in the page, its language, and why it is not run, if so."""

    line: int
    language: str
    text: str
    not_run: str | None


@dataclass(frozen=True, slots=True)
class Line:
    """A command, and the exit code that the page promises."""

    text: str
    code: int


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found = []
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        reason = NOT_RUN.search(before)
        found.append(Block(before.count("\n") + 1, match[2], match[3], reason[1] if reason else None))
    return found


def files(text: str) -> dict[str, str]:
    """Names that a page takes for granted, and the files of the repository that stand for them."""
    return dict(part.strip().split("=") for match in FILES.findall(text) for part in match.split(","))


def lines(block: Block) -> Iterator[Line]:
    """The commands of a ``bash`` block: continued lines joined, comments left out."""
    for line in block.text.replace("\\\n", " ").splitlines():
        code = CODE.search(line)
        words = shlex.split(line, comments=True)
        if words:
            yield Line(line.strip(), int(code[1]) if code else 0)


def run(text: str) -> int:
    """Run the blocks of a page in the current folder; give the number of commands that ran."""
    count = 0
    for block in blocks(text):
        if block.not_run or block.language not in ("bash", "python", "toml"):
            continue
        if block.language != "bash":
            _file_or_code(block)
            continue
        for line in lines(block):
            code = _command(line.text)
            assert code == line.code, f"line {block.line}: {line.text!r} ended with {code}, not {line.code}"
            count += 1
    return count


def _file_or_code(block: Block) -> None:
    name = re.match(rf"# (\S+\.{ENDINGS[block.language]})\b.*\n", block.text)
    if name:
        Path(name[1]).parent.mkdir(parents=True, exist_ok=True)
        Path(name[1]).write_text(block.text, encoding="utf-8")
    elif block.language == "python":
        exec(compile(block.text, f"line {block.line}", "exec"), {"__name__": "example"})


def _command(text: str) -> int:
    first, also, rest = text.partition(" && ")
    if also and not SHELL.search(first):
        return _command(first) or _command(rest)
    words = shlex.split(text, comments=True)
    if SHELL.search(text.partition(" #")[0]):
        return _shell(text)
    if words[0] == "gopt":
        return main(words[1:])
    if words[0] == "cd":
        os.chdir(words[1])
        return 0
    if words[0] == "python" and len(words) == 2 and words[1].endswith(".py"):
        runpy.run_path(words[1], run_name="__main__")
        return 0
    return _shell(text)


def _shell(text: str) -> int:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", text], env={**os.environ, "PATH": path}, capture_output=True)
    sys.stderr.write(done.stderr.decode(errors="replace"))
    return done.returncode
