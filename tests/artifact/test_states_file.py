"""``states.bin``: every value once, on an aligned start, in pieces."""

from __future__ import annotations

import hashlib
import io

import numpy as np
import pytest
from helpers import source
from onnx import numpy_helper

from gopt.artifact import states_file
from gopt.artifact.states_file import ALIGN, StatesFile, plan_states_file
from gopt.errors import RunError
from gopt.ir.graph import Tensor
from gopt.ir.types import TensorType
from gopt.mesh import Mesh
from gopt.program import SpmdProgram


def tensor(count: int, start: int = 0) -> Tensor:
    value = np.arange(start, start + count, dtype=np.float32)
    return Tensor(TensorType("float32", (count,)), proto=numpy_helper.from_array(value))


def written(values: StatesFile) -> bytes:
    file = io.BytesIO()
    digest = values.write_to(file)
    assert digest == hashlib.sha256(file.getvalue()).hexdigest()
    return file.getvalue()


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
    StatesFile().write(tmp_path / "states.bin")
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
    with pytest.raises(RunError, match="ended while it was read"):
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
