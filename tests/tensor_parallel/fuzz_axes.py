"""Fuzz several axes at once: random meshes, placements of parameters and of the batch; ranks and source side by side.

``cd tests && python tensor_parallel/fuzz_axes.py --seed 1 --minutes 10``. A case that fails is printed with its seed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import source

import gopt
from gopt.errors import OptionError, UnsupportedError
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.verification.verify import Verifier

FIXTURES = [
    "gpt_adamw", "emb_adamw", "mlp_adamw", "cnn_sgd", "mlp_lamb", "gpt_adamw_clip_sched_fp16",
    "families/llama_adamw_clip", "families/t5_adamw", "families/moe_adamw", "families/vit_mom",
]  # fmt: skip
MESHES = [
    "cp=2", "sp=2", "cp=3", "cp=2,tp=2", "tp=2,cp=2", "sp=2,tp=2", "cp=2,sp=2", "cp=2,sp=2,tp=2", "tp=3,cp=2",
    "dp=2,cp=2,tp=2", "shard=2,cp=2", "shard=2,sp=2,tp=2", "ep=2,tp=2", "ep=2,cp=2", "h=2,tp=2", "h=2,w=2",
]  # fmt: skip


def case(seed: int) -> str:
    """Run one case; returns what came of it: equal, or why it was refused. Raises AssertionError where ranks differ."""
    random = np.random.default_rng(seed)
    name, mesh = str(random.choice(FIXTURES)), str(random.choice(MESHES))
    training = source(name).training
    types, axes = training.graph.types, [axis for axis in ("tp", "ep", "cp", "sp", "h", "w") if f"{axis}=" in mesh]

    def said(names: list[str], share: float, words: list[str], among: list[str]) -> str:
        parts = []
        for each in names:
            dims = len(types[each].dims)
            if dims and random.random() < share:
                word = str(random.choice([*words, *(f"dim{dim}" for dim in range(dims))]))
                parts.append(f"{each}:{word}@{random.choice(among)}")
        return ";".join(parts)

    fed = [axis for axis in axes if axis not in ("tp", "ep")]
    options = {
        "parameters": said([state.tensor for state in training.parameters], 0.2, ["replicate"], axes),
        "inputs": said(training.batch, 0.5 if "gpt" in name or "emb" in name else 1.0, ["whole"], fed) if fed else "",
        "sequence": bool(random.random() < 0.4) and "tp" in axes,
        "sizes": str(random.choice(["balanced", "ceil", "floor-last"])),
    }
    stage = int(random.integers(4))
    what = f"seed {seed}: {name} {mesh} stage {stage} {options}"
    passes = build_pipeline(defaults={"tensor-parallel": options, "shard": {"stage": stage}})
    try:
        made = gopt.shard(source(name), Mesh.parse(mesh), pipeline=passes)
    except (OptionError, UnsupportedError) as error:
        return f"{what}: refused: {error.message}"
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    with tempfile.TemporaryDirectory() as folder:
        made.write(Path(folder, "out"))
        result = Verifier(Path(folder, "out")).run(confirm=False, steps=2)
    if not result.equal or not result.compared:
        raise AssertionError(f"{what}: NOT equal {result.to_json()}"[:1500])
    return f"{what}: equal"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1.0)
    given = parser.parse_args()
    end, seed, wrong = time.monotonic() + 60 * given.minutes, given.seed, 0
    while time.monotonic() < end:
        try:
            print(case(seed)[:300], flush=True)
        except AssertionError as error:
            wrong += 1
            print("WRONG", error, flush=True)
        seed += 1
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
