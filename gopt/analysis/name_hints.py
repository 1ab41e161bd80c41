"""Pairs of inputs and outputs by name: a hint, never a proof.

Two sequences of one shape may exchange roles in the data flow: the average of a parameter and the second sequence of
Nesterov's method are alike, with one made of the other's new value. Where the names of all states and of their new
values follow one rule, such as ``NAME_out``, and the data flow gives other pairs, neither is taken for granted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from gopt.analysis.open_pairs import OpenPairsError
from gopt.analysis.role_hints import others
from gopt.analysis.role_map import RoleMap
from gopt.ir.graph import Graph
from gopt.ir.graph_index import GraphIndex

_LOOKED_AT = 16
"""Outputs in whose names a rule is looked for."""
_TRIED = 4
"""Rules that are held against all names."""
_NEW = frozenset(["out", "output", "new", "next", "updated", "upd", "'"])
"""Words that name a new value, beside the name of the old one."""
_BETWEEN = "._-/:"


def pairs_by_name(graph: Graph) -> dict[str, str]:
    """Input -> output of the same type and with the same name plus one affix, by the affix with the most such pairs."""
    best: dict[str, str] = {}
    for before, behind in _rules(graph):
        pairs = {
            name: output for name, type in graph.inputs.items()
            if (output := f"{before}{name}{behind}") in graph.outputs and graph.types.get(output) == type
        }  # fmt: skip
        if len(pairs) > len(best):
            best = pairs
    return best


def refuse_contradicted(index: GraphIndex, pairs: Mapping[str, str], roles: RoleMap) -> None:
    """Raise UnsupportedError where the names of all states pair them with other outputs than the data flow does.

    ``pairs``: output -> input. Pairs named by the user are not asked for."""
    named_states = set(roles.states)
    flows = {name: output for output, name in pairs.items() if name not in named_states}
    named = pairs_by_name(index.graph)
    if not flows.keys() <= named.keys():
        return
    open_ = {name: named[name] for name, output in flows.items() if named[name] != output}
    rules = _rules(index.graph) if open_ else []
    if not open_ or any(all(f"{a}{name}{b}" == output for name, output in flows.items()) for a, b in rules):
        return  # another rule of the names agrees: what is shown beside states may have one, too
    name = next(iter(open_))
    raise OpenPairsError(
        f"the data flow pairs {name!r}{others(len(open_) - 1, 'state')} with output {flows[name]!r}, and the names of "
        f"all states pair it with {open_[name]!r}: neither is a proof",
        open_,
        instead={state: flows[state] for state in open_},
    )


@contextmanager
def names_first(index: GraphIndex, pairs: Mapping[str, str], roles: RoleMap) -> Iterator[None]:
    """Where the block asks for a pair contradicted by names, the refusal of all contradicted pairs comes first."""
    try:
        yield
    except OpenPairsError as error:
        owners = {output: name for name, output in pairs_by_name(index.graph).items()}
        if any(owners.get(output, name) != name for name, output in error.pairs.items()):
            refuse_contradicted(index, pairs, roles)
        raise


def says_new(name: str, output: str) -> bool:
    """Return whether the name of an output marks the new value of an input: ``w_out``, ``new_w``."""
    before, separator, behind = output.partition(name)
    affix = (before + behind).strip(_BETWEEN).lower()
    return bool(separator) and not (before and behind) and affix in _NEW


def one_of_two(graph: Graph, outputs: Mapping[str, tuple[str, str]]) -> OpenPairsError:
    """The refusal of a step in which two outputs may each be the new value of an input; the names choose between both,
    or else the first stands. ``outputs``: input -> both outputs; one answer settles all inputs."""
    named = pairs_by_name(graph)
    ordered = {name: both[::-1] if named.get(name) == both[1] else both for name, both in outputs.items()}
    name, (output, rival) = next(iter(outputs.items()))
    return OpenPairsError(
        f"outputs {output!r} and {rival!r} may each be the new value of {name!r}"
        f"{others(len(outputs) - 1, 'state')}: the data flow does not say which",
        {name: meant for name, (meant, _) in ordered.items()},
        shown=[rest for _, rest in ordered.values()],
    )


def propose(graph: Graph, candidates: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """A pair for each output of ``candidates``, output -> inputs: the pair by name, or the first free input."""
    named = pairs_by_name(graph)
    pairs = {
        name: output
        for output, names in candidates.items()
        for name in names
        if named.get(name) == output or says_new(name, output)
    }
    paired = set(pairs.values())
    for output, names in candidates.items():
        name = next((name for name in names if name not in pairs), "") if output not in paired else ""
        if name:
            pairs[name] = output
    return pairs


def _rules(graph: Graph) -> list[tuple[str, str]]:
    """Texts before and behind an input's name in names of outputs, the most frequent first."""
    counts: Counter[tuple[str, str]] = Counter()
    names = list(graph.outputs)
    for output in dict.fromkeys((*names[:_LOOKED_AT], *names[-_LOOKED_AT:])):
        for cut in range(1, len(output)):
            if output[:cut] in graph.inputs:
                counts["", output[cut:]] += 1
            if output[cut:] in graph.inputs:
                counts[output[:cut], ""] += 1
    return [rule for rule, _ in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))][:_TRIED]
