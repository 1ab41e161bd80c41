"""What a user says of parameters by name: ``*.qkv.weight:column;head*:replicate;table:dim0``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from gopt.analysis.training import TrainingGraph
from gopt.errors import OptionError
from gopt.ir.phase import Phase
from gopt.sharding.links import Slot, strategies
from gopt.sharding.placements import Partial, Shard
from gopt.tensor_parallel.choose import PRODUCTS, Choice
from gopt.tensor_parallel.operators import Constants, operator
from gopt.tensor_parallel.sizes import Sizes, part_sizes

WORDS = ("column", "row", "vocab", "expert", "replicate")
_DIM = re.compile(r"dim(\d+)(?:/(\d+))?")


@dataclass(frozen=True, slots=True)
class Pattern:
    """Parameters whose name fits ``glob``, and how they are split: a word, or ``dimN``; ``dimN/R``: in R runs."""

    glob: str
    word: str

    @classmethod
    def parse(cls, text: str) -> tuple[Pattern, ...]:
        """``up*:column;down*:row``; raises OptionError on anything else."""
        found = []
        for part in filter(None, (part.strip() for part in text.split(";"))):
            glob, colon, word = part.rpartition(":")
            if not colon or (word not in WORDS and _DIM.fullmatch(word) is None):
                raise OptionError(
                    f"tensor-parallel: cannot read {part!r} as a placement of some parameters",
                    f"write PATTERN:WORD, with {', '.join(WORDS)}, or dimN for dimension N (dimN/R in R equal runs)",
                )
            found.append(cls(glob, word))
        return tuple(found)


def apply(
    training: TrainingGraph, members: int, rule: Sizes, patterns: tuple[Pattern, ...], auto: Mapping[str, Choice]
) -> dict[str, Choice]:
    """The choices with what the user says in place of what was found; the first pattern that fits counts.

    Raises OptionError for a pattern that fits no parameter, and for one that a parameter cannot be split by.
    """
    found = dict(auto)
    names = [state.tensor for state in training.parameters]
    for each in patterns:
        if not any(fnmatchcase(name, each.glob) for name in names):
            close = get_close_matches(each.glob, names, 1)
            hint = f"did you mean {close[0]!r}?" if close else "see the parameters with gopt inspect"
            raise OptionError(f"tensor-parallel: {each.glob}:{each.word} fits no parameter", hint)
    for name in names:
        pattern = next((each for each in patterns if fnmatchcase(name, each.glob)), None)
        if pattern is None:
            continue
        if pattern.word == "replicate":
            found.pop(name, None)
        elif name not in auto or auto[name].why != pattern.word:  # what was found knows heads and runs
            found[name] = Choice(_placement(training, members, rule, name, pattern), f"asked for as {pattern.word}")
    return found


def _placement(training: TrainingGraph, members: int, rule: Sizes, name: str, pattern: Pattern) -> Shard:
    type = training.graph.types[name]
    exact = _DIM.fullmatch(pattern.word)
    runs = 1
    if exact is not None:
        dim, runs = int(exact[1]), int(exact[2] or 1)
    else:
        dim = 0 if pattern.word in ("vocab", "expert") or len(type.dims) == 1 else _product(training, name, pattern)
    if dim >= len(type.dims) or runs < 1 or type.dims[dim] % runs:
        raise OptionError(f"tensor-parallel: {pattern.glob}:{pattern.word} does not fit {name!r}, which is {type}")
    return Shard(dim, part_sizes(type.dims[dim] // runs, members, rule), runs)


def _product(training: TrainingGraph, name: str, pattern: Pattern) -> int:
    """The dimension of a weight that is the columns, or the rows, of the first product that reads it."""
    graph, constants = training.graph, Constants(training.graph)
    views = {name: {dim: Shard(dim, (size,)) for dim, size in enumerate(graph.types[name].dims)}}
    for node in (node for node in graph.nodes if node.phase is Phase.FORWARD):
        place = next((place for place, each in enumerate(node.inputs) if each in views), None)
        if place is None:
            continue
        described = operator(node, graph, constants)
        moved: dict[int, Shard] = {}
        for dim, shard in views[node.inputs[place]].items():
            result = next((each.results[0] for each in strategies(described, Slot(place), shard)), None)
            if result is not None and node.is_a(*PRODUCTS):
                if isinstance(result, Partial) == (pattern.word == "row"):
                    return dim
            elif isinstance(result, Shard):
                moved[dim] = result
        if moved:
            views[node.outputs[0]] = moved
    raise OptionError(
        f"tensor-parallel: {pattern.glob}:{pattern.word} does not fit {name!r}: no product reads it so",
        "name the dimension: dim0 or dim1",
    )
