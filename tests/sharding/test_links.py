"""The table of links by numbers and without ranks.

Every operator of the table is run whole and split, in every way that its rule allows: uneven, with empty parts, in
several runs. What members make, put together as the strategy says, is the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from link_cases import CASES, case, flags, ints, places, whole, x
from split_run import Case, Split, described, shards

from gopt.ir.types import TensorType
from gopt.sharding.links import RULES, Operator, Slot, Strategy, strategies
from gopt.sharding.placements import Shard


def slots(operator: Operator) -> Iterator[tuple[Slot, Shard]]:
    """Every way in which one operand or result may be sharded."""
    for result, types in ((False, operator.operands), (True, operator.results)):
        for place, type in enumerate(types):
            for dim, length in enumerate(type.dims if type is not None else ()):
                yield from ((Slot(place, result), shard) for shard in shards(length, dim))


def placed(strategy: Strategy) -> Iterator[tuple[Slot, Shard]]:
    """The operands and results that a strategy shards."""
    for result, row in ((False, strategy.operands), (True, strategy.results)):
        yield from ((Slot(place, result), each) for place, each in enumerate(row) if isinstance(each, Shard))


def found(operator: Operator) -> dict[Strategy, None]:
    """Every strategy there is, each of which shards what was asked for."""
    made: dict[Strategy, None] = {}
    for slot, shard in slots(operator):
        for strategy in strategies(operator, slot, shard):
            assert (slot, shard) in list(placed(strategy))
            made[strategy] = None
    return made


@pytest.mark.parametrize("op_type", sorted(RULES))
def test_parts_put_together_are_the_whole(op_type):
    assert op_type in CASES, "the table has an operator without a case"
    seen = 0
    for each in CASES[op_type]:
        split = Split(op_type, each)
        for strategy in found(split.operator()):
            seen += 1
            try:
                split.check(strategy)
            except Exception as error:
                raise AssertionError(f"{each.attributes} opset {each.opset}: {strategy}") from error
    assert seen
