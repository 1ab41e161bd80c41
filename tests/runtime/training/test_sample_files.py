"""What ``--data`` names on disk, read in batches: equal to the same samples as one archive."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from gopt.artifact.safetensors_file import safetensors_chunks
from gopt.errors import GoptError
from gopt.ir.types import TensorType
from gopt.runtime.training.array_source import MicroStep, SampleOrder
from gopt.runtime.training.data import check_data, open_data
from gopt.runtime.training.sample_files import on_disk, sample_paths

TYPES = {"x": TensorType("float32", (4, 3)), "y": TensorType("int64", (4,))}
ROWS = {"x": np.arange(66, dtype="f4").reshape(22, 3), "y": np.arange(22)}
CUTS = (0, 9, 10, 22)


def _npz(folder: Path) -> None:
    for number, (start, stop) in enumerate(itertools.pairwise(CUTS)):
        np.savez(folder / f"part{8 + number}.npz", **{name: rows[start:stop] for name, rows in ROWS.items()})


def _safetensors(folder: Path) -> None:
    for number, (start, stop) in enumerate(itertools.pairwise(CUTS)):
        kept = {name: rows[start:stop] for name, rows in ROWS.items()}
        types = {name: TensorType(rows.dtype.name, rows.shape) for name, rows in kept.items()}
        (folder / f"part{8 + number}.safetensors").write_bytes(b"".join(safetensors_chunks(types, kept.values())))


def _npy(folder: Path) -> None:
    np.save(folder / "x.npy", ROWS["x"])
    for number, (start, stop) in enumerate(itertools.pairwise(CUTS)):
        np.save(folder / f"y-{number:05}-of-00003.npy", ROWS["y"][start:stop].astype("i4"))


def batches(data: str, types: dict[str, TensorType], order: SampleOrder) -> list[dict[str, np.ndarray]]:
    source = open_data(data, types, order)
    return [source.batch(MicroStep(number, part, 2)) for number in range(7) for part in range(2)]


@pytest.mark.parametrize("write", [_npz, _safetensors, _npy])
@pytest.mark.parametrize("order", [SampleOrder(), SampleOrder(3), SampleOrder(3, last="drop")])
def test_a_folder_of_shards_has_the_batches_of_one_archive(write, order, tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    write(folder)
    (folder / "notes.txt").write_text("of no samples")
    np.savez(tmp_path / "whole.npz", **ROWS)
    for mine, whole in zip(batches(str(folder), TYPES, order), batches(str(tmp_path / "whole.npz"), TYPES, order)):
        for name, type in TYPES.items():
            np.testing.assert_array_equal(mine[name], whole[name])
            assert mine[name].dtype == type.dtype


def test_shards_of_half_a_batch_are_one_batch(tmp_path):
    for number in range(2):
        np.savez(tmp_path / f"{number}.npz", x=ROWS["x"][2 * number :][:2], y=ROWS["y"][2 * number :][:2])
    found = open_data(str(tmp_path), TYPES).batch(MicroStep(5, 1, 2))
    np.testing.assert_array_equal(found["y"], [0, 1, 2, 3])


@pytest.mark.parametrize("form", ["bin", "npy"])
@pytest.mark.parametrize("order", [SampleOrder(), SampleOrder(1)])
def test_tokens_are_windows_and_targets_are_shifted(form, order, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 60000, 83).astype(np.uint16)
    if form == "bin":
        tokens.tofile(tmp_path / "t.bin")
        data = f"{tmp_path}/t.bin:uint16:targets=1,idx=0"
    else:
        np.save(tmp_path / "t.npy", tokens)
        data = f"{tmp_path}/t.npy:idx=0,targets=1"
    types = {name: TensorType("int64", (2, 5)) for name in ("idx", "targets")}
    seen = []
    for batch in batches(data, types, order):
        assert batch["idx"].dtype == np.int64
        for row, target in zip(batch["idx"], batch["targets"]):
            np.testing.assert_array_equal(row[1:], target[:-1])
            place = next(at for at in range(0, 82, 5) if (tokens[at : at + 5] == row).all())
            assert tokens[place + 5] == target[-1]
            seen.append(place // 5)
    assert sorted(seen[:16]) == [*range(16)] and (seen[:16] == [*range(16)]) == (order.shuffle is None)
    alone = open_data(data.partition(":")[0] + (":uint16" if form == "bin" else ""), {"ids": types["idx"]})
    np.testing.assert_array_equal(alone.batch(MicroStep(0, 0, 1))["ids"].reshape(-1), tokens[:10])


IDX = {"idx": TensorType("int64", (2, 5)), "targets": TensorType("int64", (2, 5))}


@pytest.mark.parametrize(
    ("types", "text", "said", "hint"),
    [
        (IDX, "t.bin:uint16", "it is open which begins how many tokens later", ":idx=0,targets=1"),
        (IDX, "t.bin:uint16:idx=0", "says nothing of targets", ":idx=0,targets=1"),
        (IDX, "t.bin:uint16:idx=0,idx=1", "cannot read 'idx=1'", ":idx=0,targets=1"),
        (IDX, "t.bin:uint16:idx=0,targets=-1", "cannot read 'targets=-1'", ":idx=0,targets=1"),
        (IDX, "t.bin:int32:idx=0,targets=1", "has 26 bytes, and numbers of int32 take 4 each", ""),
        (IDX, "t.bin:uint16:idx=0,targets=9", "holds 13 tokens, and one sample takes 14", ""),
        (TYPES, "t.bin:uint16:x=0,y=1", "tokens feed inputs of one length", "module:function"),
        (TYPES, "x.npy", "is one array, and a batch has x, y", "one file per input"),
        (TYPES, "empty", "holds no samples", ".npz"),
        (TYPES, "lacks", "has no array 'y'", "it has x"),
        (TYPES, "unlike", "'x' is float32[2,3] in", "rows of all shards have one type"),
        (TYPES, "columns.npy:x=0,y=1", "column by column", "ascontiguousarray"),
        (TYPES, "cut.npy:x=0,y=1", "holds 40 bytes, but float32[4,3] takes 48", ""),
        (TYPES, "gone/", "cannot read", "a folder of such files"),
    ],
)
def test_what_does_not_fit_is_named(types, text, said, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.arange(13, dtype=np.uint16).tofile("t.bin")
    np.save("x.npy", ROWS["x"])
    np.save("columns.npy", np.asfortranarray(ROWS["x"]))
    np.save("cut.npy", ROWS["x"][:4])
    os.truncate("cut.npy", os.path.getsize("cut.npy") - 8)
    for name in ("empty", "lacks", "unlike"):
        os.mkdir(name)
    np.save("lacks/x.npy", ROWS["x"])
    for number, width in enumerate((3, 4)):
        np.savez(f"unlike/{number}.npz", x=np.zeros((2, width), "f4"), y=np.zeros(2, "i8"))
    with pytest.raises(GoptError) as caught:
        open_data(text, types)
    assert said in caught.value.message and hint in " ".join(caught.value.hints)


def test_files_are_found_without_reading_them(tmp_path):
    _npz(tmp_path)
    assert [os.path.basename(each) for each in sample_paths(str(tmp_path))] == ["part8.npz", "part9.npz", "part10.npz"]
    check_data(str(tmp_path))
    assert not on_disk("module:function") and on_disk("t.bin:uint16") and not on_disk("t.bin:text")
    with pytest.raises(GoptError):
        check_data(f"{tmp_path}/gone.bin:uint16")
