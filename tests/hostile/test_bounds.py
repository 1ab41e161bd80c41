"""Files that would take gigabytes or forever: each is refused, by the name of a limit, in little of both."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from children import Ended, run
from gopt.cli.main import main
from helpers import FIXTURES, Builder, perceptron
from onnx import helper
from products import part, spread

from gopt import limits
from gopt.errors import InputError
from gopt.ir.external_data import load_state

MEMORY = 500 << 20
"""What a refusal may take. How long it takes is the machine's matter: ``run`` ends what does not end."""
MODEL = str(FIXTURES / "mlp_sgd.onnx")


def refused(ended: Ended, code: int, *words: str) -> None:
    assert ended.code == code, ended.said
    assert ended.said.startswith("gopt: error: ")
    for word in words:
        assert word in ended.said
    assert ended.peak < MEMORY, f"{ended.peak >> 20} MiB"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "out"
    assert main(["shard", MODEL, "--ranks", "2", "-o", str(folder)]) == 0
    return folder


def bomb(path: Path, arrays: dict[str, tuple[tuple[int, ...], str]]) -> None:
    """Arrays of zeros, written without ever being held."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, (shape, dtype) in arrays.items():
            header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array_header_1_0(file, header)
                left = int(np.prod(shape)) * np.dtype(dtype).itemsize
                while left:
                    left -= file.write(bytes(min(left, 1 << 24)))


# --- models -----------------------------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def inside(tag: int, content: bytes) -> bytes:
    return bytes([tag << 3 | 2]) + varint(len(content)) + content


NODES = inside(1, b"") * 2_100_000


@pytest.mark.rest
@pytest.mark.parametrize(
    "body", part([NODES, inside(1, inside(4, b"If") + inside(5, inside(6, NODES)))], 1, first=1), ids=["top", "if"]
)
def test_millions_of_empty_nodes(tmp_path, body):
    (tmp_path / "m.onnx").write_bytes(b"\x08\x0a" + inside(7, body) + inside(8, b"\x10\x14"))
    refused(run("inspect", "m.onnx", folder=tmp_path), 3, "m.onnx", "more than 2000000 nodes", "PARTS")


def attribute(content: bytes) -> bytes:
    return inside(1, inside(5, inside(1, b"a") + content) + inside(4, b"Foo"))


def numbers() -> bytes:
    return b"\x01" * 60_000_000


@pytest.mark.parametrize(
    ("body", "said"),
    part(
        [
            (lambda: attribute(inside(8, numbers()) + b"\xa0\x01\x07"), "LIST_ELEMENTS"),
            (lambda: attribute(inside(7, numbers()) + b"\xa0\x01\x06"), "LIST_ELEMENTS"),
            (lambda: attribute(b"\x40\x01" * 9_000_000 + b"\xa0\x01\x07"), "PARTS"),
            (lambda: attribute(b"\x18\x01" * 9_000_000), "PARTS"),
            (lambda: inside(5, inside(1, numbers()) + b"\x10\x07" + inside(8, b"t")), "LIST_ELEMENTS"),
            (lambda: inside(5, b"\x08\x01" * 9_000_000 + b"\x10\x07" + inside(8, b"t")), "PARTS"),
            (lambda: inside(11, inside(2, inside(1, inside(2, inside(1, b"") * 20_000_000)))), "PARTS"),
        ],
        1,
        first=1,
    ),
    ids=["ints", "floats", "unpacked", "numbers", "dims", "dims unpacked", "shape"],
)
def test_lists_without_an_end(tmp_path, body, said):
    (tmp_path / "m.onnx").write_bytes(b"\x08\x0a" + inside(7, body() + inside(2, b"g")) + inside(8, b"\x10\x14"))
    refused(run("inspect", "m.onnx", folder=tmp_path), 3, "m.onnx", said)


def test_a_file_of_zeros(tmp_path):
    with (tmp_path / "m.onnx").open("wb") as file:
        file.truncate(1900 << 20)
    refused(run("inspect", "m.onnx", folder=tmp_path), 3, "m.onnx", "not an ONNX model")


# --- documents --------------------------------------------------------------------------------------------------------

START = b'{"format": "gopt-manifest/1", "a": ['


@pytest.mark.parametrize(
    ("text", "said"),
    part(
        [
            (lambda: b'"\\' * 100_000, "is not JSON"),
            (lambda: START + b",".join([b'{"a":' * 27 + b"1" + b"}" * 27] * 36_000), "is not JSON"),
            (lambda: START + b",".join([b'{"a":' * 27 + b"1" + b"}" * 27] * 36_000) + b"]}", "is missing"),
            (
                lambda: START + b",".join(b'{"aaaaaaaaaa%d":1.%d}' % (n, n) for n in range(900_000)) + b"]}",
                "is missing",
            ),
        ],
        1,
    ),
    ids=["quotes", "open", "tables", "keys"],
)
def test_a_manifest_that_would_grow(tmp_path, text, said):
    (tmp_path / "manifest.json").write_bytes(text())
    refused(run("inspect", ".", folder=tmp_path), 3, "manifest.json", said)


def test_a_manifest_above_the_output_that_would_grow(tmp_path):
    """It is looked at for what it is, and is nothing of gopt's."""
    (tmp_path / "manifest.json").write_bytes(b'"\\' * 400_000)
    ended = run("shard", MODEL, "--ranks", "2", "-o", "out", folder=tmp_path)
    assert ended.code == 0, ended.said
    assert ended.peak < MEMORY


