"""The fakes of ``fake_gpu`` against the real packages: the same names, the same parameters."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import fake_gpu
import onnxruntime
import pytest

real = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("nccl", "cuda")), reason="needs pip install 'gopt[nccl]'"
)


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each; the names alone where a compiled function tells no more."""
    found = list(inspect.signature(function).parameters.values())
    return [(each.name, each.kind, each.default) for each in found if each.name not in ("self", "cls")]


def functions(kind: type) -> list[str]:
    return [name for name, item in vars(kind).items() if not name.startswith("_") and inspect.isfunction(item)]


@real
@pytest.mark.parametrize("name", [name for name in functions(fake_gpu.FakeCudart) if name.startswith("cuda")])
def test_cuda(name):
    from cuda.bindings import runtime

    assert parameters(getattr(fake_gpu.FakeCudart, name)) == parameters(getattr(runtime, name))


@real
def test_cudas_constants():
    from cuda.bindings import runtime

    for mine, theirs in ((fake_gpu.Status, runtime.cudaError_t), (fake_gpu.Kind, runtime.cudaMemcpyKind)):
        assert {each.name: int(each) for each in mine} == {each.name: int(getattr(theirs, each.name)) for each in mine}
    for name in ("cudaStreamNonBlocking", "cudaEventDisableTiming"):
        assert getattr(fake_gpu.FakeCudart, name) == getattr(runtime, name)


@real
def test_cuda_takes_addresses_and_streams_as_numbers():
    """Without a driver it answers with an error, and only after it has read its arguments."""
    from cuda.bindings import runtime

    if runtime.cudaGetDeviceCount()[0] == runtime.cudaError_t.cudaSuccess:
        pytest.skip("there is a GPU, which would follow these addresses")
    kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    event = runtime.cudaEvent_t(0)
    for name, arguments in {
        "cudaMemcpyAsync": (4096, 8192, 16, kind, 7), "cudaMemcpy2DAsync": (4096, 8, 8192, 8, 4, 2, kind, 7),
        "cudaEventRecord": (event, 7), "cudaStreamWaitEvent": (7, event, 0), "cudaStreamSynchronize": (7,),
        "cudaEventQuery": (event,), "cudaEventDestroy": (event,), "cudaDeviceGetPCIBusId": (32, 0),
        "cudaSetDevice": (0,),
    }.items():  # fmt: skip
        assert int(getattr(runtime, name)(*arguments)[0]) != 0, name
    assert int(runtime.cudaStream_t(4096)) == 4096


@real
@pytest.mark.parametrize("name", ["init", *functions(fake_gpu.Communicator)])
def test_nccls_communicator(name):
    import nccl.core

    assert parameters(getattr(fake_gpu.Communicator, name)) == parameters(getattr(nccl.core.Communicator, name))


@real
def test_nccls_functions_and_operators():
    import nccl.core

    for name in ("get_unique_id", "group"):
        assert parameters(getattr(fake_gpu.FakeNccl, name)) == parameters(getattr(nccl.core, name))
    assert parameters(fake_gpu.UniqueId.from_bytes) == parameters(nccl.core.UniqueId.from_bytes)
    assert {each.name: int(each) for each in fake_gpu.Op} == {
        each.name: int(each) for each in nccl.core.NcclRedOp
    }  # fmt: skip
    assert bytes(nccl.core.UniqueId.from_bytes(b"x" * 128)) == b"x" * 128


@real
def test_nccl_reads_what_a_block_says_of_itself():
    """Its types by NumPy's word; there is none for the halves and booleans, which travel as others."""
    import numpy as np
    from nccl.core import NcclDataType

    for word in ("uint8", "int8", "int32", "uint32", "int64", "uint64", "float32", "float64"):
        assert NcclDataType(np.dtype(np.dtype(word).str)).name == word.upper()


@pytest.mark.parametrize("name", ["bind_input", "bind_output"])
def test_bindings_of_the_runtime(name):
    assert parameters(getattr(fake_gpu.FakeBinding, name)) == parameters(getattr(onnxruntime.IOBinding, name))


def test_the_runtimes_functions():
    mine, theirs = fake_gpu.FakeOrtValue.ortvalue_from_shape_and_type, onnxruntime.OrtValue
    assert parameters(mine) == parameters(theirs.ortvalue_from_shape_and_type)
    assert parameters(fake_gpu.FakeSession.run_with_iobinding) == parameters(
        onnxruntime.InferenceSession.run_with_iobinding
    )
    assert parameters(fake_gpu.FakeRuntime.preload_dlls) == parameters(onnxruntime.preload_dlls)
    assert "providers" in inspect.signature(onnxruntime.InferenceSession).parameters
    onnxruntime.RunOptions().add_run_config_entry("disable_synchronize_execution_providers", "1")
