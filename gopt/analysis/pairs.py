"""Update pairs: which graph output replaces which graph input, by data flow alone.

A state's new value is computed element by element from its old one. Walking back from an output through
elementwise operators of its own shape reaches the states its update reads: Adam's new first moment reaches that
moment alone, the new parameter reaches all three. What is left open after settling the forced pairs goes to the
assignment with the shortest paths, which must be the only one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import permutations

from gopt.analysis.operators import elementwise
from gopt.analysis.sweeps import Index
from gopt.errors import UnsupportedError

MAX_OPEN = 6
"""Largest group of outputs that read the same states whose assignments are all tried."""


def reachable_states(index: Index, output: str, candidates: set[str]) -> dict[str, int]:
    """Candidates of the output's type that its elementwise slice reads -> length of the shortest path."""
    types = index.graph.types
    want = types.get(output)
    if want is None or want.shape is None:
        return {}
    found: dict[str, int] = {}
    seen = {output}
    queue = deque([(output, 0)])
    while queue:
        name, depth = queue.popleft()
        if name in candidates:
            if types[name] == want:
                found.setdefault(name, depth)
            continue
        node = index.producer.get(name)
        if node is None or not elementwise(node):
            continue
        for operand in node.inputs:
            type = types.get(operand)
            if operand and operand not in seen and type is not None and type.shape == want.shape:
                seen.add(operand)
                queue.append((operand, depth + 1))
    return found


def match(reach: dict[str, dict[str, int]]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Pair outputs with inputs: ``reach`` is output -> {input: distance}.

    Returns the pairs (output -> input) and what stays open (output -> its candidates). Every forced choice is taken
    first; a remaining group is settled when exactly one assignment has the least total distance.
    """
    pairs: dict[str, str] = {}
    open_ = {output: dict(found) for output, found in reach.items() if found}
    users: dict[str, set[str]] = {}
    for output, found in open_.items():
        for name in found:
            users.setdefault(name, set()).add(output)
    forced = deque(output for output, found in open_.items() if len(found) == 1)
    while forced:
        output = forced.popleft()
        if output not in open_ or len(open_[output]) != 1:
            continue
        (name,) = open_.pop(output)
        pairs[output] = name
        for other in sorted(users[name] & open_.keys()):
            open_[other].pop(name, None)
            if len(open_[other]) == 1:
                forced.append(other)
    unsettled: dict[str, list[str]] = {}
    for group in _groups(open_):
        best = _shortest(group, open_)
        if best is None:
            unsettled.update({output: sorted(open_[output]) for output in group})
        else:
            pairs.update(best)
    return pairs, unsettled


def _groups(open_: dict[str, dict[str, int]]) -> Iterable[list[str]]:
    """Outputs that compete for the same inputs, as connected components."""
    by_input: dict[str, list[str]] = {}
    for output, found in open_.items():
        for name in found:
            by_input.setdefault(name, []).append(output)
    seen: set[str] = set()
    for start in open_:
        if start in seen or not open_[start]:
            continue
        group, stack = [], [start]
        seen.add(start)
        while stack:
            output = stack.pop()
            group.append(output)
            for name in open_[output]:
                for other in by_input.pop(name, ()):
                    if other not in seen:
                        seen.add(other)
                        stack.append(other)
        yield group


def _shortest(group: list[str], open_: dict[str, dict[str, int]]) -> dict[str, str] | None:
    names = sorted({name for output in group for name in open_[output]})
    if len(group) > MAX_OPEN or len(names) < len(group) or len(names) > MAX_OPEN:
        return None
    ranked: list[tuple[int, tuple[str, ...]]] = []
    for choice in permutations(names, len(group)):
        if all(name in open_[output] for output, name in zip(group, choice)):
            ranked.append((sum(open_[output][name] for output, name in zip(group, choice)), choice))
    ranked.sort()
    if not ranked or (len(ranked) > 1 and ranked[0][0] == ranked[1][0]):
        return None
    return dict(zip(group, ranked[0][1]))


def refuse_dynamic(index: Index, pairs: dict[str, str]) -> None:
    """Raise when a state's shape is not known: its elements cannot be shared out."""
    for name in pairs.values():
        type = index.graph.types[name]
        if not type.static:
            raise UnsupportedError(
                f"state {name!r} has the dynamic shape {type}: its elements cannot be shared out",
                "export the step with static shapes for parameters and states",
            )


def refuse_open(unsettled: dict[str, list[str]]) -> None:
    """Raise when an output could replace several inputs; names it and the option that settles it."""
    for output, names in unsettled.items():
        shown = ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        raise UnsupportedError(
            f"output {output!r} may replace any of {shown}: the data flow does not say which",
            f"name the pair: --states {names[0]}={output}",
        )
