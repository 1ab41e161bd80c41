"""The map of bytes is what merge reads: put together by a few lines of NumPy, it gives the values that merge writes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, edit_ranks

import gopt
from gopt.artifact.manifest_check import read_manifest

LAYOUTS: dict[str, tuple[str, list[str]]] = {
    "flat": ("mlp_adamw", ["shard", "--ranks", "3"]),
    "rows": ("mlp_adamw", ["shard", "--mesh", "dp=2,shard=3", "--stage", "3", "--partition", "rows"]),
    "owners": ("mlp_adamw", ["shard", "--ranks", "2", "--partition", "whole"]),
    "copies": ("mlp_adamw", ["shard", "--ranks", "2", "--stage", "0"]),
    "boxes": ("families/llama_adamw_clip", ["shard", "--mesh", "dp=2,tp=2"]),
    "boxes in parts": ("gpt_adamw", ["shard", "--mesh", "shard=2,tp=2", "--stage", "3"]),
    "keys": ("mlp_adamw", ["split", "--trainers", "2", "--servers", "3", "--minimum", "16"]),
    "tables": ("sparse/dlrm_adagrad", ["split", "--trainers", "2", "--servers", "3", "--table", "*=modulo"]),
    "columns": ("sparse/dlrm_adagrad", ["split", "--trainers", "2", "--servers", "3", "--table", "*=columns"]),
}


def written(layout: str, folder: Path) -> Path:
    name, (verb, *arguments) = LAYOUTS[layout]
    assert main([verb, str(FIXTURES / f"{name}.onnx"), *arguments, "-o", str(folder / "out"), "-q"]) == 0
    return folder / "out"


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A step of a checkpoint of ranks with shards."""
    folder = written("flat", tmp_path)
    random = np.random.default_rng(0)
    batch = {"x": random.standard_normal((96, 32), np.float32), "y": random.integers(0, 10, 96)}
    gopt.run(folder, batch, 1, settings={"lr": 0.1}, checkpoint=tmp_path / "kept")
    return tmp_path / "kept" / "step_00000001"


