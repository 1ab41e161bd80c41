"""User patterns for parameters and inputs by name: ``*.qkv.weight:column;head*:replicate;up*:expert@ep``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from heapq import heapify, heappop, heappush

from gopt.analysis.training import TrainingGraph
from gopt.errors import OptionError
from gopt.ir.constant_folding import Constants
from gopt.ir.operator_use import use_of
from gopt.ir.phase import Phase
from gopt.records.placements import Partial, Shard
from gopt.spmd.links import Slot
from gopt.tensor_parallel.choose import Choice
from gopt.tensor_parallel.forward import COLUMN_PRODUCTS, bare_strategies
from gopt.tensor_parallel.sizes import Sizes, part_sizes
from gopt.text.suggestions import did_you_mean

WORDS = ("column", "row", "vocab", "expert", "replicate")
FED = ("whole",)
"""Allowed patterns of batch inputs, besides a dimension."""
_DIM = re.compile(r"dim(\d+)(?:/(\d+))?(?:=(\d+(?:\+\d+)*))?")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern: values whose name matches ``glob``, and how they are split along an axis: a word, or ``dimN``;
    ``dimN/R``: in R runs; ``dimN=24+40``: in parts of these sizes."""

    glob: str
    word: str
    axis: str = "tp"

    def __str__(self) -> str:
        return f"{self.glob}:{self.word}" + (f"@{self.axis}" if self.axis != "tp" else "")

    @classmethod
    def parse(cls, text: str, words: Sequence[str] = WORDS) -> tuple[Pattern, ...]:
        """Parse ``up*:column;down*:row@tp``; raises OptionError on anything else."""
        patterns = []
        for part in filter(None, (part.strip() for part in text.split(";"))):
            glob, colon, words_after = part.rpartition(":")
            word, at, axis = words_after.partition("@")
            if not colon or (word not in words and _DIM.fullmatch(word) is None) or (at and not axis):
                raise OptionError(
                    f"tensor-parallel: cannot read {part!r} as a placement of some values",
                    f"write PATTERN:WORD, with {', '.join(words)}, or dimN for dimension N (dimN/R in R equal runs, "
                    "dimN=24+40 in such parts); PATTERN:WORD@AXIS along another axis than tp",
                )
            patterns.append(cls(glob, word, axis or "tp"))
        return tuple(patterns)


def apply(
    training: TrainingGraph, members: int, rule: Sizes, patterns: tuple[Pattern, ...], auto: Mapping[str, Choice]
) -> dict[str, Choice]:
    """Return the choices, overridden by the user's patterns; the first matching pattern counts.

    Raises OptionError for a pattern matching no parameter, and for one by which a parameter cannot be split.
    """
    choices = dict(auto)
    products = _Products(training)
    for name, pattern in matches([state.tensor for state in training.parameters], patterns, "parameter"):
        if pattern.word == "replicate":
            choices.pop(name, None)
        elif name not in auto or auto[name].why != pattern.word:  # the recognised pattern has heads and runs
            choices[name] = Choice(_placement(products, members, rule, name, pattern), f"asked for as {pattern.word}")
    return choices


def fed_by(
    training: TrainingGraph,
    axis: str,
    members: int,
    rule: Sizes,
    patterns: tuple[Pattern, ...],
    auto: Mapping[str, Shard],
) -> dict[str, Shard]:
    """Return how batch inputs are sharded along an axis, overridden by the user's patterns.

    Raises OptionError as ``apply`` does.
    """
    shards = dict(auto)
    along = tuple(pattern for pattern in patterns if pattern.axis == axis)
    for name, pattern in matches(training.batch, along, "batch input"):
        if pattern.word == "whole":
            shards.pop(name, None)
        else:
            shards[name] = _by_dimension(training, members, rule, name, pattern)
    return shards


