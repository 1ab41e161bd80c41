"""Training that goes on in eager PyTorch from a checkpoint of gopt, beside gopt's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gopt.cli.main import main

import gopt
from gopt.frontends.pytorch.factory import Recipe, make_recipe

MORE = 2
"""Steps behind the checkpoint."""


def trained(ranks: Path, data: Mapping[str, np.ndarray], steps: int, kept: Path) -> Path:
    """The checkpoint of ``steps`` steps in ``kept``, continued where there is one."""
    file = kept.with_suffix(".npz")
    np.savez(file, **data)
    resumed = ["--resume"] if kept.exists() else []
    text = ["run", str(ranks), "--data", str(file), "--steps", str(steps), "--checkpoint", str(kept), *resumed]
    assert main(text) == 0
    return kept / f"step_{steps:08d}"


def loaded(make: Callable[[], Any], checkpoint: Path, folder: Path) -> tuple[Recipe, dict[str, Any]]:
    """A fresh recipe with all that a checkpoint holds, strictly; and the file's content."""
    saved = gopt.save_state_dict(checkpoint, folder / f"{checkpoint.name}.pt", all_states=True, force=True)
    assert not saved.missing
    content = torch.load(saved.file, weights_only=True)
    torch.manual_seed(99)  # other first values than those of the export
    recipe = make_recipe(make())
    recipe.module.load_state_dict(content["model"], strict=True)
    states = content["optimizer"] if isinstance(content["optimizer"], list) else [content["optimizer"]]
    for optimizer, state in zip(recipe.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    if recipe.scheduler is not None:
        recipe.scheduler.load_state_dict(content["scheduler"])
    if isinstance(recipe.loss, torch.nn.Module) and "loss" in content:
        recipe.loss.load_state_dict(content["loss"], strict=True)
    return recipe, content


def assert_goes_on(
    make: Callable[[], Any], ranks: Path, data: Mapping[str, np.ndarray], folder: Path, *, steps: int = 3,
    each: Callable[[Recipe, dict[str, torch.Tensor]], torch.Tensor] = lambda recipe, batch: recipe.loss_of(batch),
) -> None:  # fmt: skip
    """Hold MORE steps of eager PyTorch behind ``steps`` steps of gopt against as many of gopt's: all values of the
    module, of its optimizers and of its scheduler. ``data`` has the rows of all steps in the order of training."""
    kept = folder / "kept"
    recipe, content = loaded(make, trained(ranks, data, steps, kept), folder)
    assert content["step"] == steps
    rows = next(iter(data.values())).shape[0] // (steps + MORE)
    recipe.module.train()
    for step in range(steps, steps + MORE):
        batch = {name: torch.from_numpy(value[step * rows : (step + 1) * rows]) for name, value in data.items()}
        for optimizer in recipe.optimizers:
            optimizer.zero_grad()
        each(recipe, batch).backward()
        for optimizer in recipe.optimizers:
            optimizer.step()
        if recipe.scheduler is not None:
            recipe.scheduler.step()
    wanted, _ = loaded(make, trained(ranks, data, steps + MORE, kept), folder)
    same(recipe.module.state_dict(), wanted.module.state_dict(), "model")
    for one, other in zip(recipe.optimizers, wanted.optimizers, strict=True):
        same(one.state_dict(), other.state_dict(), "optimizer")
    if recipe.scheduler is not None:
        assert recipe.scheduler.last_epoch == wanted.scheduler.last_epoch


def same(found: Any, wanted: Any, place: str) -> None:
    """Raise AssertionError at the first place where two states differ in keys, kinds or numbers."""
    assert type(found) is type(wanted), f"{place}: {type(found)}, {type(wanted)}"
    if isinstance(found, dict):
        assert found.keys() == wanted.keys(), place
        for key, value in found.items():
            same(value, wanted[key], f"{place}.{key}")
    elif isinstance(found, list | tuple):
        assert len(found) == len(wanted), place
        for number, pair in enumerate(zip(found, wanted)):
            same(*pair, f"{place}.{number}")
    elif isinstance(found, torch.Tensor):
        assert found.dtype == wanted.dtype, f"{place}: {found.dtype}, {wanted.dtype}"
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-6, msg=lambda text: f"{place}: {text}")
    elif isinstance(found, float):
        assert abs(found - wanted) <= 1e-6 * abs(wanted), f"{place}: {found}, {wanted}"
    else:
        assert found == wanted, f"{place}: {found}, {wanted}"