def test_a_header_of_values_that_does_not_end(tmp_path):
    text = b'{"' + b'"\\' * 500_000
    (tmp_path / "s.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    ended = run("shard", MODEL, "--ranks", "2", "--state", "s.safetensors", folder=tmp_path)
    refused(ended, 3, "s.safetensors", "is not JSON")


def test_a_key_of_many_parts(tmp_path):
    (tmp_path / "gopt.toml").write_bytes(b".".join([b"a"] * 20_000) + b"=1")
    refused(run("inspect", MODEL, "--config", "gopt.toml", folder=tmp_path), 3, "gopt.toml", "CONFIG_DOTS")


# --- archives ---------------------------------------------------------------------------------------------------------


def test_samples_that_are_a_thousand_times_larger_inside(tmp_path, ranks):
    bomb(tmp_path / "data.npz", {"x": ((4_000_000, 32), "float32"), "y": ((4_000_000,), "int64")})
    ended = run("run", str(ranks), "--data", "data.npz", "--steps", "1", "--set", "lr=0.1", folder=tmp_path)
    refused(ended, 3, "data.npz", "'x' takes 512000000 bytes", "ARCHIVE_FREE")


def test_what_is_not_asked_for_is_not_read(tmp_path, ranks):
    arrays = {"x": ((16, 32), "float32"), "y": ((16,), "int64"), "other": ((140_000_000,), "float32")}
    bomb(tmp_path / "data.npz", arrays)
    ended = run("run", str(ranks), "--data", "data.npz", "--steps", "1", "--set", "lr=0.1", folder=tmp_path)
    assert ended.code == 0, ended.said
    assert ended.peak < MEMORY


def test_headers_of_what_is_not_asked_for_are_not_read(tmp_path, ranks):
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        for number in range(20_000):
            archive.writestr(f"a{number}.npy", b"no array")
    ended = run("run", str(ranks), "--data", "data.npz", "--steps", "1", "--set", "lr=0.1", folder=tmp_path)
    refused(ended, 3, "data.npz has no array", "it has a0, a1, a10", "and 19992 more")


def test_rows_are_counted_before_they_are_read(tmp_path, ranks):
    bomb(tmp_path / "data.npz", {"x": ((1_990_000, 32), "float32"), "y": ((64,), "int64")})
    ended = run("run", str(ranks), "--data", "data.npz", "--steps", "1", "--set", "lr=0.1", folder=tmp_path)
    refused(ended, 3, "data.npz", "'x' has 1990000 rows", "'y' has 64 rows", "no longer belong together")
    assert ended.peak < 350 << 20


def test_a_state_of_another_size_is_not_read(tmp_path):
    bomb(tmp_path / "s.npz", {"fc1.weight": ((140_000_000,), "float32")})
    ended = run("shard", MODEL, "--ranks", "2", "--state", "s.npz", folder=tmp_path)
    refused(ended, 3, "s.npz", "'fc1.weight' is float32[140000000]")


def test_an_archive_of_a_million_names(tmp_path):
    entry = b"PK\x01\x02" + bytes(24) + (0).to_bytes(2, "little") + bytes(16)
    listed = entry * 500_000
    end = b"PK\x05\x06" + bytes(4) + b"\xff\xff\xff\xff" + len(listed).to_bytes(4, "little") + bytes(4) + bytes(2)
    (tmp_path / "s.npz").write_bytes(listed + end)
    refused(run("shard", MODEL, "--ranks", "2", "--state", "s.npz", folder=tmp_path), 3, "ARCHIVE_DIRECTORY")


def npz(path: Path, content: bytes, kind: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("w.npy", content)
    return path


HEADER = b"\x93NUMPY\x02\x00"


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        (HEADER + (2**32 - 1).to_bytes(4, "little") + b" " * 100, zipfile.ZIP_DEFLATED, "at most 10000 are read"),
        (b"\x93NUMPY\x09\x00" + bytes(200), zipfile.ZIP_DEFLATED, "is not a NumPy array of version"),
        (b"", zipfile.ZIP_STORED, "is not a NumPy array"),
        (b"x" * 200, zipfile.ZIP_LZMA, "a way that NumPy never writes"),
    ],
)
def test_members_that_are_no_arrays(tmp_path, content, kind, said):
    with pytest.raises(InputError, match=said):
        dict(load_state(npz(tmp_path / "s.npz", content, kind)))


