"""Train, reshard to drawn ranks, train on: however the samples of a step are dealt, its states end the same.

Meshes, pipeline stages, schedules, recompute, offload and ZeRO stages are drawn; a step reads the same samples once.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from helpers import FIXTURES
from onnx import helper, numpy_helper
from products import part

MODELS = {
    "gpt_adamw": 1e-4, "mlp_adamw": 1e-4, "emb_adamw": 1e-4, "mlp_lamb": 1e-4, "mlp_mom_clip_sched": 1e-4,
    "mlp_muon": 1e-4, "mlp_adamw_bf16": 2e-2, "mlp_adamw_fp16_scaler": 2e-2, "gpt_adamw_clip_sched_fp16": 2e-2,
}  # fmt: skip
"""Model -> what its states may be apart, beside the largest element of each."""
DEALT = 4
"""Ranks that see different samples, times micro-batches."""
DEEPEST = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "interleaved:2": 2, "zb-v": 2}
"""Schedule -> stages of a member of the axis pp."""
LAYERS = 4
"""Stages that the smallest of the models can be cut into."""


def drawn(draw: random.Random) -> list[str]:
    """Options of ``gopt shard`` and ``gopt reshard`` with which a step reads ``DEALT`` batches."""
    micro = draw.choice([1, 2, 4])
    ways = {1: [""], 2: ["dp=2", "shard=2"], 4: ["dp=4", "shard=4", "dp=2,shard=2"]}[DEALT // micro]
    axes, words = [draw.choice(ways)], ["--micro-batches", str(micro)]
    if micro > 1 and draw.random() < 0.7:
        schedule = draw.choice(list(DEEPEST))
        members = draw.choice([count for count in (2, 2, 3) if count * DEEPEST[schedule] <= LAYERS])
        axes.insert(0, f"pp={members}")
        words += ["--schedule", schedule]
    if draw.random() < 0.4:
        axes.append("tp=2")
    mesh = ",".join(filter(None, axes)) or "dp=1"
    stage = draw.choice([1, 2, 3]) if "shard" in mesh else 0
    words += ["--mesh", mesh, "--stage", str(stage)]
    for option, values, often in (
        ("--recompute", ["full", "selective"], 0.5), ("--offload", ["states", "activations"], 0.3),
        ("--partition", ["rows", "whole"], 0.4 if stage else 0),
    ):  # fmt: skip
        words += [option, draw.choice(values)] if draw.random() < often else []
    return words


@pytest.mark.parametrize("seed", part(range(60), 3))
def test_ranks_that_change_in_mid_training_end_with_the_same_states(seed, tmp_path):
    draw = random.Random(seed)
    name = draw.choice(list(MODELS))
    step, data = FIXTURES / f"{name}.onnx", tmp_path / "data.npz"
    np.savez(data, **samples(step, 4 * DEALT))
    plain = trained(step, data, tmp_path / "plain", ["--ranks", str(DEALT)], ["--ranks", str(DEALT)])
    ways = drawn(draw), drawn(draw)
    found = trained(step, data, tmp_path / "drawn", *ways)
    told = f"{name}: {' '.join(ways[0])}, then {' '.join(ways[1])}"
    assert found.keys() == plain.keys()
    for state, value in plain.items():
        most = MODELS[name] * np.abs(value[np.isfinite(value)], dtype=np.float64).max(initial=0)
        assert np.allclose(found[state], value, rtol=0, atol=most, equal_nan=True), f"{told}: {state}"
    start = {each.name: numpy_helper.to_array(each) for each in onnx.load(step).graph.initializer}
    assert any(not np.array_equal(value, start[state]) for state, value in plain.items() if state in start)


def samples(step: Path, batches: int) -> dict[str, np.ndarray]:
    """So many batches for every input with samples."""
    graph, generator, found = onnx.load(step).graph, np.random.default_rng(1), {}
    held = {each.name for each in graph.initializer}
    for each in graph.input:
        dims = [dim.dim_value for dim in each.type.tensor_type.shape.dim]
        if each.name not in held and dims:
            dtype = helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type)
            shape = (dims[0] * batches, *dims[1:])
            whole = np.issubdtype(dtype, np.integer)
            found[each.name] = np.asarray(
                generator.integers(0, 8, shape) if whole else generator.standard_normal(shape), dtype
            )
    return found


def trained(step: Path, data: Path, home: Path, first: list[str], second: list[str]) -> dict[str, np.ndarray]:
    """The states after two steps on the first ranks, and two on the second."""
    rate = ["--set", "lr=1e-2"]
    _do("shard", step, *first, "-o", home / "first")
    _do("run", home / "first", "--data", data, *rate, "--steps", "2", "--checkpoint", home / "kept")
    _do("reshard", home / "kept" / "step_00000002", *second, "-o", home / "second")
    _do("run", home / "second", "--data", data, *rate, "--steps", "2", "--checkpoint", home / "again")
    _do("merge", home / "again" / "step_00000002", "-o", home / "end.onnx")
    return {each.name: numpy_helper.to_array(each) for each in onnx.load(home / "end.onnx").graph.initializer}


def _do(*words: object) -> None:
    assert main([*map(str, words), "--quiet"]) == 0, words
