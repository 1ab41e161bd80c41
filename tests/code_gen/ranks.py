"""The exported step on two ranks, against PyTorch with the ranks' gradients averaged."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

import gopt
from code_gen.codes import Code
from code_gen.oracle import losses_apart, rates_of, states_apart, trained
from gopt.ir.load import load
from gopt.offline.state_values import save_state_dict

RANKS, STEPS = 2, 4


def may_run(code: Code) -> bool:
    """Whether data parallel training in PyTorch is the same step: no statistics of a batch, no draws, and a rate that
    is one number."""
    own = ("Noise", "Norm", "Average", "each its own", "_in_parts", "teacher", "sequence", "chained", "loss_scale")
    return not any(each in code.told for each in own)


def differences_on_ranks(code: Code, path: Path, folder: Path) -> list[str]:
    """What differs, in words."""
    draw = random.Random(f"ranks {code.seed}")
    generator = torch.Generator().manual_seed(code.seed + 2000)
    batches = [[code.batch(generator) for _ in range(RANKS)] for _ in range(STEPS)]
    eager = trained(code, batches)
    source = gopt.load(path)
    inputs = load(path).inputs
    if len({tuple(each) for each in eager.rates}) > 1 and "scheduler.step" not in inputs:
        return []  # a rate that is fed anew in each step
    shaken = [trained(code, batches, shake=place) for place in range(3)]
    stage = draw.choice([0, 1, 2, 3])
    partition = {"partition": draw.choice(["flat", "rows", "whole"])} if stage else {}
    gopt.shard(source, RANKS, stage=stage, **partition).write(folder / "ranks")
    data = {
        name: np.concatenate([batch[name].numpy() for ranks in batches for batch in ranks]) for name in batches[0][0]
    }
    rates = {name: float(value) for name, value in rates_of(inputs, eager, 0).items()}
    rates = {name: value for name, value in rates.items() if name in inputs}
    found = gopt.run(folder / "ranks", data, STEPS, settings=rates, checkpoint=folder / "checkpoint")
    save_state_dict(found.path, folder / "states.safetensors", all_states=True)
    mine = load_file(folder / "states.safetensors")
    return [
        *losses_apart(found.losses, eager.losses, [each.losses for each in shaken], code),
        *states_apart(mine, eager.states, [each.states for each in shaken], code),
    ]
