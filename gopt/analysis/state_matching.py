"""Update pairs: the graph input replaced by each graph output, by data flow alone.

A state's new value is computed element by element from the old value. Walking back from an output through elementwise
operators of the output's shape reaches the states of the update: Adam's new first moment reaches that moment alone, the
new parameter reaches all three. After the forced pairs, open pairs go to the assignment with the shortest paths, which
must be unique."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import permutations

import numpy as np

from gopt.analysis.name_hints import one_of_two, propose
from gopt.analysis.open_pairs import OpenPairsError
from gopt.analysis.role_hints import others
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, ancestors, copied_from
from gopt.ir.node_kinds import chosen_by, in_proportion
from gopt.ir.tensor import Tensor
from gopt.ir.types import numpy_dtype
from gopt.operators.kinds import CASTS, ELEMENTWISE, SCALES
from gopt.text.sanitize import listed

JOIN_COST = 1 << 10
"""By how much a path is longer for each node that joins values of the state's shape: scaling and casting join none."""
FACTOR_COST = 1 << 20
"""By how much a path through a factor is longer than any other."""
FLAG_COST = 1 << 40
"""By how much a path through a comparison is longer: Rprop keeps a gradient, or zero where its old sign differs."""
DOUBT_COST = 1 << 60
"""The same for one element, where a threshold looks like an old value: such a path settles nothing."""
MAX_GROUP = 6
"""Largest group of outputs that read the same states whose assignments are all tried."""


def reachable_states(
    index: GraphIndex, output: str, candidates: set[str], moving: AbstractSet[str] = frozenset()
) -> dict[str, int]:
    """Candidates of the output's type in the output's elementwise slice -> length of the shortest path."""
    return dict(walk_to_states(index, output, candidates, moving))


def reaches(
    index: GraphIndex, output: str, name: str, candidates: set[str], moving: AbstractSet[str] = frozenset()
) -> bool:
    """Return whether the walk from an output meets ``name``, a candidate; the walk stops at other candidates."""
    return any(state == name for state, _ in walk_to_states(index, output, candidates, moving))


def only_by_way_of(
    index: GraphIndex, output: str, name: str, values: set[str], moving: AbstractSet[str] = frozenset()
) -> bool:
    """Return whether an output is made of an input element by element, and only by way of ``values``; ``values`` is as
    before afterwards: one set for all outputs, since it has the size of a step."""
    values.add(name)
    beside = reaches(index, output, name, values, moving)
    values.remove(name)
    return not beside and reaches(index, output, name, {name}, moving)


def walk_to_states(
    index: GraphIndex, output: str, candidates: set[str], moving: AbstractSet[str] = frozenset()
) -> Iterator[tuple[str, int]]:
    """Each candidate of the output's type in the output's elementwise slice, with the length of the shortest path.

    A path that enters a product beside a value of ``moving``, the batch-dependent values, counts as longer: a factor of
    the update, such as a pruning mask or a learning rate, is no old value. Longest are paths through flags. For one
    element a flag must choose a batch-dependent value: a count of skipped steps replaces no bound."""
    types = index.graph.types
    want = types.get(output)
    if want is None or want.shape is None:
        return
    visited: set[str] = set()
    producers, type_of, shape = index.producers, types.get, want.shape
    queues: tuple[list[tuple[str, int]], ...] = [(output, 0)], [], []
    for kind, queue in enumerate(queues):
        for name, depth in queue:  # which grows meanwhile
            if name in visited:
                continue
            visited.add(name)
            if name in candidates:
                if types[name] == want:
                    yield name, depth
                continue
            node = producers.get(name)
            if node is None or not node.is_in(ELEMENTWISE):
                continue
            alike = [
                (name, type)
                for name in node.inputs
                if (type := type_of(name)) is not None and (type is want or type.shape == shape)
            ]
            further = depth + 1 + JOIN_COST * (len(alike) > 1)
            scaling = kind == 0 and node.op_type in SCALES
            for operand, type in alike:
                if type is not want and type.dtype == "bool" != want.dtype:
                    if want.elements > 1:
                        queues[2].append((operand, max(depth, FLAG_COST)))
                    elif not moving.isdisjoint(chosen_by(node)):
                        queues[2].append((operand, max(depth, DOUBT_COST)))
                elif scaling and _scales(node, operand, moving):
                    queues[1].append((operand, further + FACTOR_COST))
                else:
                    queue.append((operand, further))


def _scales(node: Node, operand: str, moving: AbstractSet[str]) -> bool:
    """Return whether an operand of a product or quotient is a factor of a batch-dependent value, or a divisor."""
    beside = [name for name in node.inputs if name != operand and name in moving]
    return not in_proportion(node, operand) or any(in_proportion(node, name) for name in beside)