def explained(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["merge", str(path), "--explain", "--json"]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def put_together(path: Path, record: dict[str, Any], folder: Path) -> dict[str, bytes]:
    """The bytes of every state by the map; each element must be named once."""
    types = {state.tensor: state for state in read_manifest(folder)[0].states}
    arrays, times = {}, {}
    for row in record["pieces"]:
        name = row["tensor"]
        shape, dtype = (
            types[name].shape,
            onnx.helper.tensor_dtype_to_np_dtype(
                onnx.TensorProto.DataType.Value(types[name].dtype.upper().replace("FLOAT32", "FLOAT"))
            ),
        )
        places = np.arange(int(np.prod(shape))).reshape(shape)
        for axis, side in enumerate(row.get("box", [])):
            ranges = [np.arange(low, high) for low, high in zip(side[::2], side[1::2])]
            places = np.take(places, np.concatenate(ranges), axis)
        first, step = row.get("every", (0, 1))
        places = (places[first::step] if shape else places).reshape(-1)[row["start"] : row["stop"]]
        data = (path / row["file"]).read_bytes()[row["offset"] : row["offset"] + row["bytes"]]
        assert hashlib.sha256(data).hexdigest() == row["sha256"] and len(data) == row["bytes"]
        arrays.setdefault(name, np.zeros(int(np.prod(shape)), dtype))[places] = np.frombuffer(data, dtype)
        times.setdefault(name, Counter()).update(places.tolist())
    for name, count in times.items():
        assert count == Counter(range(arrays[name].size)), f"{name} is not named once"
    return {name: array.tobytes() for name, array in arrays.items()}


def merged(path: Path, folder: Path) -> dict[str, bytes]:
    """The values that merge writes, as onnx reads them."""
    gopt.merge(path, folder / "merged.onnx", force=True)
    tensors = onnx.load(folder / "merged.onnx").graph.initializer
    return {tensor.name: onnx.numpy_helper.to_array(tensor).tobytes() for tensor in tensors}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_of_the_map_are_what_merge_writes(layout, tmp_path, capsys):
    out = written(layout, tmp_path)
    record = explained(out, capsys)
    values = put_together(out, record, out)
    states = {state.tensor for state in read_manifest(out)[0].states}
    assert values.keys() | set(record["missing"]) == states
    written_values = merged(out, tmp_path)
    assert values == {name: written_values[name] for name in values}
    assert record["document"] == "manifest.json" and record["files"].keys() == {"states.bin"}


def test_the_map_of_a_checkpoint_names_the_ranks_files(checkpoint, tmp_path, capsys):
    record = explained(checkpoint, capsys)
    values = put_together(checkpoint, record, checkpoint.parent)
    written_values = merged(checkpoint, tmp_path)
    assert values == {name: written_values[name] for name in values} and not record["missing"]
    assert record["document"] == "index.json"
    assert record["files"] == json.loads((checkpoint / "index.json").read_text())["files"]


def test_offsets_that_were_swapped_show(tmp_path, capsys):
    out = written("copies", tmp_path)
    record = explained(out, capsys)
    one, two = (
        next(row for row in record["pieces"] if row["tensor"] == name) for name in ("fc1.weight", "fc1.weight.exp_avg")
    )
    assert one["bytes"] == two["bytes"] and one["sha256"] != two["sha256"]
    before = put_together(out, record, out)
    places = {str(row["offset"]): str(other["offset"]) for row, other in ((one, two), (two, one))}

    def swap(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "offset":
                    entry.value = places.get(entry.value, entry.value)

    edit_ranks(out, swap)
    after = explained(out, capsys)
    moved = [(old, new) for old, new in zip(record["pieces"], after["pieces"]) if old != new]
    assert [old["tensor"] for old, _ in moved] == [one["tensor"], two["tensor"]]
    assert {(new["offset"], new["sha256"]) for _, new in moved} == {
        (row["offset"], row["sha256"]) for row in (one, two)
    }
    values = put_together(out, after, out)
    written_values = merged(out, tmp_path)
    assert values != before and values == {name: written_values[name] for name in values}


def test_a_changed_byte_is_refused_by_the_files_name(tmp_path, checkpoint, capsys):
    for path, code in ((tmp_path / "out/states.bin", 3), (checkpoint / "rank_0001.safetensors", 5)):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        capsys.readouterr()
        for verb in ("merge", "reshard"):
            assert main([verb, str(path.parent), "--explain"]) == code
            said = capsys.readouterr()
            assert str(path) in said.err and not said.out


def test_a_map_is_of_files_with_digests(tmp_path, capsys):
    out = written("flat", tmp_path)
    assert main(["merge", str(out), "--explain", "--unchecked"]) == 2
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["files"], manifest["seal"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert main(["merge", str(out), "--explain"]) == 3
    assert f"hint: gopt seal {out} adds them" in capsys.readouterr().err
    for more in (["-o", "m.onnx"], ["--state-dict", "m.pt"], ["--inference"]):
        assert main(["merge", str(out), "--explain", *more]) == 2
    assert main(["reshard", str(out), "--explain", "--ranks", "2"]) == 2 and main(["reshard", str(out)]) == 2


@pytest.mark.parametrize("layout", ["boxes in parts", "tables"])
def test_the_table_has_eighty_columns(layout, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = written(layout, tmp_path)
    rows = explained(out, capsys)["pieces"]
    assert main(["reshard", str(out), "--explain"]) == 0
    said = capsys.readouterr().out
    assert all(len(line) <= 80 for line in said.splitlines())
    for row in rows:
        assert any(
            all(word in line.split() for word in (str(row["offset"]), str(row["bytes"]), row["sha256"][:8]))
            for line in said.splitlines()
        )
    assert "1 file has the digest of manifest.json" in said
