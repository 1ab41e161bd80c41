"""Reductions in memory that ranks of one host share: the bits of the reference, and MPI's way where there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import calls, edit_rank
from recipes import Recipe
from test_run import command, mpi, processes, run, samples, train, values, written

from gopt.mesh import Mesh
from gopt.runtime import launch
from gopt.runtime.shared import Lender

import json

WIDE = Recipe(widths=(3, 150, 160, 4))
"""Two buckets' worth of gradients that are worth sharing."""


def stored(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.suffix == ".safetensors"}


@mpi
@pytest.mark.parametrize(
    ("mesh", "micro_steps", "recipe", "options"),
    [
        ("shard=2", 1, WIDE, {"stage": 2}),
        ("shard=3", 1, WIDE, {"stage": 2, "bucket_mb": 0}),
        ("shard=3", 1, WIDE, {"stage": 3}),
        ("shard=3", 1, WIDE, {"stage": 1}),
        ("dp=3", 1, WIDE, {"stage": 0}),
        ("dp=2,shard=2", 1, WIDE, {"stage": 2}),
        ("dp=2,shard=2", 2, WIDE, {"stage": 3}),
        ("shard=2", 3, WIDE, {"stage": 2}),
        ("shard=3", 1, Recipe(widths=(3, 250, 200, 4), half=True), {"stage": 2}),
        ("shard=3", 1, Recipe(widths=(3, 250, 200, 4)), {"stage": 2, "reduce_dtype": "bfloat16"}),
    ],
)
def test_the_bits_of_threads(mesh, micro_steps, recipe, options, tmp_path):
    folder, data = written(tmp_path, mesh, micro_steps, recipe, **options), samples(tmp_path)
    train(folder, data, 4, checkpoint=tmp_path / "threads")
    ranks = str(Mesh.parse(mesh).ranks)
    done = run(command(folder, data, 4, "--launch", ranks, "--checkpoint", str(tmp_path / "mpi"), "--json"))
    assert done.returncode == 0, done.stderr
    print(json.loads(done.stdout)["shared_calls"])
    assert json.loads(done.stdout)["shared_calls"] > 0
    assert stored(tmp_path / "mpi" / "step_00000004") == stored(tmp_path / "threads" / "step_00000004")
