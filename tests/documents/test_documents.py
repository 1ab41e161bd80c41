"""The door for JSON and TOML: what it lets in, and the one line with which it refuses the rest."""

from __future__ import annotations

import json
import os

import pytest
from refusals import ROLES_TEXT, refused

from gopt import documents, limits
from gopt.documents import CONFIG, INDEX, MANIFEST, ROLES, parse_json, read_json, read_toml
from gopt.errors import InputError


def test_what_follows_its_schema_is_let_in():
    assert parse_json(ROLES_TEXT, ROLES, "a.json")["loss"] == "l"
    assert parse_json(ROLES_TEXT.replace('"l"', '"é"'), ROLES, "a.json")["loss"] == "é"
    assert parse_json(ROLES_TEXT.replace('"l"', '""'), ROLES, "a.json")["loss"] == ""  # data flow finds it


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('"l"', "3"), 'a.json: loss: 3 is not of type "string"'),
        (("[]", '["x", 4]'), 'a.json: batch[1]: 4 is not of type "string"'),
        (("{}", '{"a b": []}'), "a.json: states.'a b': [] is not of type \"string\""),
        (("}", ', "nix": 1}'), "a.json: there is no key 'nix'"),
        (('"loss": "l", ', ""), "a.json: the key 'loss' is missing"),
        (('"l"', '"l", "loss": "m"'), "a.json: the key 'loss' occurs twice in one table"),
        (('"l"', "NaN"), "a.json is not JSON: NaN is not a JSON number"),
        (('"l"', "-Infinity"), "a.json is not JSON: -Infinity is not a JSON number"),
        (('"l"', "1e999"), "a.json is not JSON: the number 1e999 is too large"),
        (('"l"', "9" * 20), "a.json has a number of more than 19 digits"),
        (('"l"', "9" * 10_000), "a.json has a number of more than 19 digits"),
        (('"l"', "[" * 33 + "]" * 33), "a.json is nested more than 32 levels deep"),
        (('"l"', "[" * 10**6), "a.json is nested more than 32 levels deep"),
        (('"l"', '"\\ud800"'), "a.json: loss: '\\ud800' is an unpaired surrogate"),
        (('"l"', "'l'"), "a.json is not JSON: "),
        (("{", ""), "a.json is not JSON: "),
    ],
)
def test_the_refusal_names_the_key(change, said):
    assert said in refused(ROLES_TEXT.replace(*change, 1) if change[0] != "}" else ROLES_TEXT[:-1] + change[1])


def test_brackets_and_digits_in_text_are_no_depth_and_no_numbers():
    name = "[" * 100 + "\\\\" + '\\"' + "9" * 50
    assert parse_json(ROLES_TEXT.replace('"l"', f'"{name}"'), ROLES, "a")["loss"] == json.loads(f'"{name}"')


@pytest.mark.parametrize("data", [b"\xff\xfe{\0}\0", b'{"loss": "\xff"}', b"", b"\0" * 100, b"[]", b"null", b"3"])
def test_no_text_and_no_table(data):
    refused(data)


def test_whole_numbers_are_not_written_as_others():
    index = {"format": "gopt-checkpoint/1", "step": 4, "manifest": "0" * 64, "files": {}}
    assert parse_json(json.dumps(index), INDEX, "a.json") == index
    assert "step: 4.0 is not of type" in refused(json.dumps(index | {"step": 4.0}), INDEX)
    assert "step: 1.0 is not of type" in refused(json.dumps(index | {"step": 1.0}), INDEX)
    assert "step: -1 is less than the minimum of 0" in refused(json.dumps(index | {"step": -1}), INDEX)


def test_another_format_is_named():
    other = {"format": "gopt-checkpoint/1"}
    assert "its format is 'gopt-checkpoint/1'" in refused(json.dumps(other), MANIFEST)


def test_characters_that_take_four_bytes_make_a_document_shorter(monkeypatch):
    monkeypatch.setattr(limits, "DOCUMENT_WIDE", 10)
    for each in ('"\U0001f600"', '"\\ud83d\\ude00"'):
        assert "(DOCUMENT_WIDE)" in refused(ROLES_TEXT.replace('"l"', each))
    parse_json(ROLES_TEXT.replace('"l"', '"\u20ac"'), ROLES, "a.json")


@pytest.mark.parametrize("what", ["pipe", "device", "folder", "link to a device", "nowhere", "long"])
def test_only_regular_files_of_bounded_size_are_read(what, tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    said = "is not a regular file"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path = "/dev/zero"
    elif what == "folder":
        path.mkdir()
        said = "is a folder, not a file"
    elif what == "link to a device":
        path.symlink_to("/dev/zero")
    elif what == "nowhere":
        said = "there is no file"
    else:
        with path.open("wb") as file:
            file.truncate(MANIFEST.most + 1)
        said = f"is too long: {MANIFEST.most + 1} bytes, at most {MANIFEST.most} are read"
    with pytest.raises(InputError, match=said):
        read_json(path, MANIFEST)


def test_a_file_that_the_system_gives_no_size_is_bounded_as_well():
    with pytest.raises(InputError, match="is too long: at most 3 bytes are read"):
        documents.read_bytes("/proc/self/status", 3)


def test_toml_is_held_to_the_same(tmp_path):
    path = tmp_path / "gopt.toml"
    path.write_text("[mesh]\nshard = 2\n[pass.shard]\nbucket-mb = 4.0\n")
    assert read_toml(path, CONFIG)["mesh"] == {"shard": 2}
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match="is not TOML: byte 0 is not UTF-8"):
        read_toml(path, CONFIG)
