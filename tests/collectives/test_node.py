"""Signatures: what all members of a group must issue alike, from one member's node."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gopt.collectives.node import call_signature
from gopt.errors import InputError


def test_signatures_tell_calls_apart() -> None:
    x = ("float32", (4, 3))
    base = call_signature("ReduceScatter", {"group": "shard", "cuts": [0, 6, 12]}, [x])
    assert str(base) == "ReduceScatter shard sum float32 48 bytes tensors=('4,3',) cuts=(0, 6, 12)"
    others = [
        call_signature("ReduceScatter", {"group": "dp", "cuts": [0, 6, 12]}, [x]),
        call_signature("ReduceScatter", {"group": "shard", "cuts": [0, 5, 12]}, [x]),
        call_signature("ReduceScatter", {"group": "shard", "cuts": [0, 6, 12], "reduce": "max"}, [x]),
        call_signature("ReduceScatter", {"group": "shard", "cuts": [0, 6, 12]}, [("float16", (4, 3))]),
        call_signature("ReduceScatter", {"group": "shard", "cuts": [0, 6, 12]}, [("float32", (12,))]),
        call_signature("Reduce", {"group": "shard", "root": 0}, [x]),
        call_signature("Reduce", {"group": "shard", "root": 1}, [x]),
    ]
    assert len({base, *others}) == 1 + len(others)
    with pytest.raises(InputError, match="no operator 'Gather'"):
        call_signature("Gather", {}, [])


def test_importing_the_table_does_not_import_onnx() -> None:
    code = "import sys, gopt.collectives.node, gopt.collectives.schemas; sys.exit('onnx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
