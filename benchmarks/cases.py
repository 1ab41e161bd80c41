"""The steps that ``benchmarks/train.py`` measures, and their files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import graphs
import numpy as np
from onnx import ModelProto

LARGE, SMALL = ("mlp", "gpt"), ("mlp10", "gpt10")
WAYS = ((1, "2"), (2, "2"), (2, "3"), (2, "3k"))
"""Ranks and stage; ``k``: the backward reads what the forward gathered."""


def models() -> dict[str, ModelProto]:
    """The two that the peers run as well, and two of about ten milliseconds a step."""
    return {
        "mlp": graphs.mlp(8, width=2048, batch=32),
        "gpt": graphs.gpt(4, size=graphs.Size(4, 128, 256, 1024, 8)),
        "mlp10": graphs.mlp(4, width=512, batch=32),
        "gpt10": graphs.gpt(2, size=graphs.Size(2, 64, 128, 512, 4)),
    }


@dataclass(frozen=True)
class Case:
    """A step on disk: source, values for its states, one batch, and the ranks of every way."""

    name: str
    folder: Path
    parameters: int
    """Elements."""

    @property
    def model(self) -> Path:
        return self.folder / "step.onnx"

    @property
    def state(self) -> Path:
        return self.folder / "state.npz"

    @property
    def batch(self) -> Path:
        return self.folder / "batch.npz"

    def ranks(self, ranks: int, stage: int | str) -> Path:
        return self.folder / f"{ranks}.{stage}"

    def figures(self, ranks: int, stage: int) -> dict[str, Any]:
        """Traffic and calls as the report has them."""
        found: dict[str, Any] = json.loads((self.ranks(ranks, stage) / "report.json").read_text())["figures"]
        return found


def prepare(name: str, model: ModelProto, folder: Path, ways: Sequence[tuple[int, str]] = WAYS) -> Case:
    """Write everything a run needs: the step, values, a batch, and the ranks of some ways."""
    import gopt

    folder.mkdir()
    path = folder / "step.onnx"
    path.write_bytes(model.SerializeToString())
    training = gopt.load(path).training
    types, generator = training.graph.types, np.random.default_rng(0)
    values = {}
    for each in training.states:
        type = types[each.tensor]
        scale = (0.02 if each.kind.value == "parameter" else 0.0, float("ln" in each.tensor))
        drawn = scale[0] * generator.standard_normal(type.dims) + (scale[1] if each.tensor.endswith(".weight") else 0.0)
        values[each.tensor] = np.asarray(drawn, type.dtype)
    batch = {}
    for each in training.batch:
        type = types[each]
        whole = type.dtype == "int64"
        drawn = generator.integers(0, 500, type.dims) if whole else generator.standard_normal(type.dims)
        batch[each] = np.asarray(drawn, type.dtype)
    case = Case(name, folder, sum(types[each.tensor].elements for each in training.parameters))
    np.savez(case.state, **values)
    np.savez(case.batch, **batch)
    for ranks, stage in ways:
        loaded = gopt.load(path, state=case.state)
        kept = {"shard": {"reshard-after-forward": False}} if stage.endswith("k") else {}
        sharded = gopt.shard(loaded, ranks, stage=int(stage[0]), passes=kept, prove=False)
        sharded.write(case.ranks(ranks, stage))
    return case
