"""The file of a reproducer: what is written is read back, and what is damaged or made to harm is refused."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from gopt import limits
from gopt.errors import InputError, OptionError
from gopt.offline.reproducer import archive, inputs
from gopt.offline.reproducer.record import Argument, FailureEntry, Input, Reproducer

FAILURE = FailureEntry(exit_code=4, kind="UnsupportedError", message="no", where="")
RECORD = Reproducer(
    command="shard", arguments=(Argument(input=0), Argument(option="--stage", text="2")),
    inputs=(Input(name="gopt.toml", kind="configuration", files={"gopt.toml": 3}),), values=True, left_out=("--data",),
    versions={"gopt": "1"}, failure=FAILURE,
)  # fmt: skip
FILES = [[inputs.Content("gopt.toml", b"a=1")]]


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "r.zip"
    archive.write(path, RECORD, FILES)
    first = path.read_bytes()
    assert archive.read(path) == RECORD
    assert archive.unpack(path, tmp_path) == RECORD
    assert archive.input_path(tmp_path, RECORD, 0).read_bytes() == b"a=1"
    archive.write(path, RECORD, FILES)
    assert path.read_bytes() == first, "a reproducer may be replaced, and the same one has the same bytes"


def test_only_a_reproducer_is_replaced(tmp_path):
    for name in ("notes.txt", "link"):
        path = tmp_path / name
        path.write_bytes(b"mine") if name != "link" else path.symlink_to("notes.txt")
        with pytest.raises(OptionError, match="is not a reproducer"):
            archive.write(path, RECORD, FILES)
    assert (tmp_path / "notes.txt").read_bytes() == b"mine"


def packed(path: Path, members: dict[str, bytes], **options: int) -> Path:
    with zipfile.ZipFile(path, "w", **options) as made:
        for name, data in members.items():
            made.writestr(name, data)
    return path


def document(**changes: object) -> dict[str, object]:
    from gopt.documents.records import to_document

    return json.loads(json.dumps(to_document(RECORD))) | changes


def one(**changes: object) -> list[dict[str, object]]:
    return [{"name": "gopt.toml", "kind": "configuration", "files": {"gopt.toml": 3}} | changes]


HOSTILE: dict[str, tuple[dict[str, object], dict[str, bytes], str]] = {
    "climbing name": ({"inputs": one(name="..")}, {}, "not the name of a file"),
    "a path": ({"inputs": one(files={"../x": 3})}, {"input_0/../x": b"a=1"}, "not the name of a file"),
    "an option as name": ({"inputs": one(name="--force")}, {}, "not the name of a file"),
    "another file": ({"inputs": one(files={"x": 3})}, {"input_0/x": b"a=1"}, "other files than its own"),
    "unlisted": ({}, {"input_0/gopt.toml": b"a=1", "more": b""}, "'more' is not as reproducer.json lists it"),
    "missing": ({}, {}, "is not as reproducer.json lists it"),
    "another size": ({}, {"input_0/gopt.toml": b"a=12"}, "is not as reproducer.json lists it"),
    "no such input": ({"arguments": [{"input": 1}]}, {"input_0/gopt.toml": b"a=1"}, "names input 1"),
    "output elsewhere": ({"arguments": [{"output": "/etc"}]}, {"input_0/gopt.toml": b"a=1"}, "not the name of an out"),
    "another version": ({"format": "gopt-reproducer/2"}, {"input_0/gopt.toml": b"a=1"}, "another version|format"),
    "unknown key": ({"run": "rm"}, {"input_0/gopt.toml": b"a=1"}, "run"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_record_is_refused(name, tmp_path):
    changes, members, message = HOSTILE[name]
    path = packed(tmp_path / "r.zip", {"reproducer.json": json.dumps(document(**changes)).encode(), **members})
    with pytest.raises(InputError, match=message):
        archive.unpack(path, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["r.zip"], "nothing is written"


def test_a_bomb_is_refused_by_its_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "ARCHIVE_FREE", 1000)
    path = packed(tmp_path / "r.zip", {"reproducer.json": b" " * 10**6}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(InputError, match="ARCHIVE_GROWTH"):
        archive.read(path)


@pytest.mark.parametrize("step", [7, 13])
def test_damaged_bytes_are_refused_or_read(step, tmp_path):
    path = tmp_path / "r.zip"
    archive.write(path, RECORD, FILES)
    whole = path.read_bytes()
    for place in range(0, len(whole), step):
        (tmp_path / "d.zip").write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        (tmp_path / "t.zip").write_bytes(whole[: place + 1])
        for each in ("d.zip", "t.zip"):
            folder = tmp_path / f"{each}.{place}"
            folder.mkdir()
            try:
                archive.unpack(tmp_path / each, folder)
            except InputError:
                continue


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing", Path("/dev/null")):
        with pytest.raises(InputError):
            archive.read(path)
    assert not archive.is_reproducer(tmp_path)


def test_records_differ_by_their_failure():
    assert replace(RECORD, failure=replace(FAILURE, exit_code=3)).failed() != RECORD.failed()