@pytest.mark.parametrize("shape", ["(2**60,)", "(1000000000000,)", "(3,)", "(-1,)", "(2**70,)"])
def test_a_header_that_lies_about_its_size(tmp_path, shape):
    shape = str(eval(shape))  # what stands in such a file
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(8)
    with pytest.raises(InputError, match=r"takes|overflows|negative|damaged"):
        dict(load_state(npz(tmp_path / "s.npz", content)))


def test_an_array_whose_bytes_end_early(tmp_path):
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (9,), }\n"
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(16)
    with pytest.raises(InputError, match=r"holds 16 bytes, but float32\[9\] takes 36"):
        dict(load_state(npz(tmp_path / "s.npz", content)))


def test_arrays_come_as_they_were_written(tmp_path):
    arrays = {
        "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "s": np.array(3, np.int8),
        "e": np.zeros((0, 4), bool),
    }
    np.savez_compressed(tmp_path / "s.npz", **arrays)
    for name, tensor in load_state(tmp_path / "s.npz").items():
        np.testing.assert_array_equal(tensor.numpy(), arrays[name])
        assert tensor.numpy().dtype == arrays[name].dtype
        assert tensor.type.dims == arrays[name].shape


@pytest.mark.parametrize(("kind", "place"), spread(["pipe", "device", "folder", "nothing"], ["model", "state", "data"]))
def test_what_is_no_file(tmp_path, ranks, place, kind):
    path = tmp_path / {"model": "m.onnx", "state": "s.npz", "data": "s.safetensors"}[place]
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    arguments = {
        "model": ["shard", path.name, "--ranks", "2"],
        "state": ["shard", MODEL, "--ranks", "2", "--state", path.name],
        "data": ["run", str(ranks), "--data", path.name, "--steps", "1", "--set", "lr=0.1"],
    }[place]
    refused(run(*arguments, folder=tmp_path, timeout=60), 3, path.name)


