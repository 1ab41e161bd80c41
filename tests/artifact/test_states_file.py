"""``states.bin``: every value once, on an aligned start, in pieces."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from helpers import source
from onnx import numpy_helper

import gopt
from gopt.artifact import states_file
from gopt.artifact.integrity import Inventory
from gopt.artifact.states_file import ALIGN, StatesFile, plan_states_file, stored
from gopt.errors import InvariantError, RunError
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.records.boxes import all_boxes, box_elements
from gopt.records.mesh import Mesh
from gopt.spmd.program import SpmdProgram


def tensor(count: int, start: int = 0) -> Tensor:
    value = np.arange(start, start + count, dtype=np.float32)
    return Tensor(TensorType("float32", (count,)), proto=numpy_helper.from_array(value))


def written(values: StatesFile) -> bytes:
    return b"".join(values.chunks())


def test_a_bucket_has_no_gaps_and_begins_aligned():
    values = StatesFile()
    values.add([("a", tensor(3))])
    values.add([])
    values.add([("b", tensor(5, 10)), ("c", tensor(2, 20))])
    assert values.offset == {"a": 0, "b": ALIGN, "c": ALIGN + 20}
    data = written(values)
    assert len(data) == values.size == ALIGN + 28
    assert np.frombuffer(data[ALIGN:], "f4").tolist() == [10, 11, 12, 13, 14, 20, 21]
    assert data[12:ALIGN] == bytes(ALIGN - 12)


def test_nothing_makes_no_file(tmp_path):
    StatesFile().write(Inventory(tmp_path))
    assert not (tmp_path / "states.bin").exists()


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_a_value_in_another_file_is_copied_in_pieces(chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(states_file, "CHUNK", chunk)
    data = bytes(range(80))
    (tmp_path / "values").write_bytes(data)
    values = StatesFile()
    values.add([("a", Tensor(TensorType("float32", (10,)), path=str(tmp_path / "values"), offset=8))])
    assert written(values) == data[8:48]


def test_a_file_that_ends_early(tmp_path):
    (tmp_path / "values").write_bytes(bytes(20))
    values = StatesFile()
    values.add([("a", Tensor(TensorType("float32", (10,)), path=str(tmp_path / "values"), offset=0))])
    with pytest.raises(RunError, match="was truncated while it is read"):
        written(values)


def test_every_state_is_stored_once():
    """Small constants stay inside of the graphs."""
    program = SpmdProgram.start(source("mlp_adamw").training, Mesh.parse("shard=2"))
    values = plan_states_file(program)
    graph = program.training.graph
    states = {state.tensor for state in program.training.states}
    large = {name for name, each in graph.initializers.items() if each.nbytes > states_file.INLINE}
    assert set(values.offset) == (states & set(graph.initializers)) | large
    assert all(offset % ALIGN == 0 for offset in values.offset.values())


def test_parts_are_stored_for_each_rank_and_nothing_twice():
    """A bucket of parts lies in one piece for each member; a narrow copy is stored in the parts of its parameter."""
    program = gopt.shard(source("gpt_adamw_clip_sched_fp16"), Mesh.parse("shard=2,tp=3"), stage=2).program
    values = plan_states_file(program)
    initial = program.source.graph.initializers
    copies = program.copies()
    assert copies and program.parts.keys() & copies.keys()
    for parameter, copy in copies.items():
        boxes = [None]
        if parameter in program.parts:
            boxes = list(all_boxes(program.parts[parameter], initial[parameter].type.dims))
        assert all(stored(copy.input, box) in values.offset for box in boxes)
    names = next(names for names in program.layout if names[0] in program.parts)
    for member in range(3):
        place = None
        for name in names:
            box = program.box(name, {"tp": member})
            assert box is not None and place in (None, values.offset[stored(name, box)])
            place = values.offset[stored(name, box)] + box_elements(box) * 4
    states = sum(initial[state.tensor].nbytes for state in program.source.states if state.tensor in initial)
    narrow = sum(initial[parameter].type.elements * 2 for parameter in copies)
    constants = program.training.graph.initializers
    rest = sum(constants[name].nbytes for name in values.offset if name in constants and name not in program.parts)
    gaps = ALIGN * len(values.offset)
    assert states + narrow <= values.size <= states + narrow + rest + gaps


def test_a_part_is_not_kept_in_memory(tmp_path):
    program = gopt.shard(source("mlp_adamw"), Mesh.parse("tp=2"), stage=0).program
    values = plan_states_file(program)
    tracemalloc.start()
    try:
        values.write(Inventory(tmp_path))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < values.size / 10


def test_a_bucket_with_parts_and_whole_tensors_is_refused():
    program = gopt.shard(source("mlp_adamw"), Mesh.parse("tp=2"), stage=0).program
    program.layout = [("fc1.weight", "step")]
    with pytest.raises(InvariantError, match="'step' is whole on every rank"):
        plan_states_file(program)
