"""Every limit that can be raised: the refusal that meets it names it, and its hint, followed, reads the same input."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import FIXTURES

import gopt
from gopt import documents, limits
from gopt.documents.prescan import check_prescan
from gopt.errors import GoptError
from gopt.importers.artifacts.checkpoint import read_checkpoint
from gopt.ir.external_data import load_state
from gopt.ir.functions import check_functions
from gopt.ir.load import load
from gopt.ir.wire_format import check_parts, field
from gopt.offline.reproducer import archive
from gopt.offline.reproducer.record import FailureEntry, Input, Reproducer
from gopt.offline.reproducer.values import LEFT_OUT, fill_values, write_external
from gopt.records.mesh import Mesh
from gopt.runtime.engines.base import run_threads
from gopt.schedules.builders import build_schedule

STEP = FIXTURES / "mlp_adamw.onnx"
CALLS = """<ir_version: 10, opset_import: ["" : 20, "own" : 1]> g (float[2] x) => (float[2] y) { y = own.outer (x) }
<domain: "own", opset_import: ["" : 20, "own" : 1]> outer (a) => (c) { b = own.inner (a)  c = own.inner (b) }
<domain: "own", opset_import: ["" : 20]> inner (a) => (c) { b = Neg (a)  c = Neg (b) }"""
Provoke = Callable[[Path], object]


def file(folder: Path, data: bytes, name: str = "file") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def document(name: str) -> Provoke:
    return lambda folder: documents.read_bytes(file(folder, b"x" * 100), name)


def text(data: str) -> Provoke:
    return lambda folder: check_prescan(data.encode(), "file")


def wide(folder: Path) -> object:
    kind = documents.DocumentKind("a trace", "trace", "DOCUMENT_BYTES")
    return documents.parse_json('{"a": "\U0001f600"}', kind, "file")


def dots(folder: Path) -> object:
    return documents.read_toml(file(folder, b"[mesh]\nshard = 2\n[pass.shard]\nbucket-mb = 4.0\n"), documents.CONFIG)


def long_list(folder: Path) -> object:
    """A packed list in an attribute of a node."""
    return check_parts(field(7, field(1, field(5, field(8, b"\1" * 3000)))))


def header(folder: Path) -> object:
    head = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    return load_state(file(folder, len(head).to_bytes(8, "little") + head + bytes(4), "a.safetensors"))


def arrays(folder: Path) -> object:
    np.savez(folder / "a.npz", a=np.zeros(9000, np.float32))
    return [tensor.numpy() for tensor in load_state(folder / "a.npz").values()]


def packed(folder: Path) -> object:
    inputs = tuple(Input(name=f"{each}.toml", kind="configuration", files={f"{each}.toml": 3}) for each in "ab")
    failure = FailureEntry(exit_code=4, kind="UnsupportedError", message="no", where="")
    record = Reproducer(
        command="shard", arguments=(), inputs=inputs, values=True, left_out=(), failure=failure, versions={}
    )
    archive.write(folder / "r.zip", record, [[archive.Content(f"{each}.toml", b"a=1")] for each in "ab"])
    return archive.read(folder / "r.zip")


def drawn(folder: Path) -> object:
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[300], doc_string=LEFT_OUT)
    return fill_values(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [tensor])))


def far(folder: Path) -> object:
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[3], data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", "values"), ("offset", "100")):
        tensor.external_data.add(key=key, value=value)
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [tensor]))
    return write_external(model, folder / "values")


def functions(folder: Path) -> object:
    return check_functions(onnx.parser.parse_model(CALLS))


PROVOKED: dict[str, tuple[dict[str, int], Provoke]] = {
    **{
        name: ({name: 50}, document(name))
        for name in ("DOCUMENT_BYTES", "MANIFEST_BYTES", "INDEX_BYTES", "ROLES_BYTES", "CONFIG_BYTES", "SERVERS_BYTES")
    },
    "CONFIG_DOTS": ({"CONFIG_DOTS": 1}, dots),
    "HEADER_BYTES": ({"HEADER_BYTES": 10}, header),
    "CHECKPOINT_BYTES": (
        {"CHECKPOINT_BYTES": 10}, lambda folder: read_checkpoint(FIXTURES / "ort" / "mlp_sgd" / "checkpoint"),
    ),
    "DOCUMENT_VALUES": ({"DOCUMENT_VALUES": 3}, text("[1, 2, 3, 4, 5]")),
    "DOCUMENT_TABLES": ({"DOCUMENT_TABLES": 3}, text("[[], [], [], []]")),
    "DOCUMENT_KEYS": ({"DOCUMENT_KEYS": 1}, text('{"a": 1, "b": 2, "c": 3}')),
    "DOCUMENT_TEXT": ({"DOCUMENT_TEXT": 5}, text('["abcdefghi"]')),
    "DOCUMENT_WIDE": ({"DOCUMENT_WIDE": 5}, wide),
    "RANKS": ({"RANKS": 4}, lambda folder: Mesh.parse("shard=9")),
    "RANK_FILES": ({"RANK_FILES": 10_000}, lambda folder: gopt.shard(STEP, 3).write(folder / "out", force=True)),
    "SCHEDULE_ACTIONS": ({"SCHEDULE_ACTIONS": 9}, lambda folder: build_schedule("1f1b", 2, 2)),
    "THREADS": ({"THREADS": 2}, lambda folder: run_threads(Mesh.parse("shard=3"), 9.0, lambda engine: None)),
    "PARTS": ({"PARTS": 5, "PART_SHARE": 10**9, "LIST_ELEMENTS": 10}, lambda folder: check_parts(STEP.read_bytes())),
    "LIST_ELEMENTS": ({"LIST_ELEMENTS": 1000}, long_list),
    "NAME_LENGTH": ({"NAME_LENGTH": 20}, lambda folder: load(STEP)),
    "FUNCTION_NODES": ({"FUNCTION_NODES": 1, "FUNCTION_GROWTH": 1, "FUNCTION_DEPTH": 9}, functions),
    "FUNCTION_DEPTH": ({"FUNCTION_DEPTH": 1}, functions),
    "UPDATE_VALUES": ({"UPDATE_VALUES": 2}, lambda folder: gopt.load(STEP)),
    "ARCHIVE_DIRECTORY": ({"ARCHIVE_DIRECTORY": 10}, arrays),
    "ARCHIVE_FREE": ({"ARCHIVE_FREE": 10, "ARCHIVE_GROWTH": 0}, arrays),
    "REPRODUCER_INPUTS": ({"REPRODUCER_INPUTS": 1}, packed),
    "REPRODUCER_FILES": ({"REPRODUCER_FILES": 1}, packed),
    "REPRODUCER_VALUES": ({"REPRODUCER_VALUES": 100}, drawn),
    "REPRODUCER_FILE": ({"REPRODUCER_FILE": 100}, far),
}  # fmt: skip
"""Limit -> values at which what stands behind is refused."""
WITH_OTHERS = {"PART_SHARE": "PARTS", "FUNCTION_GROWTH": "FUNCTION_NODES", "ARCHIVE_GROWTH": "ARCHIVE_FREE"}
"""Limits that grow with a file, and the one that is raised in their place."""
NOTHING_REFUSED = {"FOLDED_ELEMENTS", "LARGE_BATCH_BYTES"}
"""Limits past which an analysis knows less, and a check compares less."""


def test_every_limit_is_provoked() -> None:
    assert PROVOKED.keys() | WITH_OTHERS.keys() | NOTHING_REFUSED == limits.raisable().keys()


@pytest.mark.parametrize("name", PROVOKED)
def test_what_the_hint_of_a_limit_says_reads_the_input(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, provoke = PROVOKED[name]
    for each, value in values.items():
        monkeypatch.setattr(limits, each, value)
    with pytest.raises(GoptError, match=rf"\b{name}\b|is too long") as refused:
        provoke(tmp_path)
    (told,) = [hint for hint in refused.value.hints if limits.VARIABLE in hint]
    for each, value in re.findall(r"([A-Z_]+)=(\d+)", told):
        monkeypatch.setattr(limits, each, int(value))
        assert each == name
    try:
        provoke(tmp_path)
    except GoptError as error:
        assert f"({name}" not in error.message and limits.VARIABLE not in " ".join(error.hints)


def test_the_variable_holds_for_a_command(tmp_path: Path) -> None:
    def run(value: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gopt.cli", "plan", str(STEP), "--ranks", "8"]
        return subprocess.run(
            command,
            env={**os.environ, limits.VARIABLE: value},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    refused = run("RANKS=4")
    assert refused.returncode == 2 and "hint: raise the limit: GOPT_LIMITS=RANKS=8 gopt" in refused.stderr
    assert run("RANKS=8").returncode == 0
    assert run("RANK=8").returncode == run("RANKS=x").returncode == 2


def test_limits_grow_with_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PARTS", 5)
    monkeypatch.setattr(limits, "LIST_ELEMENTS", 10)
    check_parts(STEP.read_bytes())
    monkeypatch.setattr(limits, "FUNCTION_NODES", 1)
    functions(Path())