def matches(names: Sequence[str], patterns: tuple[Pattern, ...], what: str) -> list[tuple[str, Pattern]]:
    """Return names with the first pattern that matches; raises OptionError for a pattern matching no name."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern.glob) for name in names):
            hint = did_you_mean(pattern.glob, names) or f"see each {what} with gopt inspect"
            raise OptionError(f"tensor-parallel: {pattern} matches no {what}", hint)
    chosen = {name: next((pattern for pattern in patterns if fnmatchcase(name, pattern.glob)), None) for name in names}
    return [(name, match) for name, match in chosen.items() if match is not None]


def _by_dimension(
    training: TrainingGraph, members: int, rule: Sizes, name: str, pattern: Pattern, dim: int | None = None
) -> Shard:
    """Return the placement a pattern names by the dimension, or by ``dim``."""
    type, runs, sizes_text = training.graph.types[name], 1, ""
    exact = _DIM.fullmatch(pattern.word)
    if exact is not None:
        dim, runs, sizes_text = int(exact[1]), int(exact[2] or 1), exact[3] or ""
    assert dim is not None
    if not type.static or dim >= len(type.dims) or runs < 1 or type.dims[dim] % runs:
        raise OptionError(
            f"tensor-parallel: {pattern} does not fit {name!r}, which is {type}",
            "name a dimension that the parameter has",
        )
    length = type.dims[dim] // runs
    sizes = tuple(map(int, sizes_text.split("+"))) if sizes_text else part_sizes(length, members, rule)
    if len(sizes) != members or sum(sizes) != length:
        raise OptionError(
            f"tensor-parallel: {pattern} does not fit {name!r}, which is {type}: {members} parts make {length} "
            "together",
            "give sizes that sum to the length of the dimension",
        )
    return Shard(dim, sizes, runs)


def _placement(products: _Products, members: int, rule: Sizes, name: str, pattern: Pattern) -> Shard:
    type = products.training.graph.types[name]
    dim = None
    if pattern.word in WORDS:
        leading = pattern.word in ("vocab", "expert") or len(type.dims) == 1
        dim = 0 if leading else products.dimension(name, pattern)
    return _by_dimension(products.training, members, rule, name, pattern, dim)


@dataclass(slots=True)
class _Products:
    """The products of the forward, with an index of readers."""

    training: TrainingGraph
    constants: Constants = field(init=False)
    readers: dict[str, list[int]] = field(init=False)
    """Value -> the positions of its readers."""

    def __post_init__(self) -> None:
        self.constants = Constants(self.training.graph)
        self.readers = {}
        for index, node in enumerate(self.training.graph.nodes):
            for name in node.inputs if node.phase is Phase.FORWARD else ():
                self.readers.setdefault(name, []).append(index)

    def dimension(self, name: str, pattern: Pattern) -> int:
        """Return the dimension of a weight that is the columns, or the rows, in the first product reading it or a view
        of it; raises OptionError where none does."""
        nodes = self.training.graph.nodes
        views = {name: {dim: Shard(dim, (size,)) for dim, size in enumerate(self.training.graph.types[name].dims)}}
        ahead = list(self.readers.get(name, ()))
        heapify(ahead)
        while ahead:
            node = nodes[heappop(ahead)]
            at = next(index for index, name in enumerate(node.inputs) if name in views)
            described = use_of(node, self.training.graph, self.constants)
            moved: dict[int, Shard] = {}
            for dim, shard in views[node.inputs[at]].items():
                result = next((strategy.results[0] for strategy in bare_strategies(described, Slot(at), shard)), None)
                if result is not None and node.is_in(COLUMN_PRODUCTS):
                    if isinstance(result, Partial) == (pattern.word == "row"):
                        return dim
                elif isinstance(result, Shard):
                    moved[dim] = result
            if moved and node.outputs[0] not in views:
                views[node.outputs[0]] = moved
                for reader in self.readers.get(node.outputs[0], ()):
                    heappush(ahead, reader)
        raise OptionError(
            f"tensor-parallel: {pattern} does not fit {name!r}: no product reads it so",
            "name the dimension: dim0 or dim1",
        )
