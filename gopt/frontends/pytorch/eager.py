"""A training step in eager PyTorch, with torch's own clip, scaler, autocast and scheduler, for comparison with
exports."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from gopt.frontends.pytorch.eager_steps import parameter_names
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.options import DYNAMIC, Autocast, ExportOptions

NARROW = {Autocast.FP16: torch.float16, Autocast.BF16: torch.bfloat16}


def autocast(options: ExportOptions) -> AbstractContextManager[Any]:
    """The ``torch.autocast`` of the options."""
    if options.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=NARROW[options.autocast])


def clip(recipe: Recipe, options: ExportOptions) -> None:
    """Clip the gradients of all parameters the optimizers train, in place."""
    trained = [
        value for optimizer in recipe.optimizers for group in optimizer.param_groups for value in group["params"]
    ]
    if options.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(trained, options.clip_norm, foreach=False)
    if options.clip_value is not None:
        torch.nn.utils.clip_grad_value_(trained, options.clip_value, foreach=False)


class EagerTraining:
    """Trains a recipe. ``averages``: parameter name -> moving average, with ``--ema``."""

    def __init__(self, recipe: Recipe, options: ExportOptions) -> None:
        """Trains ``recipe`` itself, not a copy."""
        self.recipe = recipe
        self.options = options
        names = parameter_names(self.recipe)
        self._trained = {
            names[id(parameter)]: parameter
            for optimizer in self.recipe.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in names and parameter.requires_grad
        }
        self.averages = {name: parameter.detach().clone() for name, parameter in self._trained.items() if options.ema}
        self.scaler = _scaler(options)
        self.overflowed = False
        """Whether the last step left an optimizer out, for a gradient was not finite."""

    def step(self, batch: Mapping[str, torch.Tensor]) -> float:
        """Forward, backward, clip and update; returns the loss."""
        recipe, scaler = self.recipe, self.scaler
        for optimizer in recipe.optimizers:
            optimizer.zero_grad(set_to_none=True)
        with autocast(self.options):
            loss = recipe.loss_of(batch)
        scaler.scale(loss).backward()
        for optimizer in recipe.optimizers:
            scaler.unscale_(optimizer)
        clip(recipe, self.options)
        for optimizer in recipe.optimizers:
            scaler.step(optimizer)
        states = scaler._per_optimizer_states.values() if scaler.is_enabled() else ()
        infinite = [state["found_inf_per_device"] for state in states]
        self.overflowed = any(float(flag) for flags in infinite for flag in flags.values())
        scaler.update(None if self.options.loss_scale == DYNAMIC else self.options.loss_scale)
        if recipe.scheduler is not None:
            recipe.scheduler.step()
        self._average()
        return float(loss.detach())

    @torch.no_grad()
    def _average(self) -> None:
        decay = self.options.ema
        if decay is not None:
            for name, average in self.averages.items():
                average.mul_(decay).add_(self._trained[name] * (1 - decay))


def _scaler(options: ExportOptions) -> Any:
    if options.loss_scale is None:
        return torch.amp.GradScaler("cpu", enabled=False)
    if options.loss_scale == DYNAMIC:
        return torch.amp.GradScaler("cpu")
    return torch.amp.GradScaler("cpu", init_scale=float(options.loss_scale))
