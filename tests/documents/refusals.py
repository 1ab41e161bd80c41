"""What tests of documents share: a small document, a large one, and the one line with which a text is refused."""

from __future__ import annotations

import pytest

from gopt.documents import ROLES, DocumentKind, parse_json
from gopt.errors import InputError

ROLES_TEXT = '{"loss": "l", "states": {}, "params": {}, "batch": []}'


def refused(text: bytes | str, kind: DocumentKind = ROLES) -> str:
    with pytest.raises(InputError) as caught:
        parse_json(text, kind, "a.json")
    assert caught.value.message.startswith("a.json")
    return caught.value.message


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
