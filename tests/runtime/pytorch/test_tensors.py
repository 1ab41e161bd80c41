"""Arrays and tensors over one memory."""

import numpy as np
import pytest

from gopt.errors import UnsupportedError
from gopt.ir.types import numpy_dtype

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
tensors = pytest.importorskip("gopt.runtime.pytorch.tensors")
TYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "float8e4m3fn", "float8e5m2",
)  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_an_array_comes_back_as_it_was(name, shape):
    array = (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2).astype(numpy_dtype(name))
    tensor = tensors.tensor_over(array)
    back = tensors.array_over(tensor)
    assert back.dtype == array.dtype and back.shape == shape and back.tobytes() == array.tobytes()
    assert tensors.array_dtype(tensors.torch_dtype(array.dtype)) == array.dtype


def test_memory_is_shared_where_it_may_be_written():
    array = np.zeros((2, 3), np.float32)
    tensors.tensor_over(array)[0, 1] = 5
    assert array[0, 1] == 5
    for other in (array.T, np.broadcast_to(array, (2, 2, 3))):
        tensors.tensor_over(other).fill_(7)
    assert 7 not in array


@pytest.mark.parametrize("name", ["int4", "float4e2m1", "string"])
def test_types_without_tensors_are_refused(name):
    with pytest.raises(UnsupportedError, match="PyTorch has no tensors"):
        tensors.torch_dtype(numpy_dtype(name))
