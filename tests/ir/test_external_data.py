"""Values beside the model: external data and safetensors, and every file that is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from model_files import FLOAT, refusal, save, small, value
from onnx import ModelProto, TensorProto, helper

from gopt.errors import InputError, UnsupportedError
from gopt.ir.external_data import load_state
from gopt.ir.load import load
from gopt.ir.types import TensorType


def external(location: str, shape: Sequence[int] = (3, 4), **entries: int | str) -> ModelProto:
    tensor = TensorProto(name="w", data_type=FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, item in {"location": location, **entries}.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(item)
    return small(initializer=[tensor])


def test_external_data_is_found_beside_the_model_wherever_we_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(b"pad." + np.arange(12, dtype="<f4").tobytes())
    save(tmp_path, external("sub/../sub/./w.bin", offset=4, length=48))
    monkeypatch.chdir(tmp_path)
    tensor = load("m.onnx").initializers["w"]
    monkeypatch.chdir("/")
    assert tensor.external
    assert tensor.proto is None
    np.testing.assert_array_equal(tensor.numpy(), np.arange(12, dtype=np.float32).reshape(3, 4))


def test_the_model_s_folder_may_be_reached_through_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "w.bin").write_bytes(bytes(48))
    save(real, external("w.bin"))
    (tmp_path / "link").symlink_to(real)
    assert load(tmp_path / "link" / "m.onnx").initializers["w"].numpy().shape == (3, 4)


def test_hard_links_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(bytes(48))
    os.link(tmp_path / "store", tmp_path / "w.bin")
    assert load(save(tmp_path, external("w.bin"))).initializers["w"].external


def test_external_data_is_not_read_by_load(tmp_path: Path) -> None:
    elements = 1 << 28
    with open(tmp_path / "w.bin", "wb") as file:
        file.truncate(4 * elements)
    model = external("w.bin", (3, elements // 3))
    model.graph.output[0].CopyFrom(value("y", ("N", "M")))
    model.graph.input[1].CopyFrom(value("b", (1,)))
    path = save(tmp_path, model)
    # In its own process: what other tests held and freed would hide the growth.
    code = (
        "import resource, sys; from gopt.ir.load import load\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); value = load(sys.argv[1]).initializers['w'].flat_slice(0, 1).numpy(); print(peak() - before)"
    )
    root = Path(__file__).parents[2]
    grown = subprocess.run([sys.executable, "-c", code, path], cwd=root, capture_output=True, text=True, check=True)
    assert int(grown.stdout) < 50 << 10, "KiB"


def no_file(folder: Path) -> None:
    pass


def short_file(folder: Path) -> None:
    (folder / "w.bin").write_bytes(bytes(47))


def full_file(folder: Path) -> None:
    (folder / "w.bin").write_bytes(bytes(64))


def linked_file(folder: Path) -> None:
    (folder / "real.bin").write_bytes(bytes(48))
    (folder / "w.bin").symlink_to("real.bin")


def linked_folder(folder: Path) -> None:
    (folder / "real").mkdir()
    (folder / "real" / "w.bin").write_bytes(bytes(48))
    (folder / "sub").symlink_to("real")


def folder_of_that_name(folder: Path) -> None:
    (folder / "w.bin").mkdir()


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "w.bin")


@pytest.mark.parametrize(
    ("prepare", "entries", "pattern"),
    [
        (no_file, {"location": "w.bin"}, r"'w'.*'w\.bin' cannot be opened: No such file"),
        (no_file, {"location": "w\nx.bin"}, r"'w\\nx\.bin' cannot be opened"),
        (no_file, {"location": "w" * 5000}, r"cannot be opened: File name too long"),
        (no_file, {"location": ""}, "is not a file location"),
        (no_file, {"location": "a\0b"}, "is not a file location"),
        (short_file, {"location": "w.bin"}, "'w.bin' is too short: 47 bytes, 48 needed"),
        (full_file, {"location": "w.bin", "offset": 20}, "'w.bin' is too short: 64 bytes, 68 needed"),
        (full_file, {"location": "w.bin", "offset": 10**18}, "too short"),
        (full_file, {"location": "w.bin", "offset": -4}, "offset is '-4', not a number"),
        (full_file, {"location": "w.bin", "offset": "1" * 5000}, "offset is .* not a number"),
        (full_file, {"location": "w.bin", "length": 40}, r"length is 40 bytes, but float32\[3,4\] takes 48"),
        (full_file, {"location": "w.bin", "length": "x"}, "length is 'x', not a number"),
        (full_file, {"location": "/etc/passwd"}, "'/etc/passwd' is an absolute path"),
        (full_file, {"location": "C:\\w.bin"}, "is an absolute path"),
        (full_file, {"location": "../m/w.bin"}, "leaves the model's folder"),
        (full_file, {"location": "./../w.bin"}, "leaves the model's folder"),
        (linked_folder, {"location": "real/../../w.bin"}, "leaves the model's folder"),
        (linked_file, {"location": "w.bin"}, "goes through a symbolic link"),
        (linked_folder, {"location": "sub/w.bin"}, r"goes through a symbolic link \('sub'\)"),
        (linked_folder, {"location": "sub/../real/w.bin"}, "goes through a symbolic link"),
        (full_file, {"location": "w.bin/x"}, "cannot be opened: Not a directory"),
        (folder_of_that_name, {"location": "w.bin"}, "is not a regular file"),
        (pipe, {"location": "w.bin"}, "is not a regular file"),
    ],
)
def test_bad_external_data(
    tmp_path: Path, prepare: Callable[[Path], None], entries: dict[str, Any], pattern: str
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    prepare(folder)
    refusal(load, save(folder, external(**entries)), InputError, pattern)


def test_external_strings_and_packed_values(tmp_path: Path) -> None:
    full_file(tmp_path)
    for dtype, kind in ((TensorProto.STRING, InputError), (TensorProto.INT4, UnsupportedError)):
        model = external("w.bin")
        model.graph.initializer[0].data_type = dtype
        model.graph.node[0].CopyFrom(helper.make_node("DequantizeLinear", ["w", "b"], ["h"], name="first"))
        if kind is UnsupportedError:
            del model.graph.node[1:]
            model.graph.input[1].CopyFrom(value("b", ()))
            model.graph.node[0].output[0] = "y"
            model.graph.output[0].CopyFrom(value("y", (3, 4)))
            model.opset_import[0].version = 21
        refusal(load, save(tmp_path, model), kind, "'w'")


def safetensors(folder: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "s.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_safetensors_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    half = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    header = {
        "__metadata__": {"by": "hand"},
        "half": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        "step": {"dtype": "I64", "shape": [], "data_offsets": [4, 12]},
        "none": {"dtype": "F32", "shape": [0, 3], "data_offsets": [12, 12]},
    }
    state = load_state(safetensors(tmp_path, header, half.tobytes() + (7).to_bytes(8, "little")))
    assert list(state) == ["half", "step", "none"]
    assert state["half"].external
    assert state["half"].type == TensorType("bfloat16", (2,))
    np.testing.assert_array_equal(state["half"].numpy(), half)
    assert state["step"].numpy() == 7
    assert state["none"].numpy().shape == (0, 3)


def test_safetensors_as_its_own_library_writes_them(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    values = {"w": np.arange(6, dtype=np.float16).reshape(2, 3), "m": np.ones(3, np.float64)}
    library.save_file(values, tmp_path / "s.safetensors")
    state = load_state(tmp_path / "s.safetensors")
    for name, array in values.items():
        np.testing.assert_array_equal(state[name].numpy(), array)


def entry(**changes: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    ("header", "pattern"),
    [
        (b"not json", "header is not JSON"),
        (b"[" * 100_000, "header is nested more than"),
        (b"[]", 'its header: .* is not of type "object"'),
        (b'{"w":{},"w":{}}', "the key 'w' occurs twice"),
        ({"w": 3}, "entry of 'w' is malformed"),
        (entry(shape=["2"]), "entry of 'w' is malformed"),
        (entry(shape=[True]), "entry of 'w' is malformed"),
        (entry(data_offsets=[0]), "entry of 'w' is malformed"),
        (entry(dtype="F3"), "element type 'F3'"),
        (entry(shape=[-2]), "negative dimension"),
        (entry(shape=[2**62]), "overflows"),
        (entry(shape=[3]), r"8 bytes, but float32\[3\] takes 12"),
        (entry(data_offsets=[-8, 0]), "truncated"),
        (entry(data_offsets=[8, 16]), "truncated"),
    ],
)
def test_bad_safetensors(tmp_path: Path, header: object, pattern: str) -> None:
    refusal(load_state, safetensors(tmp_path, header, bytes(8)), InputError, pattern)


def test_bad_state_files(tmp_path: Path) -> None:
    refusal(load_state, tmp_path / "no.npz", InputError, "no such file")
    refusal(load_state, tmp_path, InputError, "is a folder")
    refusal(load_state, save(tmp_path, b"xyz", "s.safetensors"), InputError, "truncated")
    refusal(load_state, save(tmp_path, b"\xff" * 64, "s.safetensors"), InputError, "truncated")
    refusal(load_state, save(tmp_path, b"x", "s.pt"), InputError, r"\.safetensors or an \.npz")
    refusal(load_state, save(tmp_path, b"not a zip", "s.npz"), InputError, r"is not an \.npz file")
