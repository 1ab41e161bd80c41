"""The table of links by numbers and without ranks.

Every operator of the table is run whole and split, in every way that its rule allows: uneven, with empty parts, in
several runs. What members make, put together as the strategy says, is the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from link_expected import EXPECTED
from operator_forms import CASES, case, flags, ints, places, whole, x
from products import part
from split_run import Split, described, shards

from gopt.ir.types import TensorType
from gopt.operators.dims.link import DimFactor, DimFactors, all_results, beside, linked
from gopt.operators.dims.moves import sliced
from gopt.records.placements import REPLICATED, Partial, Shard, Window
from gopt.spmd.links import RULES, OperatorUse, Slot, Strategy, strategies


def slots(operator: OperatorUse) -> Iterator[tuple[Slot, Shard]]:
    """Every way in which one operand or result may be sharded."""
    for result, types in ((False, operator.operands), (True, operator.results)):
        for place, type in enumerate(types):
            for dim, length in enumerate(type.dims if type is not None else ()):
                yield from ((Slot(place, result), shard) for shard in shards(length, dim))


def placed(strategy: Strategy) -> Iterator[tuple[Slot, Shard]]:
    """The operands and results that a strategy shards."""
    for result, row in ((False, strategy.operands), (True, strategy.results)):
        yield from ((Slot(place, result), each) for place, each in enumerate(row) if isinstance(each, Shard))


def slides(strategy: Strategy, slot: Slot, shard: Shard) -> bool:
    """Whether what was asked for is read in windows, or in other parts, of the same dimension."""
    given = strategy.operands[slot.place]
    return not slot.result and isinstance(given, (Shard, Window)) and given.dim == shard.dim


def found(operator: OperatorUse) -> dict[Strategy, None]:
    """Every strategy there is, each of which shards what was asked for."""
    made: dict[Strategy, None] = {}
    for slot, shard in slots(operator):
        for strategy in strategies(operator, slot, shard):
            assert (slot, shard) in list(placed(strategy)) or slides(strategy, slot, shard)
            made[strategy] = None
    return made


@pytest.mark.parametrize("op_type", part(sorted(RULES), 68))
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


@pytest.mark.parametrize("op_type", part(sorted(RULES), 68, first=1))
def test_both_directions_agree(op_type):
    """A way to split an operator is found from each operand and each result that it shards."""
    for each in CASES[op_type]:
        operator = Split(op_type, each).operator()
        for strategy in found(operator):
            for slot, shard in placed(strategy):
                assert strategy in strategies(operator, slot, shard), f"{strategy} is not found from {slot}"


@pytest.mark.parametrize("op_type", sorted(EXPECTED))
def test_links_are_those_that_there_are(op_type):
    """No rule forgets one: an operator without links is computed whole by everybody."""
    for each, expected in zip(CASES[op_type], EXPECTED[op_type], strict=True):
        assert (
            "; ".join(sorted({described(strategy) for strategy in found(Split(op_type, each).operator())})) == expected
        )


@pytest.mark.parametrize("op_type", part(sorted(RULES), 68))
def test_what_is_not_known_makes_no_link(op_type):
    """Where the graph does not hold the values of operands, there are fewer ways, and no others."""
    for each in CASES[op_type]:
        split = Split(op_type, each)
        assert set(found(split.operator(constants=False))) <= set(found(split.operator()))


REFUSED = {
    "EyeLike": case(x(4, 4)), "Compress": case(x(4, 4), flags(4), axis=0), "NonZero": case(x(4, 4), runtime=True),
    "MatMulInteger": case(whole(4, 4, dtype="uint8"), whole(4, 4, dtype="uint8")), "Unique": case(x(4)),
    "RandomUniformLike": case(x(4, 4)), "Bernoulli": case(x(4, 4)), "Shape": case(x(4, 4)),
}  # fmt: skip
"""Operators that no rule splits: lengths that follow from values, draws, places in the whole."""


@pytest.mark.parametrize("op_type", REFUSED)
def test_an_operator_without_a_rule_has_no_links(op_type):
    assert not found(Split(op_type, REFUSED[op_type]).operator())


def test_a_dropout_that_draws_has_no_links():
    for more in ((), (np.array(0.5, np.float32), np.array(True))):
        each = case(x(4, 6), *more, results=2)
        split = Split("Dropout", each)
        unknown = split.operator(constants=False)
        assert not (found(split.operator()) and more)
        assert not (found(unknown) and more), "nobody knows that it does not draw"


def test_operators_of_old_sets_are_computed_whole():
    """Before operator set 7 a broadcast is asked for, and may begin at any dimension."""
    split = Split("Add", case(x(4, 6), x(6)))
    assert found(split.operator())
    assert not found(replace(split.operator(), opset=6))


def test_shapes_that_are_not_known_have_no_links():
    split = Split("Relu", case(x(4, 6)))
    for type in (TensorType("float32", None), TensorType("float32", ("batch", 6))):
        assert not strategies(replace(split.operator(), operands=(type,)), Slot(0), Shard(1, (3, 3)))


def test_a_wrong_rule_is_seen():
    """The law itself: a strategy that splits another dimension than it says is caught."""
    split = Split("Softmax", case(x(4, 6)))
    for wrong in (Shard(1, (3, 3)), Shard(1, (6, 0))):
        with pytest.raises(AssertionError):
            split.check(Strategy((wrong,), (wrong,)) if wrong.sizes[1] else Strategy((wrong,), (Shard(0, (2, 2)),)))
    summed = Split("Gemm", case(x(4, 6), x(6, 3), x(3)))
    rows = Strategy((Shard(1, (3, 3)), Shard(0, (3, 3)), REPLICATED), (Partial("sum"),))
    with pytest.raises(AssertionError):
        summed.check(rows)  # each member adds the bias


def test_reshapes_have_runs():
    """Heads of a sample: three of queries, keys and values in one weight."""
    split = Split("Reshape", case(x(2, 3, 24), ints(2, 3, 3, 4, 2)))
    fused = Shard(2, (4, 4), runs=3)
    (strategy,) = strategies(split.operator(), Slot(0), fused)
    assert strategy.results == (Shard(3, (2, 2)),)
    split.check(strategy)
    (strategy,) = strategies(Split("Reshape", case(x(6, 8), ints(48))).operator(), Slot(0), Shard(1, (3, 5)))
    assert strategy.results == (Shard(0, (3, 5), runs=6),)


def test_the_fewest_runs_come_first():
    split = Split("Reshape", case(x(4, 6), ints(4, 1, 6)))
    first, *rest = strategies(split.operator(), Slot(0), Shard(1, (6, 0)))
    assert first.results == (Shard(2, (6, 0)),)
    assert {described(each) for each in rest} == {"1 - > 0", "1 - > 1"}


def test_a_squeeze_leaves_parts_of_one_element():
    """Of two elements each member has one, which is not a dimension to drop."""
    split = Split("Squeeze", case(x(2, 1, 6)))
    split.check(Strategy((Shard(0, (1, 1)),), (Shard(0, (1, 1)),)))


def test_heads_of_an_attention_that_share_keys_stay_together():
    each = case(x(2, 6, 3, 4), x(2, 2, 5, 4), x(2, 2, 5, 4), opset=23)
    operator = Split("Attention", each).operator()
    (strategy,) = strategies(operator, Slot(0), Shard(1, (3, 3)))
    assert strategy.operands == (Shard(1, (3, 3)), Shard(1, (1, 1)), Shard(1, (1, 1)))
    assert not strategies(operator, Slot(0), Shard(1, (2, 4)))


def test_indices_of_a_masked_choice_may_count_from_the_end():
    split = Split("Gather", case(x(3, 7), places(7, 4), axis=-1))
    (strategy,) = strategies(split.operator(), Slot(0), Shard(1, (2, 0, 5)))
    assert strategy.masked
    split.check(strategy)


def first_two(operator: OperatorUse) -> Iterator[DimFactor]:
    for dim in range(2):
        yield DimFactor((dim,), all_results(operator, dim))


WRONG: dict[str, DimFactors] = {
    "CumSum": beside(), "Pad": sliced, "MaxPool": first_two, "Softmax": beside(), "LogSoftmax": beside(),
    "Trilu": first_two,
}  # fmt: skip
"""Rules that stood in the table, or might: an axis that is an operand, pads that cancel out, places counted through
all of the operand, a softmax of an old set, rows of triangles."""


@pytest.mark.parametrize("op_type", WRONG)
def test_wrong_rules_are_caught(op_type, monkeypatch):
    monkeypatch.setitem(RULES, op_type, linked(WRONG[op_type]))
    with pytest.raises(AssertionError):
        for each in CASES[op_type]:
            split = Split(op_type, each)
            for strategy in found(split.operator()):
                if all(min(shard.sizes) for _, shard in placed(strategy)):  # runtimes refuse pools of nothing
                    split.check(strategy)


def test_a_member_may_have_none_of_a_sum_of_products():
    """Of matrices; of stacks of them runtimes leave what they find."""
    for shape, there in (((6, 3), True), ((2, 6, 3), False)):
        operator = Split("MatMul", case(x(4, 6), x(*shape))).operator()
        assert bool(strategies(operator, Slot(0), Shard(1, (6, 0)))) == there
        assert strategies(operator, Slot(0), Shard(1, (5, 1)))
