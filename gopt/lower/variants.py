"""Checks that programs of ranks with parts of different sizes agree in states, their order, and calls between ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from gopt.errors import InvariantError, UnsupportedError
from gopt.ir.graph import COMM
from gopt.lower.specialise import common_states
from gopt.spmd.program import SpmdProgram


def check_variants(program: SpmdProgram) -> None:
    """Raise InvariantError where variants of a program differ in more than the sizes of parts; UnsupportedError for a
    parameter that is a scalar on some members only, and not in a bucket.

    Calls along an axis splitting the computation join ranks of several variants. The calls must be the same in the same
    order, whatever the groups: ranks of two variants waiting in two groups for one another wait forever.
    """
    mine = dict(_common(program)) if program.others else {}
    for variant in program.others:
        theirs = dict(_common(variant))
        for what, items in mine.items():
            if items != theirs[what]:
                _refuse_single(program, variant)
                a, b = next((a, b) for a, b in zip([*items, None], [*theirs[what], None]) if a != b)
                where = f"ranks at {_where(program)} and at {_where(variant)}"
                raise InvariantError(f"{where} have parts of other sizes, and their {what} differ: {a} and {b}")


def _refuse_single(program: SpmdProgram, variant: SpmdProgram) -> None:
    """Raise UnsupportedError for a parameter of a single element at some places only."""
    for state in program.training.parameters:
        mine, theirs = (item.training.graph.types[state.tensor].elements for item in (program, variant))
        if 1 in (mine, theirs) and mine != theirs:
            raise UnsupportedError(
                f"ranks at {_where(program)} have {mine} and ranks at {_where(variant)} have {theirs} elements of "
                f"{state.tensor!r}: a parameter of one element is not sharded, and all ranks must shard the same",
                "shard another dimension of it, use other sizes, or set replicate",
            )


def _common(program: SpmdProgram) -> Iterator[tuple[str, list[Hashable]]]:
    """Yield the properties required to be equal in all variants, each with a name and as an ordered list."""
    yield "states", [(state.input, state.output, *(part.tensor for part in state.slices)) for state in program.states]
    yield "accumulators", [(accumulator.input, accumulator.output) for accumulator in program.accumulators]
    yield "buckets", list(program.layout)
    yield "states that all ranks have", list(common_states(program))
    split = set(program.split)
    yield (
        "calls over groups that have parts",
        [
            (node.op_type, str(sorted(node.attributes.items())))
            for node in program.graph.nodes
            if "group" in node.attributes
            and node.domain == COMM
            and split.intersection(program.mesh.live(str(node.attributes["group"])))
        ],
    )


def _where(program: SpmdProgram) -> str:
    return " and ".join(",".join(f"{axis}={at}" for axis, at in position.items()) for position in program.places)
