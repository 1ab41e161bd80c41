"""Results share memory only when nobody reads the one any more, and what a call reads shares with nobody."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gopt.ir.graph import COMM, Node
from gopt.ir.types import TensorType
from gopt.runtime.partition import CallStep, ProgramStep, Segment, last_uses
from gopt.runtime.planner.buffers import Buffers
from gopt.runtime.planner.memory_planner import MemoryPlan, plan_memory


def segment(reads: Iterable[str], makes: Iterable[str]) -> Segment:
    return Segment((), tuple(reads), tuple(makes))


def gather(number: int, reads: Iterable[str], makes: Iterable[str]) -> CallStep:
    return CallStep(number, Node("AllGather", list(reads), list(makes), domain=COMM, attributes={"cuts": [0, 4, 8]}))


def laid(
    steps: Sequence[ProgramStep], types: dict[str, TensorType], kept: Collection[str] = (),
    buffers: Buffers | None = None, aliases: Collection[str] = (),
) -> MemoryPlan:  # fmt: skip
    return plan_memory(steps, last_uses(steps, list(kept)), types, buffers or Buffers(), aliases, kept)


def row(length: int, dtype: str = "float32") -> TensorType:
    return TensorType(dtype, (length,))


@given(st.data())
def test_no_two_live_results_share(data):
    steps: list[ProgramStep] = []
    made: list[str] = ["fed"]
    kinds = [(4, "float32"), (4, "int32"), (2, "float64"), (3, "float32")]
    types = {}
    for number in range(data.draw(st.integers(1, 12))):
        reads = data.draw(st.lists(st.sampled_from(made), unique=True, max_size=3))
        names = [f"v{number}.{k}" for k in range(data.draw(st.integers(1, 2)))]
        if data.draw(st.booleans()):
            steps.append(segment(reads, names))
            types |= {name: row(*data.draw(st.sampled_from(kinds))) for name in names}
        else:
            steps.append(gather(number, reads[:1], names))
            types |= {name: row(2) for name in names}
        made += names
    own = made[1:]
    kept = set(data.draw(st.lists(st.sampled_from(own))))
    found = laid(steps, types, kept)
    makers = {name: place for place, step in enumerate(steps) for name in step.outputs}
    due = {name for name in own if isinstance(steps[makers[name]], Segment)}
    due |= {
        name for name in own if isinstance(step := steps[makers[name]], CallStep) and kept.isdisjoint(step.outputs)
    }  # fmt: skip
    assert set(found.views) == due
    assert set(found.output_buffers) == {
        step.index for step in steps if isinstance(step, CallStep) and kept.isdisjoint(step.outputs)
    }
    last = {name: place for place, step in enumerate(steps) for name in (*step.outputs, *step.inputs)}
    waited = {name for step in steps if isinstance(step, CallStep) for name in step.inputs}
    for name in own:  # a call that nobody waits for may write until the end
        if name in kept or name in waited or (last[name] == makers[name] and isinstance(steps[makers[name]], CallStep)):
            last[name] = len(steps)
    for name in due:
        assert len(found.views[name]) == (2 if name in kept else 1)
        for value in found.views[name]:
            assert value.array.shape == types[name].dims and value.array.dtype == types[name].dtype
        for other in due - {name}:
            if last[name] >= makers[other] and last[other] >= makers[name]:
                pairs = [(a.array, b.array) for a in found.views[name] for b in found.views[other]]
                assert not any(np.shares_memory(a, b) for a, b in pairs)


def test_memory_is_used_again():
    steps: list[ProgramStep] = [segment("", "a"), segment("a", "b"), segment("b", "c"), segment("c", "d")]
    types = {name: row(64) for name in "abcd"}
    found = laid(steps, types, "d").views
    assert np.shares_memory(found["a"][0].array, found["c"][0].array)
    steps.insert(1, gather(0, "a", "e"))
    waited = laid(steps, types | {"e": row(8)}, "d").views
    assert not np.shares_memory(waited["a"][0].array, waited["c"][0].array)


def test_a_gather_lands_in_one_row_that_is_free_when_all_of_it_was_read():
    steps = [
        gather(0, ["x"], "ab"), segment("a", "c"), segment("b", "d"), gather(1, ["y"], "ef"), segment("ef", "g"),
        gather(2, ["z"], "hi"),
    ]  # fmt: skip
    types = {name: row(4) for name in "abefhi"} | {name: row(1) for name in "cdg"}
    found = laid(steps, types)
    one, two, three = (found.output_buffers[number] for number in range(3))
    assert np.shares_memory(one, two) and one.dtype == np.float32 and one.shape == (8,)
    assert np.shares_memory(two, three)
    assert np.shares_memory(one[:4], found.views["a"][0].array) and np.shares_memory(one[4:], found.views["b"][0].array)
    late = laid([*steps[:2], *steps[3:], steps[2]], types)
    assert not np.shares_memory(late.output_buffers[0], late.output_buffers[1])


def test_what_has_no_place():
    steps = [segment("", ("unknown", "empty", "half", "over", "sent"))]
    types = {"unknown": TensorType("float32", None), "empty": row(0), "half": row(4, "bfloat16"), "over": row(4)}
    types["sent"] = row(4)
    buffer = np.zeros(4, np.float32)
    found = laid(steps, types, buffers=Buffers(send_views={"sent": buffer}), aliases=["over"]).views
    assert list(found) == ["sent"] and found["sent"][0].array is buffer