# --- models -----------------------------------------------------------------------------------------------------------


def doubling(levels: int) -> onnx.ModelProto:
    """A step whose update is a function that calls another twice, which calls another twice, and so on."""
    b = Builder()
    net = perceptron(b, (3, 2), bias=False)
    b.output("loss", net.loss, ())
    b.extra_domains.append("user")
    new = b.op(f"F{levels - 1}", "w0", net.gradients["w0"], domain="user")
    b.output("w0_out", new, (3, 2))
    model = b.model()
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("user", 1)]
    for level in range(levels):
        if level:
            kind = f"F{level - 1}"
            nodes = [helper.make_node(kind, ["w", "g"], ["m"], domain="user"),
                     helper.make_node(kind, ["m", "g"], ["z"], domain="user")]  # fmt: skip
        else:
            nodes = [helper.make_node("Sub", ["w", "g"], ["z"])]
        model.functions.append(helper.make_function("user", f"F{level}", ["w", "g"], ["z"], nodes, opsets))
    return model


@pytest.mark.parametrize("levels", part([18, 25, 90], 1, first=1))
def test_functions_that_double(tmp_path, levels):
    onnx.save(doubling(levels), str(tmp_path / "m.onnx"))
    ended = run("shard", "m.onnx", "--ranks", "2", folder=tmp_path)
    refused(ended, 3, "m.onnx", "FUNCTION_NODES" if levels < 90 else "FUNCTION_")


def test_functions_that_double_a_little_are_expanded(tmp_path):
    onnx.save(doubling(8), str(tmp_path / "m.onnx"))
    ended = run("shard", "m.onnx", "--ranks", "2", folder=tmp_path)
    assert ended.code == 0, ended.said


def looping(trips: int | None) -> Builder:
    """A step whose loss passes through a loop of so many trips; None: without an end."""
    b = Builder()
    net = perceptron(b, (3, 2), bias=False)
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["still"]), helper.make_node("Abs", ["held"], ["next"])], "body",
        [helper.make_tensor_value_info(*each) for each in (("i", 7, ()), ("go", 9, ()), ("held", 1, ()))],
        [helper.make_tensor_value_info(*each) for each in (("still", 9, ()), ("next", 1, ()))],
    )  # fmt: skip
    count = "" if trips is None else b.const(trips, "int64")
    loss = b.op("Loop", count, b.const(True, "bool"), net.loss, body=body)
    b.output("loss", loss, ())
    b.output("w0_out", b.op("Sub", "w0", b.op("Mul", net.gradients["w0"], b.const(0.1))), (3, 2))
    return b


@pytest.mark.rest
@pytest.mark.parametrize("trips", [None, pytest.param(2**62, marks=pytest.mark.slow)])
def test_a_loop_without_an_end_ends_by_the_deadline(tmp_path, trips):
    looping(trips).save(tmp_path / "m.onnx")
    assert run("shard", "m.onnx", "--ranks", "2", "-o", "out", folder=tmp_path).code == 0
    ended = run("verify", "out", "--deadline", "2", folder=tmp_path)
    refused(ended, 5, "after 2 s", "--deadline", "loop")


@pytest.mark.rest
def test_a_loop_with_an_end_is_verified(tmp_path):
    looping(3).save(tmp_path / "m.onnx")
    assert run("shard", "m.onnx", "--ranks", "2", "-o", "out", folder=tmp_path).code == 0
    assert run("verify", "out", "--steps", "1", "--deadline", "60", folder=tmp_path).code == 0


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "ranks"), spread(["shard", "plan"], [limits.RANKS + 1, 10**18]))
def test_more_ranks_than_one_command_takes(tmp_path, command, ranks):
    ended = run(command, MODEL, "--ranks", str(ranks), folder=tmp_path)
    refused(ended, 2, str(ranks), "RANKS")


