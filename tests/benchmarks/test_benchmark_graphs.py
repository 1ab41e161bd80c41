"""The benchmark's graphs are real training steps: gopt reads, shards and proves them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from gopt import api
from gopt.graph.types import FLOATS

ROOT = Path(__file__).parents[2]


def write(path: Path, shape: str, nodes: int, *options: str) -> Path:
    command = [sys.executable, str(ROOT / "benchmarks" / "graphs.py"), shape, str(nodes), str(path), *options]
    subprocess.run(command, check=True, capture_output=True)
    return path
