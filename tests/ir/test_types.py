"""Element types and tensor types."""

import copy
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from gopt.ir.types import TensorType, dtype_code, dtype_name, known, nbytes, numpy_dtype, overflows


def test_names_and_codes_of_onnx_are_inverse():
    for code in range(1, 25):
        assert dtype_code(dtype_name(code)) == code
    assert dtype_name(0) == dtype_name(999) == "undefined"
    assert not known("undefined")


def test_numpy_holds_every_type_that_names_one():
    assert numpy_dtype("float32") == np.float32
    assert numpy_dtype("bfloat16").itemsize == 2
    with pytest.raises(KeyError):
        numpy_dtype("float3")


def test_packed_types_round_up_to_bytes():
    assert [nbytes("int4", count) for count in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert nbytes("complex128", 3) == 48


@pytest.mark.parametrize(
    ("shape", "static", "elements", "text"),
    [
        ((2, 3), True, 6, "float32[2,3]"),
        ((), True, 1, "float32[]"),
        ((0, 3), True, 0, "float32[0,3]"),
        (("N", 3), False, 0, "float32[N,3]"),
        ((None,), False, 0, "float32[?]"),
        (None, False, 0, "float32[?]"),
    ],
)
def test_a_type_knows_whether_its_shape_is_in_numbers(shape, static, elements, text):
    type = TensorType("float32", shape)
    assert (type.static, type.elements, str(type)) == (static, elements, text)
    assert type.nbytes == 4 * elements


def test_a_type_from_another_process_is_found_in_tables():
    """Each process has hashes of its own."""
    code = "import pickle, sys; from gopt.ir.types import TensorType as T; "
    code += "sys.stdout.buffer.write(pickle.dumps(T('float32', (2, 'n', None))))"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    read = pickle.loads(done.stdout)
    assert read == TensorType("float32", (2, "n", None)) and read in {TensorType("float32", (2, "n", None))}
    assert copy.deepcopy(read) == copy.copy(read) == read and (read.static, read.nbytes) == (False, 0)


def test_sizes_that_no_manifest_can_say():
    assert overflows((2**32, 2**32)) and overflows((2**59,)) and overflows((2**60, 0)) and overflows((2**62, "N"))
    assert not overflows((2**58,)) and not overflows((None, "N")) and not overflows(None) and not overflows(())
