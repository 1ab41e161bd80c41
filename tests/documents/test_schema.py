"""A document held against its schema: the first fault is named, however far down it is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from refusals import many, refused

from gopt.documents import CONFIG, MANIFEST, read_toml
from gopt.errors import InputError

INTERRUPTED = """
import sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name in ("decimal", "_decimal", "numbers"):
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
try:
    from gopt.documents.schema import first_error
    first_error("manifest", {})
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_an_interrupt_while_the_validator_is_imported_is_one():
    """jsonschema_rs imports decimal itself and panics where that fails: gopt run ended with 1 and a traceback."""
    assert subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, check=False).returncode == 7


@pytest.mark.parametrize("place", [0, 63, 64, 1000, 1999])
def test_a_fault_far_down_a_list_is_named(place):
    manifest = many(2000, 1, 1)
    manifest["ranks"][place] = manifest["ranks"][place] | {"rank": "x"}
    assert f"ranks[{place}].rank: 'x' is not of type" in refused(json.dumps(manifest), MANIFEST)
    manifest["ranks"][place] = manifest["ranks"][place] | {"rank": place}
    state = manifest["ranks"][place]["state"][0]
    manifest["ranks"][place]["state"] = [state] * 100 + [state | {"input": 3}]
    assert f"ranks[{place}]" in refused(json.dumps(manifest), MANIFEST)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[mesh]\nshard = 2\n[nearly]\n", "gopt.toml: there is no key 'nearly'", ()),
        ("[mesh]\nshard = 2\n[pas.shard]\n", "gopt.toml: there is no key 'pas'", ("did you mean 'pass'?",)),
        (
            "[mesh]\nshard = 2\n[pipeline]\npases = []\n", "gopt.toml: pipeline: there is no key 'pases'",
            ("did you mean 'passes'?",),
        ),
    ],
)  # fmt: skip
def test_an_unknown_key_is_told_with_the_nearest_known_one(text, message, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gopt.toml").write_text(text)
    with pytest.raises(InputError) as caught:
        read_toml("gopt.toml", CONFIG)
    assert (caught.value.message, caught.value.hints) == (message, hint)
