"""Results share memory only when nobody reads the one any more, and what a call reads shares with nobody."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gopt.graph.types import TensorType
from gopt.runtime.cut import dropped
from gopt.runtime.places import find_places


@dataclass(frozen=True)
class Step:
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def row(length: int, dtype: str = "float32") -> TensorType:
    return TensorType(dtype, (length,))


@given(st.data())
def test_no_two_live_results_share(data):
    steps: list[Step] = []
    made: list[str] = ["fed"]
    for number in range(data.draw(st.integers(1, 12))):
        reads = data.draw(st.lists(st.sampled_from(made), unique=True, max_size=3))
        names = [f"v{number}.{k}" for k in range(data.draw(st.integers(1, 2)))]
        steps.append(Step(tuple(reads), tuple(names)))
        made += names
    own = made[1:]
    types = {
        name: row(*data.draw(st.sampled_from([(4, "float32"), (4, "int32"), (2, "float64"), (3, "float32")])))
        for name in own
    }
    kept, waited = (set(data.draw(st.lists(st.sampled_from(own)))) for _ in range(2))
    dead = dropped(steps, list(kept))  # type: ignore[arg-type]
    found = find_places(steps, dead, (), types, {}, kept, waited)
    assert set(found) == set(own)
    made_at = {name: place for place, step in enumerate(steps) for name in step.outputs}
    read_at = {name: place for place, step in enumerate(steps) for name in (*step.outputs, *step.inputs)}
    end = len(steps)
    until = {name: end if name in kept or name in waited else read_at[name] for name in own}
    for name in own:
        assert len(found[name]) == (2 if name in kept else 1)
        assert all(
            value.array.shape == types[name].dims and value.array.dtype == types[name].dtype for value in found[name]
        )
        for other in own:
            apart = until[name] < made_at[other] or until[other] < made_at[name]
            if other != name and not apart:
                assert not any(np.shares_memory(a.array, b.array) for a in found[name] for b in found[other])


def test_memory_is_used_again():
    steps = [Step((), ("a",)), Step(("a",), ("b",)), Step(("b",), ("c",)), Step(("c",), ("d",))]
    types = {name: row(64) for name in "abcd"}
    found = find_places(steps, dropped(steps, ["d"]), (), types, {}, ["d"], ())  # type: ignore[arg-type]
    assert np.shares_memory(found["a"][0].array, found["c"][0].array)
    waited = find_places(steps, dropped(steps, ["d"]), (), types, {}, ["d"], ["a"])  # type: ignore[arg-type]
    assert not np.shares_memory(waited["a"][0].array, waited["c"][0].array)


def test_what_has_no_place():
    steps = [Step((), ("unknown", "empty", "half", "elsewhere", "sent"))]
    types = {"unknown": row(0), "empty": row(0), "half": row(4, "bfloat16"), "elsewhere": row(4), "sent": row(4)}
    room = np.zeros(4, np.float32)
    found = find_places(steps, dropped(steps, ["sent"]), ("elsewhere",), types, {"sent": room}, (), ())  # type: ignore[arg-type]
    assert list(found) == ["sent"] and found["sent"][0].array is room
