"""The user's server map: entries that assign a tensor, or one of the pieces, to a server.

An entry is ``TENSOR = SERVER`` or ``TENSOR#PIECE = SERVER``. TENSOR is a name, or a pattern with ``*``, ``?`` and
``[...]``; the name of a tensor is never read as a pattern. The first entry matching a piece counts. An entry without
effect is refused, because it is a mistake.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Annotated

from gopt import documents
from gopt.documents.records import Count
from gopt.errors import InputError, OptionError
from gopt.text.sanitize import listed, show
from gopt.text.suggestions import did_you_mean, near_file

Tensors = Mapping[str, frozenset[int]]
"""Tensor -> its pieces' numbers."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry: ``name`` or ``pattern`` of tensors, and ``index`` of a piece (None: all)."""

    text: str
    server: int
    name: str
    pattern: re.Pattern[str] | None
    index: int | None

    def fits(self, tensor: str) -> bool:
        return self.name == tensor if self.pattern is None else self.pattern.match(tensor) is not None


def assigned(pieces: Sequence[tuple[str, int]], servers: int, server_map: Mapping[str, int]) -> dict[int, int]:
    """Return index of each piece ``(tensor, index)`` that the map names -> its server; raises OptionError.

    Takes time linear in pieces and entries, and in tensors x entries for patterns.
    """
    if not server_map:
        return {}
    indices: dict[str, set[int]] = {}
    for tensor, index in pieces:
        indices.setdefault(tensor, set()).add(index)
    tensors = {tensor: frozenset(numbers) for tensor, numbers in indices.items()}
    entries = [_read(text, server, servers, tensors) for text, server in server_map.items()]
    entry_of = _first_fits(pieces, entries, tensors)
    used = set(entry_of.values())
    for number, entry in enumerate(entries):
        if number not in used:
            raise _useless(entry, tensors)
    return {position: entries[number].server for position, number in entry_of.items()}


def _read(text: str, server: int, servers: int, tensors: Tensors) -> _Entry:
    if not 0 <= server < servers:
        range_text = f"there are servers 0 to {servers - 1}" if servers > 1 else "there is server 0 alone"
        raise OptionError(
            f"the server map puts {show(text)} on server {show(server)}; {range_text}", "number servers from 0"
        )
    piece = re.fullmatch(r"(.+)#([0-9]{1,9})", text, re.DOTALL)
    if piece is None:
        return _entry(text, server, text, None, tensors)
    part = _entry(text, server, piece[1], int(piece[2]), tensors)
    if text not in tensors:
        return part
    tensor = next((name for name in _fitting(part, tensors) if part.index in tensors[name]), None)
    if tensor is not None:
        for_piece = f", or {_as_pattern(piece[1])}#{piece[2]} for the piece" if part.pattern is None else ""
        raise OptionError(
            f"the server map names {show(text)}, which is a tensor, and piece {part.index} of {show(tensor)}",
            f"write {glob.escape(piece[1])}[#]{piece[2]} for the tensor{for_piece}",
        )
    return _entry(text, server, text, None, tensors)


def _as_pattern(name: str) -> str:
    """Return a pattern that matches only a name, and is not the name."""
    letter = glob.escape(name[0])
    return (f"[{letter}]" if letter == name[0] else letter) + glob.escape(name[1:])


def _entry(text: str, server: int, name: str, index: int | None, tensors: Tensors) -> _Entry:
    plain = name in tensors or not set("*?[") & set(name)
    return _Entry(text, server, name, None if plain else re.compile(translate(name)), index)


def _first_fits(pieces: Sequence[tuple[str, int]], entries: Sequence[_Entry], tensors: Tensors) -> dict[int, int]:
    """Return index of each piece an entry matches -> the number of the first such entry."""
    names: dict[tuple[str, int | None], int] = {}
    for number, entry in enumerate(entries):
        if entry.pattern is None:
            names.setdefault((entry.name, entry.index), number)
    patterns = [(number, entry) for number, entry in enumerate(entries) if entry.pattern is not None]
    by_tensor = {tensor: [(number, entry) for number, entry in patterns if entry.fits(tensor)] for tensor in tensors}
    entry_of: dict[int, int] = {}
    for position, (tensor, index) in enumerate(pieces):
        numbers = [number for number, entry in by_tensor[tensor] if entry.index in (None, index)]
        numbers += [names[key] for key in ((tensor, None), (tensor, index)) if key in names]
        if numbers:
            entry_of[position] = min(numbers)
    return entry_of


def _fitting(entry: _Entry, tensors: Tensors) -> Iterable[str]:
    """Return the tensors an entry matches."""
    if entry.pattern is None:
        return (entry.name,) if entry.name in tensors else ()
    return (tensor for tensor in tensors if entry.fits(tensor))


def _useless(entry: _Entry, tensors: Tensors) -> OptionError:
    """Return the error for an entry without effect."""
    fitting = list(_fitting(entry, tensors))
    if not fitting:
        return OptionError(f"the server map names {show(entry.text)}, which matches no tensor", _known(entry, tensors))
    if entry.index is not None and not any(entry.index in tensors[name] for name in fitting):
        most = max(fitting, key=lambda name: max(tensors[name]))
        has = f"pieces 0 to {max(tensors[most])}" if max(tensors[most]) else "one piece, 0"
        return OptionError(
            f"the server map names piece {entry.index} of {show(most)}, which has {has}",
            "number pieces from 0, or leave out #PIECE for all",
        )
    return OptionError(
        f"the server map's entry {show(entry.text)} has no effect: earlier entries match all that it matches",
        "put it before them, or leave it out",
    )


def _known(entry: _Entry, tensors: Tensors) -> str:
    if (hint := did_you_mean(entry.name, tensors)) is not None:
        return hint
    return f"there are {listed([*map(show, tensors)], _LISTED)}"


_LISTED = 5
"""Most tensors that a hint lists."""


ServerMap = Annotated[
    Mapping[str, Count],
    "The server map is a TOML or JSON file that says which server owns which parameters, for gopt split --server-map. "
    "The key is a parameter, a pattern of such names, or one of these with # and the number of a piece, and the value "
    "is the number of its server; the first key that fits a piece decides.",
]


def read_server_map(path: str | os.PathLike[str]) -> dict[str, int]:
    """Read a server map from a TOML or JSON file: entry -> server, in the file's order.

    Raises OptionError where its name has neither suffix, InputError where there is no such file or the content is no
    server map.
    """
    name = os.fspath(path)
    if not os.path.exists(name):
        raise InputError(f"there is no server map {name}", *near_file(name))
    if name.endswith(".json"):
        return documents.read_json(name, documents.SERVERS)
    if not name.endswith(".toml"):
        raise OptionError(f"--server-map {name} is neither TOML nor JSON by its name", "call it .toml or .json")
    try:
        return documents.read_toml(name, documents.SERVERS)
    except InputError as error:
        raise InputError(error.message, *error.hints, 'quote keys that have dots: "fc1.weight" = 0') from None
