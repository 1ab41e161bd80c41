"""Archives of values as NumPy writes them."""

from __future__ import annotations

import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from model_files import refusal, save

from gopt.errors import InputError
from gopt.ir.external_data import load_state
from gopt.ir.types import TensorType


def test_npz(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    values: dict[str, Any] = {
        "w": np.arange(6, dtype=">f4").reshape(2, 3),
        "a/b": np.asfortranarray(np.ones((2, 2), np.int64)),
    }
    np.savez_compressed(path, **values)
    state = load_state(path)
    assert state["w"].type == TensorType("float32", (2, 3))
    for name, array in values.items():
        np.testing.assert_array_equal(state[name].numpy(), array)


def read_state(path: Path) -> dict[str, object]:
    """Every array of a file: those of an archive are looked at when they are asked for."""
    return dict(load_state(path))


def test_bad_npz(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    np.savez(path, o=np.array([{}], dtype=object))
    refusal(read_state, path, InputError, r"at 'o': Object arrays cannot be loaded")
    np.savez(path, half=np.ones(2, ml_dtypes.bfloat16))
    assert "safetensors" in refusal(read_state, path, InputError, "'half' has the NumPy type").hints[0]
    np.savez(path, text=np.array(["a"]))
    refusal(read_state, path, InputError, "'text' has the NumPy type")
    np.savez_compressed(path, w=np.arange(1000))
    damaged = bytearray(path.read_bytes())
    damaged[200:220] = bytes(20)
    held = load_state(save(tmp_path, bytes(damaged), "s.npz"))["w"]
    refusal(lambda _: held.numpy(), path, InputError, "damaged at 'w'")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w.npy", b"\x93NUMPY\x01\x00\x08\x00{'descr'")
    refusal(read_state, path, InputError, "damaged at 'w'")


def test_headers_are_parsed_by_one_thread_at_a_time(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "s.npz"
    np.savez(path, w=np.arange(6))
    parse, both = np.lib.format.read_array_header_1_0, threading.Barrier(2)
    together: list[bool] = []

    def parsed(*given: Any) -> Any:
        try:
            both.wait(0.2)
            together.append(True)
        except threading.BrokenBarrierError:  # no other thread came while this one was here
            together.append(False)
            both.reset()
        return parse(*given)

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", parsed)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: load_state(path)["w"].numpy(), range(2)))
    assert together == [False, False]
    assert all(np.array_equal(each, np.arange(6)) for each in found)
