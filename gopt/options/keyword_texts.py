"""Options of commands as keywords of Python: messages name keywords for Python readers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

_OPTION = re.compile(
    r"""(?<![\w-])--(?P<name>[a-z][a-z0-9-]*)
    (?:[ =](?P<value>(?:\'[^\']*\'|[^\s;,()\'][^\s;()\']*?)(?=[.:,;]?(?:[\s);]|$))))?""",
    re.VERBOSE,
)
_COMMAND = re.compile(r"\bgopt [a-z]")
"""A command that a text tells to run has options, in Python too."""
_WORDS = {
    "auto", "batch", "dense", "dynamic", "first", "keep", "max", "mean", "min", "mpi", "nccl", "pass", "root", "second",
    "skip", "sum", "sync", "async", "geo", "local", "threads", "train", "warn",
}  # fmt: skip
"""Values that are plain words: others stand out by a capital, a digit or a sign."""
_FLAGS = {"force", "annotate", "json"}
"""Options that are told to give without a value."""


def keyword_text(text: str, known: Collection[str] = ()) -> str:
    """A message with options of commands as keywords: ``say --stage 3`` is ``say stage=3``. ``known``: the keywords of
    the function; other roles belong into a ``RoleMap``."""

    def clause(part: str) -> str:
        command = _COMMAND.search(part)
        end = command.start() if command else len(part)
        named = part[:end].replace(" with -o", "")
        return _OPTION.sub(lambda result: _keyword(result, known), named) + part[end:]

    return "; ".join(map(clause, text.split("; ")))


def _keyword(match: re.Match[str], names: Collection[str]) -> str:
    name, value = match["name"].replace("-", "_"), match["value"]
    rest = ""
    is_sentence = match.string[match.end() : match.end() + 1] == ":"  # as in "--loss x: the model has no output 'x'"
    if value is not None and not is_sentence and not _is_value(value):
        rest, value = match[0][match.start("value") - 1 - match.start() :], None
    if name == "ranks":
        name = "mesh"
    if name == "set":
        return f"settings={_table(value)}" if value is not None and "=" in value else f"settings{rest}"
    if value is None:
        return f"{name}=True{rest}" if name in _FLAGS else name + rest
    if name in _ROLES and name not in names:
        return f"roles=RoleMap({name}={_ROLES[name](value)})"
    return f"{name}={_written(value)}"


def _is_value(word: str) -> bool:
    return word in _WORDS or re.search(r"[A-Z0-9=:,'{/…]", word) is not None


def _written(value: str) -> str:
    """A value in Python's form: a number, or a quoted text; a name in capitals is a placeholder."""
    if re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?|[A-Z]+|'.*'", value):
        return value
    return f'"{value}"'


def _list(value: str) -> str:
    return f"[{', '.join(map(_quoted, value.split(',')))}]"


def _table(value: str) -> str:
    pairs = (part.partition("=") for part in value.split(","))
    return f"{{{', '.join(f'{_quoted(name)}: {_quoted(text)}' for name, _, text in pairs)}}}"


def _quoted(value: str) -> str:
    return value if value.startswith("'") else f'"{value}"'


_ROLES: Mapping[str, Callable[[str], str]] = {
    "loss": lambda value: _quoted(value), "params": _table, "states": _table, "batch": _list, "shared": _list,
}  # fmt: skip
"""Fields of ``RoleMap`` -> how they are written."""
