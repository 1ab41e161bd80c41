"""Text from files for display: no control characters, no endless lines. The only place with this rule."""

from __future__ import annotations

from collections.abc import Sequence

from gopt.limits import LINE, NAME


def show(value: object) -> str:
    """A name or value from a file for a message: quoted, on one line, and not endless."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"  # Python refuses to write out the longest
    text = repr(value[: 4 * NAME] if isinstance(value, str | bytes | list | tuple) else value)
    return text if len(text) <= NAME else f"{text[: NAME - 40]}…{text[-20:]}"


def show_path(path: str) -> str:
    """A path for a message: unchanged, or as in ``show`` if the path would not stay on its line."""
    return path if path.isprintable() else show(path)


def clean(text: str) -> str:
    """Text for a terminal: characters that would move the cursor, colour the text or turn the direction are escaped.
    Line breaks stay."""
    if text.isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else "    " if c == "\t" else _escape(c) for c in text)


def clean_line(text: str) -> str:
    """As ``clean``, with escaped line breaks too: a name of several lines stays on one line."""
    return clean(text).replace("\n", _escape("\n"))


def line(text: str) -> str:
    """Text as one line of an error or a note: clean, and at most ``limits.LINE`` bytes."""
    joined = clean(" ".join(text.split()))
    data = joined.encode("utf-8", "backslashreplace")
    if len(data) <= LINE - len(_GAP):
        return data.decode()
    half = (LINE - 2 * len(_GAP)) // 2
    return f"{data[:half].decode(errors='ignore')}{_GAP}{data[-half:].decode(errors='ignore')}"


_GAP = " […] "


def _escape(character: str) -> str:
    return repr(character)[1:-1]


def and_more(count: int) -> str:
    """The end of a list that is cut short: `` and 3 more``; empty for 0."""
    return f" and {count} more" if count > 0 else ""


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first names of a list, and how many are left: ``a, b and 3 more``."""
    return ", ".join(names[:most]) + and_more(len(names) - most)