def test_ranks_for_which_the_disk_has_no_room(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100_000))
    assert main(["shard", MODEL, "--ranks", "50000"]) == 5
    said = capsys.readouterr().err
    assert "50000 ranks take at least" in said
    assert "100000 are free" in said
    assert not list(tmp_path.iterdir())


# --- what inference would make of it ----------------------------------------------------------------------------------


def stepping(extra) -> Builder:
    """A step whose loss has a mean of something added."""
    b = Builder()
    net = perceptron(b, (3, 2), bias=False)
    loss = b.op("Add", net.loss, b.op("ReduceMean", b.op("Cast", extra(b), to=1), keepdims=0))
    b.output("loss", loss, ())
    b.output("w0_out", b.op("Sub", "w0", b.op("Mul", net.gradients["w0"], b.const(0.1))), (3, 2))
    return b


def doubled(b: Builder, times: int) -> str:
    value = b.const([1], "int64")
    for _ in range(times):
        value = b.op("Concat", value, value, axis=0)
    return value


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (lambda b: b.op("Split", b.const([1.0, 2.0]), axis=0, num_outputs=2**31 - 1), "'num_outputs'"),
        (lambda b: b.op("RandomNormal", shape=[1] * 5000), "'shape' of node"),
    ],
)
def test_attributes_that_make_outputs_or_dimensions(tmp_path, extra, said):
    stepping(extra).save(tmp_path / "m.onnx")
    refused(run("shard", "m.onnx", "--ranks", "2", folder=tmp_path), 3, "m.onnx", said)


@pytest.mark.rest
def test_a_value_that_memory_cannot_hold_is_not_computed(tmp_path):
    stepping(lambda b: doubled(b, 40)).save(tmp_path / "m.onnx")
    assert run("shard", "m.onnx", "--ranks", "2", "-o", "out", folder=tmp_path).code == 0
    assert run("prove", "out", folder=tmp_path).code == 0
    refused(run("verify", "out", folder=tmp_path), 5, "8.0 TiB", "memory are free")


@pytest.mark.rest
def test_states_that_memory_cannot_hold_are_not_drawn(tmp_path):
    b, size = Builder(), 1 << 20
    x, w = b.input("x", (1, size)), b.input("w", (size, size))
    h = b.op("MatMul", x, w)
    b.output("loss", b.op("ReduceMean", b.op("Mul", h, h), keepdims=0), ())
    gradient = b.op("MatMul", b.op("Transpose", x, perm=[1, 0]), b.op("Mul", h, b.const(2.0 / size)))
    b.output("w_out", b.op("Sub", w, b.op("Mul", gradient, b.const(0.1))), (size, size))
    b.save(tmp_path / "m.onnx")
    assert run("shard", "m.onnx", "--ranks", "2", "-o", "out", folder=tmp_path).code == 0
    refused(run("verify", "out", folder=tmp_path), 5, "memory are free")


@pytest.mark.rest
def test_names_without_an_end(tmp_path):
    model = stepping(lambda b: "x").model()
    for place in ("value", "node"):
        long = onnx.ModelProto.FromString(model.SerializeToString())
        if place == "value":
            long.graph.node[-1].output[0] = long.graph.output[-1].name = "w" * 20_000_000
        else:
            long.graph.node[-1].name = "w" * 20_000_000
        onnx.save(long, str(tmp_path / "m.onnx"))
        refused(run("shard", "m.onnx", "--ranks", "2", folder=tmp_path), 3, "NAME_LENGTH")


def test_dimensions_by_the_thousand_in_every_value(tmp_path):
    def extra(b: Builder) -> str:
        value = b.op("Reshape", b.const([1.0]), b.const([1] * 8000, "int64"))
        for _ in range(3000):
            value = b.op("Neg", value)
        return value

    stepping(extra).save(tmp_path / "m.onnx")
    ended = run("shard", "m.onnx", "--ranks", "2", "--dry-run", folder=tmp_path)
    assert ended.peak < MEMORY