def match_states(reach: dict[str, dict[str, int]]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Pair outputs with inputs: ``reach`` is output -> {input: distance}.

    Returns the pairs (output -> input) and the open outputs (output -> candidates). Every forced choice is taken first;
    a remaining group is settled when exactly one assignment has the least total distance."""
    pairs: dict[str, str] = {}
    unmatched = {output: dict(depths) for output, depths in reach.items() if depths}
    _match_forced(unmatched, pairs)
    for output, reachable in unmatched.items():
        # A factor is not an old value where there is another candidate.
        added = {name: depth for name, depth in reachable.items() if depth < FACTOR_COST}
        unmatched[output] = added or reachable
    _match_forced(unmatched, pairs)
    paired = {*pairs.values()}
    for output, reachable in unmatched.items():
        if not reachable:  # others took what is added to it: a factor it is
            factors = ((name, depth) for name, depth in reach[output].items() if name not in paired)
            unmatched[output] = {name: depth for name, depth in factors if depth < FLAG_COST}
    _match_forced(unmatched, pairs)
    unsettled: dict[str, list[str]] = {}
    for output, reachable in list(unmatched.items()):
        if max(reachable.values(), default=0) >= FLAG_COST:
            unsettled[output] = sorted(unmatched.pop(output))  # a flag or a factor: neither is nearer to an old value
    for group in _groups(unmatched):
        best = _nearest(group, unmatched) if len(group) > MAX_GROUP else _shortest(group, unmatched)
        if best is None:
            unsettled.update({output: sorted(unmatched[output]) for output in group})
        else:
            pairs.update(best)
    return pairs, unsettled


def _match_forced(unmatched: dict[str, dict[str, int]], pairs: dict[str, str]) -> None:
    """Settle every output with one remaining candidate, and the consequences; ``unmatched`` loses settled outputs."""
    users: dict[str, set[str]] = {}
    for output, depths in unmatched.items():
        for name in depths:
            users.setdefault(name, set()).add(output)
    forced = deque(output for output, depths in unmatched.items() if len(depths) == 1)
    while forced:
        output = forced.popleft()
        if output not in unmatched or len(unmatched[output]) != 1 or min(unmatched[output].values()) >= DOUBT_COST:
            continue
        (name,) = unmatched[output]
        rivals = [output for output in users[name] if len(unmatched.get(output, ())) == 1]
        if len(rivals) > 1:  # the nearest, in whatever order the file lists them
            output = min(rivals, key=lambda rival: (unmatched[rival][name], rival))
        del unmatched[output]
        pairs[output] = name
        for competitor in sorted(users[name] & unmatched.keys()):
            unmatched[competitor].pop(name, None)
            if len(unmatched[competitor]) == 1:
                forced.append(competitor)


def _groups(unmatched: dict[str, dict[str, int]]) -> Iterable[list[str]]:
    """Outputs that compete for the same inputs, as connected components."""
    by_input: dict[str, list[str]] = {}
    for output, depths in unmatched.items():
        for name in depths:
            by_input.setdefault(name, []).append(output)
    visited: set[str] = set()
    for start in unmatched:
        if start in visited or not unmatched[start]:
            continue
        group, stack = [], [start]
        visited.add(start)
        while stack:
            output = stack.pop()
            group.append(output)
            for name in unmatched[output]:
                for competitor in by_input.pop(name, ()):
                    if competitor not in visited:
                        visited.add(competitor)
                        stack.append(competitor)
        yield group


def _nearest(group: list[str], unmatched: dict[str, dict[str, int]]) -> dict[str, str] | None:
    """The assignment of a large group in which each output and input are mutually nearest, if any."""
    ways: dict[str, list[tuple[int, str]]] = {}
    for output in group:
        for name, depth in unmatched[output].items():
            ways.setdefault(name, []).append((depth, output))
    nearest = {name: _alone(entries) for name, entries in ways.items()}
    chosen = {output: _alone([(depth, name) for name, depth in unmatched[output].items()]) for output in group}
    return chosen if all(nearest.get(name) == output for output, name in chosen.items()) else None


def _alone(entries: list[tuple[int, str]]) -> str:
    """The nearest; nothing where two are equally near."""
    depths = sorted(entries)
    return "" if len(depths) > 1 and depths[0][0] == depths[1][0] else depths[0][1]


def _shortest(group: list[str], unmatched: dict[str, dict[str, int]]) -> dict[str, str] | None:
    names = sorted({name for output in group for name in unmatched[output]})
    if len(group) > MAX_GROUP or len(names) < len(group) or len(names) > MAX_GROUP:
        return None
    ranked: list[tuple[int, tuple[str, ...]]] = []
    for choice in permutations(names, len(group)):
        if all(name in unmatched[output] for output, name in zip(group, choice)):
            ranked.append((sum(unmatched[output][name] for output, name in zip(group, choice)), choice))
    ranked.sort()
    if not ranked or (len(ranked) > 1 and ranked[0][0] == ranked[1][0]):
        return None
    return dict(zip(group, ranked[0][1]))


def refuse_crossed(index: GraphIndex, reach: dict[str, dict[str, int]], pairs: dict[str, str]) -> None:
    """Raise when an output was given a state that is nearer to another output, paired with a state further away.

    A state made anew in each step reads no old value of its own. The walk then finds the parameter read by the update,
    and leaves the state to the parameter."""
    nearest: dict[str, tuple[int, str]] = {}
    for output, depths in reach.items():
        for name, depth in depths.items() if output in pairs else ():
            if depth // JOIN_COST < depths[pairs[output]] // JOIN_COST:
                nearest[name] = min(nearest.get(name, (depth, output)), (depth, output))
    for output, name in pairs.items():
        depth, nearer = nearest.get(name, (FACTOR_COST, ""))
        if nearer not in ("", output) and depth // JOIN_COST <= reach[output][name] // JOIN_COST:
            refuse_open(index, {nearer: sorted({name, pairs[nearer]})})


def refuse_displaced(index: GraphIndex, reach: Mapping[str, Mapping[str, int]], pairs: Mapping[str, str]) -> None:
    """Raise when an output was given an added state, while a factor of the output stays without a new value, and an
    output of the same type upstream replaces nothing: a relative step by a gradient that a state keeps."""
    types, paired = index.graph.types, set(pairs.values())
    unsettled: dict[str, list[str]] = {}
    for output, name in pairs.items():
        factors = [factor for factor in reach.get(output, ()) if factor not in paired]
        behind = ancestors(index, [output])[1] if factors else set[str]()
        rivals = [end for end in index.graph.outputs if end in behind - pairs.keys() and types[end] == types[name]]
        if rivals:
            unsettled[output] = [*factors, name]
            unsettled |= {rival: [name] for rival in rivals}
    refuse_open(index, unsettled)


def refuse_contested(index: GraphIndex, reach: dict[str, dict[str, int]], pairs: dict[str, str]) -> None:
    """Raise when outputs compete for one equally near input: a rate from which each is made anew."""
    claims = {name: (output, reach[output][name]) for output, name in pairs.items()}
    for contender, depths in reach.items():
        if contender in pairs or not depths:
            continue
        name = min(depths, key=lambda state: depths[state])
        if claims.get(name, ("", -1))[1] == depths[name]:
            raise one_of_two(index.graph, {name: (claims[name][0], contender)})


def match_copies(index: GraphIndex, pairs: dict[str, str], free: set[str]) -> dict[str, str]:
    """Outputs that are casts of a paired new value -> the replaced input of the same type.

    A low-precision parameter beside a master copy: the update reads no old value of the parameter. The input is the
    only input of the type, or the only input whose stored value is the cast of the stored master. Raises
    UnsupportedError when several are left."""
    graph = index.graph
    casts: dict[str, Node] = {}
    for output in graph.outputs:
        node = None if output in pairs else index.producers.get(copied_from(index, output))
        if node is not None and node.is_in(CASTS):
            casts[output] = node
    root = {copied_from(index, output): name for output, name in pairs.items()} if casts else {}
    master_of: dict[str, str] = {}
    for output, node in casts.items():
        master = root.get(copied_from(index, node.inputs[0]))
        if master is not None and graph.types[output].shape == graph.types[master].shape:
            master_of[output] = master
    copies: dict[str, str] = {}
    by_type: dict[object, tuple[list[str], list[str]]] = {}
    for output in master_of:
        by_type.setdefault(graph.types[output], ([], []))[0].append(output)
    for name in graph.inputs:
        if name in free and graph.types[name] in by_type:
            by_type[graph.types[name]][1].append(name)
    for outputs, inputs in by_type.values():
        if len(outputs) == len(inputs) == 1:
            copies[outputs[0]] = inputs[0]
        elif inputs:
            copies |= _by_value(index, {output: master_of[output] for output in outputs}, inputs)
    return copies


def _by_value(index: GraphIndex, master_of: dict[str, str], inputs: list[str]) -> dict[str, str]:
    graph = index.graph
    stored: dict[bytes, list[str]] = {}
    for name in inputs:
        if name in graph.initializers:
            stored.setdefault(_bytes(graph.initializers[name], graph.types[name].dtype), []).append(name)
    pairs: dict[str, str] = {}
    paired: set[str] = set()
    for output, master in master_of.items():
        tensor = graph.initializers.get(master)
        names = stored.get(_bytes(tensor, graph.types[output].dtype), []) if tensor is not None else []
        if len(names) != 1 or names[0] in paired:
            refuse_open(index, {output: names or inputs})
        pairs[output] = names[0]
        paired.add(names[0])
    return pairs


def _bytes(tensor: Tensor, dtype: str) -> bytes:
    """A stored value in the bytes of the dtype."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(tensor.numpy()).astype(numpy_dtype(dtype)).tobytes()


def refuse_open(index: GraphIndex, unsettled: Mapping[str, Sequence[str]], *hints: str) -> None:
    """Raise when outputs could replace several inputs, or at most one; ``unsettled``: output -> inputs; ``hints``
    beside those for pairs."""
    if not unsettled:
        return
    output, names = next(iter(unsettled.items()))
    shown = listed([*map(repr, names)], 6)
    may = f"replace any of {shown}" if len(names) > 1 else f"be the new value of {shown}, or shown alone"
    raise OpenPairsError(
        f"output {output!r}{others(len(unsettled) - 1, 'output')} may {may}: the data flow does not say which",
        propose(index.graph, unsettled),
        *hints,
        shown=unsettled,
    )
