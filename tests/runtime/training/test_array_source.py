"""The order in which samples are dealt out to steps and data ranks."""

from __future__ import annotations

import numpy as np
import pytest

from gopt.errors import InputError
from gopt.ir.types import TensorType
from gopt.runtime.training.array_source import ArraySource, Last, MicroStep, RowCounts, SampleOrder

TYPES = {"y": TensorType("int64", (2,))}


def steps(count: int, order: SampleOrder, parts: int, number: int) -> list[list[int]]:
    """The samples of each of so many steps, in the order of micro-steps and ranks."""
    source = ArraySource(TYPES, {"y": np.arange(count)}, order)
    return [
        [int(row) for turn in range(order.times) for part in range(parts)
         for row in source.batch(MicroStep(step * order.times + turn, part, parts))["y"]]
        for step in range(number)
    ]  # fmt: skip


@pytest.mark.parametrize("shuffle", [None, 5])
@pytest.mark.parametrize(("parts", "times"), [(1, 1), (2, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("count", [24, 25, 31])
@pytest.mark.parametrize("last", Last)
def test_a_pass_has_every_sample_once_but_what_fills_no_step(last, count, parts, times, shuffle):
    order, held = SampleOrder(shuffle, last, times=times), RowCounts(count, 2)
    size, long = 2 * parts * times, order.steps(held, parts)
    dealt = steps(count, order, parts, 3 * long)
    if last is Last.CARRY:
        flat = [row for step in dealt for row in step]
        assert all(sorted(flat[at : at + count]) == [*range(count)] for at in range(0, len(flat) - count + 1, count))
        assert order.steps(held, parts, 3) == -(-3 * count // size)
        return
    assert order.steps(held, parts, 3) == 3 * long
    passes = [[row for step in dealt[at : at + long] for row in step] for at in range(0, 3 * long, long)]
    for each in passes:
        assert len(each) == long * size
        if last is Last.DROP:
            assert len(set(each)) == len(each) > count - size
        else:
            assert sorted(each[:count]) == [*range(count)] and each[count:] == each[: long * size - count]
    assert (passes[0] == passes[1]) == (shuffle is None)


def test_too_few_samples_are_told_or_refused():
    held = RowCounts(3, 2)
    assert SampleOrder().note(held, 2) == (
        "the data has 3 samples, and a step takes 4: some are used more than once in a step"
    )
    assert not SampleOrder().note(held, 1) and not SampleOrder().note(None, 2)
    assert steps(3, SampleOrder(last=Last.PAD), 2, 2) == [[0, 1, 2, 0]] * 2
    with pytest.raises(InputError, match="a step takes 4 samples, and there are 3"):
        SampleOrder(last=Last.DROP).steps(held, 2)
