"""Write docs/api.md from the docstrings: ``python docs/api.py``."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path

import gopt

PAGE = Path(__file__).parent / "api.md"
VERBS = (
    "load", "shard", "split", "prove", "check_certificate", "verify", "run", "inspect", "explain", "report", "diff",
    "plan", "calibrate", "merge", "provenance", "save_state_dict", "reshard", "seal",
    "unchecked", "export", "derive", "import_step",
    "golden_update", "golden_check",
)  # fmt: skip
OPTIONS = ("ShardOptions", "Auto", "SplitOptions", "DeriveOptions", "VerifyOptions", "RunOptions")
OBJECTS = ("Source", "Sharded", "Split", "Mesh", "Plan", "Run")
ERRORS = ("GoptError", "InputError", "OptionError", "UnsupportedError", "RunError", "InvariantError", "StoppedError")
INTRO = """\
# Python

Every verb of the command line is a function of `gopt`. `python docs/api.py` writes this page from the docstrings; a
test runs the examples, with `fixtures/` in the working folder and NumPy as `np`. Results have a short `repr`, and in a
notebook they show as a table:

![Results in a notebook](pictures/notebook.webp)
"""


RECORDS = """\
Each is a frozen record. `shard`, `verify` and `run` take their options as a record, as keywords of its fields, or as
both: keywords go before the record. `split` and `auto=` take the record.
"""


def page() -> str:
    """The page as it should stand in docs/api.md."""
    parts = [INTRO, "## Verbs\n"]
    parts += [f"### gopt.{name}\n\n```python\n{signature(name)}\n```\n\n{text(name)}\n" for name in VERBS]
    parts += ["## Options\n", RECORDS]
    parts += [f"### gopt.{name}\n\n{text(name)}\n\n```python\n{fields_of(name)}\n```\n" for name in OPTIONS]
    parts += ["## Objects\n"]
    parts += [f"### gopt.{name}\n\n{text(name)}\n\n{members(name)}" for name in OBJECTS]
    parts += ["## Errors\n"]
    parts += [f"- `gopt.{name}`: {text(name).splitlines()[0]}" for name in ERRORS]
    return "\n".join(parts) + "\n"


def fields_of(name: str) -> str:
    """The fields of a record, a line each."""
    lines = []
    for each in fields(getattr(gopt, name)):
        usual = each.default
        if usual is MISSING and each.default_factory is not MISSING:
            usual = each.default_factory()
        shown = "" if usual is MISSING else f" = {str(usual.value)!r}" if isinstance(usual, Enum) else f" = {usual!r}"
        lines.append(f"{each.name}: {each.type}{shown}")
    return "\n".join(lines)


def signature(name: str) -> str:
    """``name(parameters) -> result``, a parameter a line where they are many."""
    found = inspect.signature(getattr(gopt, name))
    plain = [each.replace(default=default(each.default)) for each in found.parameters.values()]
    found = found.replace(parameters=plain)
    line = f"{name}{found}".replace("'", "")
    if len(line) <= 100:
        return line
    lines, keyword = [], False
    for each in found.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not keyword:
            lines, keyword = [*lines, "*"], True
        lines.append(str(each).replace("'", ""))
    return f"{name}(\n{''.join(f'    {each},{chr(10)}' for each in lines)}) -> {found.return_annotation}"


class Shown:
    """Text that stands for a default."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def default(value: object) -> object:
    """A default as the page shows it: ``...`` for what has no short text of its own."""
    if isinstance(value, str):
        return Shown(f'"{value}"')
    plain = value is inspect.Parameter.empty or value is None or isinstance(value, bool | int | float)
    return value if plain else Shown("...")


def text(name: str) -> str:
    """The docstring in Markdown: examples as blocks of code, names in single backquotes."""
    blocks = (inspect.getdoc(getattr(gopt, name)) or "").replace("``", "`").split("\n\n")
    shown = []
    for block in blocks:
        if block.startswith(">>>"):
            shown.append(f"```python\n{block.replace('  # doctest: +SKIP', '')}\n```")
        else:
            shown.append(textwrap.fill(" ".join(block.split()), 120, break_long_words=False, break_on_hyphens=False))
    return "\n\n".join(shown)


def members(name: str) -> str:
    """Public methods and properties that have a docstring, with its first line."""
    kinds = property | classmethod | staticmethod | type(page)
    found = [
        (key, (inspect.getdoc(each) or "").split("\n\n")[0].replace("``", "`"))
        for key, each in vars(getattr(gopt, name)).items()
        if not key.startswith("_") and key != "html_rows" and isinstance(each, kinds)
    ]
    return "".join(f"- `{key}`: {' '.join(told.split())}\n" for key, told in found if told)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
