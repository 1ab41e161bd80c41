"""Options that hints propose, with all the names that they are needed for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice

MOST = 8
"""Names that a hint spells out."""


def states_option(pairs: Mapping[str, str]) -> str:
    """``--states m=m_new,v=v_new``; ``pairs``: input -> output, at least one."""
    return _listed("--states", [f"{name}={output}" for name, output in islice(pairs.items(), MOST)], len(pairs))


def batch_option(names: Collection[str]) -> str:
    """``--batch x,mask``; at least one name."""
    return _listed("--batch", list(islice(names, MOST)), len(names))


def others(count: int, what: str) -> str:
    """`` (and 3 other states)``; nothing where there is no other."""
    return f" (and {count} other {what}{'s' * (count > 1)})" if count else ""


def _listed(option: str, named: list[str], count: int) -> str:
    more = count - len(named)
    return f"{option} {','.join(named)}" + (f" and so on for {more} more" if more else "")
