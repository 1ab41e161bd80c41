"""The door for JSON and TOML: what it lets in, and the one line with which it refuses the rest."""

from __future__ import annotations

import json
import os
import time
import tracemalloc

import pytest

from gopt import documents, limits
from gopt.documents import CONFIG, INDEX, MANIFEST, ROLES, parse_json, prescan, read_json, read_toml
from gopt.documents.prescan import check_prescan
from gopt.errors import InputError

ROLES_TEXT = '{"loss": "l", "states": {}, "params": {}, "batch": []}'


def refused(text: bytes | str, kind: documents.DocumentKind = ROLES) -> str:
    with pytest.raises(InputError) as caught:
        parse_json(text, kind, "a.json")
    assert caught.value.message.startswith("a.json")
    return caught.value.message


def test_what_follows_its_schema_is_let_in():
    assert parse_json(ROLES_TEXT, ROLES, "a.json")["loss"] == "l"
    assert parse_json(ROLES_TEXT.replace('"l"', '"é"'), ROLES, "a.json")["loss"] == "é"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('"l"', "3"), 'a.json: loss: 3 is not of type "string"'),
        (('"l"', '""'), "a.json: loss: '' is shorter than 1 character"),
        (("[]", '["x", 4]'), 'a.json: batch[1]: 4 is not of type "string"'),
        (("{}", '{"a b": []}'), "a.json: states.'a b': [] is not of type \"string\""),
        (("}", ', "nix": 1}'), "Additional properties are not allowed ('nix' was unexpected)"),
        (('"loss": "l", ', ""), 'a.json: "loss" is a required property'),
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


@pytest.mark.parametrize("number", [0.00012345678901234567, -1.2345678901234567e-05, 1 / 3e4, 12345678901234567.0])
def test_digits_of_a_fraction_are_not_counted(number):
    """A loss between 1e-4 and 1e-3 has twenty and more of them."""
    check_prescan(json.dumps({"loss": number}).encode(), "a.json")


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


@pytest.mark.parametrize("text", ["," * 200, "[" * 200, '"' * 900])
def test_values_are_counted_before_they_are_made(text, monkeypatch):
    monkeypatch.setattr(limits, "DOCUMENT_VALUES", 100)
    assert "has more than 100 values" in refused(text)


def test_a_refusal_takes_no_memory():
    """A hundred thousand open brackets: as an object it would not fit in the stack, the refusal is a few copies."""
    text = b"[" * 10**6
    tracemalloc.start()
    refused(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * len(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'"\\' * 100_000, "is not JSON"),
        (b'"\\' * 3_000_000, "has a text of more than"),
        (b'{"a": "' + b'\\"' * 3_000_000, "has a text of more than"),
        (b'{"a": "' + b"\\" * 3_000_000, "has a text of more than"),
        (b"[" + b'"' * 5_000_000, "is not JSON"),
    ],
)
def test_texts_that_do_not_end(text, said):
    started = time.process_time()
    assert said in refused(text)
    assert time.process_time() - started < 20  # quadratic: minutes


def test_texts_over_the_borders_of_blocks(monkeypatch):
    """The same is seen, wherever a block ends."""
    text = ROLES_TEXT.replace('"l"', r'"[[\\\"{[,99999999999999999999\\"').encode()
    for size in range(1, len(text) + 1):
        monkeypatch.setattr(prescan, "_BLOCK", size)
        assert b"".join(prescan._outside(text, "a")) == b"{: , : {}, : {}, : []}"
    monkeypatch.setattr(limits, "DOCUMENT_TEXT", 39)
    for size in range(1, len(text) + 1):
        monkeypatch.setattr(prescan, "_BLOCK", size)
        check_prescan(text, "a")
    monkeypatch.setattr(limits, "DOCUMENT_TEXT", 30)
    for size in range(1, len(text) + 1):
        monkeypatch.setattr(prescan, "_BLOCK", size)
        with pytest.raises(InputError, match="a text of more than 30 bytes"):
            check_prescan(text, "a")


@pytest.mark.parametrize(("text", "limit"), [("[[], [], []]", "TABLES"), ('{"a": {"b": 1}, "c": 2}', "KEYS")])
def test_tables_and_keys_are_counted(text, limit, monkeypatch):
    monkeypatch.setattr(limits, f"DOCUMENT_{limit}", 2)
    assert f"(DOCUMENT_{limit})" in refused(text)


def test_characters_that_take_four_bytes_make_a_document_shorter(monkeypatch):
    monkeypatch.setattr(limits, "DOCUMENT_WIDE", 10)
    for each in ('"\U0001f600"', '"\\ud83d\\ude00"'):
        assert "(DOCUMENT_WIDE)" in refused(ROLES_TEXT.replace('"l"', each))
    parse_json(ROLES_TEXT.replace('"l"', '"\u20ac"'), ROLES, "a.json")


def many(ranks: int, states: int, pieces: int) -> dict:
    manifest = {
        "format": "gopt-manifest/1", "mesh": {"axes": [["shard", ranks]], "ranks": ranks}, "source": "source.onnx",
        "loss": "loss", "states": [], "common": {"inputs": [], "outputs": [], "state": []}, "ranks": [],
    }  # fmt: skip
    held = [{"tensor": f"w{each}", "start": 0, "stop": 4} for each in range(pieces)]
    state = [{"input": f"i{each}", "output": f"o{each}", "pieces": held} for each in range(states)]
    manifest["ranks"] = [
        {"rank": rank, "role": "trainer", "files": {"step": f"rank_{rank:04d}.onnx"}, "state": state}
        for rank in range(ranks)
    ]
    return manifest


@pytest.mark.parametrize("shape", [(4096, 12, 3), (65_536, 2, 1)])
def test_the_largest_manifests_are_let_in(shape):
    check_prescan(json.dumps(many(*shape)).encode(), "a.json")


@pytest.mark.parametrize("place", [0, 63, 64, 1000, 1999])
def test_a_fault_far_down_a_list_is_named(place):
    manifest = many(2000, 1, 1)
    manifest["ranks"][place] = manifest["ranks"][place] | {"rank": "x"}
    assert f"ranks[{place}].rank: 'x' is not of type" in refused(json.dumps(manifest), MANIFEST)
    manifest["ranks"][place] = manifest["ranks"][place] | {"rank": place}
    state = manifest["ranks"][place]["state"][0]
    manifest["ranks"][place]["state"] = [state] * 100 + [state | {"input": 3}]
    assert f"ranks[{place}]" in refused(json.dumps(manifest), MANIFEST)


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
