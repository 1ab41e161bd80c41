"""Values that processes tell each other: equal on the other side, of a closed list of types; nothing else is read."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import pickle
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gopt
from gopt.artifact.integrity import FileEntry
from gopt.errors import InvariantError, RunError
from gopt.runtime.engines.shared_buffers import MemoryHandle
from gopt.runtime.exchanged_values import decode, encode, from_json, to_json
from gopt.runtime.parameter_server.sync_point import SyncReport, Usage
from gopt.runtime.parameter_server.waits import ServerSummary
from gopt.runtime.training import checkpoint

assert checkpoint.FileEntry is FileEntry  # which it lets processes exchange

VALUES: list[Any] = [
    None, True, 0, -(2**70), 0.1, -0.0, math.inf, "", "a\nb\udce9", b"\x00\xff", [], (), {}, set(), [1, (2, [3])],
    {("dp", 0): (1, "x"), ("shard", 3): ()}, {1, 2, 3}, {("a", 1)}, Counter({0: 5, 2: 1}), {"table": {"set": [1]}},
    FileEntry(3, "ab"), ("rank_0001.safetensors", FileEntry(3, "ab")), Usage(Counter({1: 2}), 3), ({"loss": 0.5}, 2),
    SyncReport(3, True, 15, usage=Usage(Counter({0: 1}))), MemoryHandle(1, 2, "gopt-x", 4096, {("dp", 0): 0}),
    ServerSummary(0, 3, 4, 5, 6, 0, {0: 0.5, 1: 0.25}, {1: 3}, 0),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_is_equal_on_the_other_side(value):
    for found in (decode(encode(value)), from_json(json.loads(json.dumps(to_json(value))))):
        assert found == value and type(found) is type(value) and repr(found) == repr(value)


def test_not_a_number_is_one_too():
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "u1", "?", "f2", ml_dtypes.bfloat16, "c8"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_arrays_travel_as_their_bytes(dtype, shape):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    found = decode(encode({"x": array, "y": [1, array.T]}))
    for one, other in ((found["x"], array), (found["y"][1], array.T)):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype and one.shape == other.shape
    found["x"][...] = 0  # memory of its own


@pytest.mark.parametrize("value", [object(), {"a": print}, [1j], Path("x"), ValueError("x"), type])
def test_other_types_are_not_exchanged(value):
    with pytest.raises(InvariantError, match="processes do not exchange values of"):
        encode(value)


class Runs:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('it ran')",))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x00" * 7, pickle.dumps(Runs()), pickle.dumps({"a": 1}), encode(1) + b"more", b"\xff" * 20,
        *(
            len(text).to_bytes(8, "little") + text
            for text in (
                b"", b"{", b"{}", b'{"tuple": 3}', b'{"record": ["Path", ["x"]]}',
                b'{"record": ["Usage", [1,2,3,4,5,6]]}',
                b'{"array": ["float32", [4]]}', b'{"array": ["float32", [-1]]}', b'{"array": ["object", [1]]}',
                b'{"table": [[[], 1]]}', b'{"a": 1, "b": 2}', b"[" * 100_000, b'{"bytes": [300]}',
            )
        ),
    ],
)  # fmt: skip
def test_what_is_no_value_is_refused_and_nothing_runs(data):
    with pytest.raises(RunError, match="another process sent bytes that gopt cannot read"):
        decode(data)


def test_damaged_bytes_give_a_value_or_a_refusal():
    draw = random.Random(0)
    wholes = [encode(each) for each in [*VALUES, {"x": np.arange(6, dtype="f4")}]]
    for _ in range(2000):
        data = bytearray(draw.choice(wholes))
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        with contextlib.suppress(RunError):
            decode(data[: draw.randint(0, len(data))] if draw.random() < 0.3 else data)


PICKLES = {
    "system/background.py": "of its own forked children, in memory without a name",
    "frontends/pytorch/randomness.py": "written, and never read",
    "frontends/pytorch/python_values.py": "written, and never read",
    "frontends/pytorch/dcp_folder.py": "an Unpickler that knows the classes of DCP alone",
}


def test_nothing_that_another_process_sends_is_unpickled():
    """Imports of pickle and of what uses it; mpi4py's own methods refuse at run time (``load_mpi``)."""
    home = Path(gopt.__file__).parent
    cli = home.parent / "cli"
    for path in [*home.rglob("*.py"), *cli.rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        if not re.search("pickle|dill|marshal|shelve", text):
            continue
        tree = ast.parse(text)
        names = {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        place = str(path.relative_to(home)) if path.is_relative_to(home) else path.name
        if names & {"pickle", "dill", "cloudpickle", "marshal", "shelve"}:
            assert place in PICKLES, place
            loads = "pickle.load" in text
            assert loads == (place == "system/background.py"), place
