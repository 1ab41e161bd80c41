"""Annotations in GitHub beside the files of a pull request, and the error codes in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import click

from gopt.errors import GoptError, StoppedError
from gopt.text.sanitize import clean

DIFFERENCE, USAGE, SYSTEM, MEMORY, STOPPED, DEFECT = "G100", "G200", "G510", "G520", "G600", "G700"
"""Codes of what is no ``GoptError``: those have their own; ``gopt help errors`` lists all."""
_LONGEST = 4000
"""Characters of an annotation that GitHub shows without cutting them off."""


def format_option(function: click.decorators.FC) -> click.decorators.FC:
    """``--format``: text for people, or with annotations for GitHub behind it."""
    return click.option(
        "--format", "form", type=click.Choice(["text", "github"]), default="text", show_default=True,
        help="github: print annotations of a pull request behind the text.",
    )(function)  # fmt: skip


def is_asked(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for annotations, also for errors before the options are read."""
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return "--format=github" in arguments or ("--format", "github") in pairs


def code_of(error: BaseException) -> str:
    """The code of an error."""
    if isinstance(error, GoptError | StoppedError):
        return error.code
    if isinstance(error, click.ClickException):
        return USAGE
    if isinstance(error, MemoryError):
        return MEMORY
    return SYSTEM if isinstance(error, OSError) else DEFECT


def print_annotation(message: str, code: str, *, file: str = "", line: int = 0) -> None:
    """Print an annotation, of a file and a line if known."""
    location = "".join(f"{key}={_escaped(str(value))}," for key, value in (("file", file), ("line", line)) if value)
    text = clean(message)[:_LONGEST].replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    click.echo(f"::error {location}title=gopt {code}::{text}")


def print_golden_annotations(folder: str, differing: Mapping[str, Sequence[str]], names: Iterable[str]) -> None:
    """Print an annotation for each different golden, at the first different line, and for each other fault."""
    for name, lines in differing.items():
        header = next((line for line in lines if line.startswith("@@ -")), "@@ -1 ")
        start = int(header.removeprefix("@@ -").split(",")[0].split()[0])
        print_annotation("\n".join(lines[2:]), DIFFERENCE, file=f"{folder}/golden/{name}", line=start)
    for what in names:
        message = f"{what}; to accept: gopt golden update {folder}"
        print_annotation(message, DIFFERENCE, file=f"{folder}/gopt-golden.toml")


def _escaped(value: str) -> str:
    for sign, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A"), (":", "%3A"), (",", "%2C")):
        value = value.replace(sign, code)
    return value
