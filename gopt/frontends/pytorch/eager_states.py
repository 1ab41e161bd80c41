"""Eager training with given random numbers, in float32 or float64; the states have the export's names."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gopt.frontends.pytorch.eager import EagerTraining
from gopt.frontends.pytorch.eager_code import on_attention_math
from gopt.frontends.pytorch.eager_steps import EagerSteps
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.module_record import SCALE, TRACKER
from gopt.frontends.pytorch.options import DYNAMIC, ExportOptions
from gopt.frontends.pytorch.outputs import returned
from gopt.frontends.pytorch.randomness import ReplayedDraws
from gopt.frontends.pytorch.states import StateForm, find_places
from gopt.frontends.pytorch.value_trees import mapped

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Shake:
    """A disturbance by random numbers of a seed, times ``share`` of each number."""

    share: float
    seed: int


class EagerStates:
    """Eager training with given random numbers; the states have the export's names."""

    def __init__(
        self, recipe: Recipe, eager: EagerSteps, options: ExportOptions, names: Container[str] = (),
        shake: Shake | None = None, *, wide: bool = False,
    ) -> None:  # fmt: skip
        """``names``: names unavailable for outputs of the module; ``shake``: the disturbance of all states;
        ``wide``: whether to compute in float64."""
        self._taken, self._wide = names, wide
        copied = copy.deepcopy(recipe)
        if wide:
            _widen(copied)
        self._training = EagerTraining(copied, options)
        self._options = options
        self.loss = float("nan")
        self.outputs: Arrays = {}
        """Outputs of the module in the last step, where they are kept."""
        self._places = [
            cell for cell in find_places(self._training.recipe, eager) if cell.kind is not StateForm.CONSTANT
        ]
        if shake:
            generator = torch.Generator().manual_seed(shake.seed)
            with torch.no_grad():
                for state in self._places:
                    value = state.read()
                    if value is not None and value.is_floating_point():
                        value.mul_(1 + shake.share * torch.randn(value.shape, generator=generator))

    @property
    def overflowed(self) -> bool:
        """Whether the last step left an optimizer out, for a gradient was not finite."""
        return self._training.overflowed

    def option(self, optimizer: int, group: int, option: str, member: int | None) -> np.ndarray:
        """An option of a group in the next step."""
        value = self._training.recipe.optimizers[optimizer].param_groups[group][option]
        return np.asarray(float(value if member is None else value[member]), np.float32)

    def step(self, batch: Mapping[str, torch.Tensor], draws: Sequence[torch.Tensor]) -> float:
        recipe = self._training.recipe
        if self._wide:
            batch, draws = {name: _wide(value) for name, value in batch.items()}, [_wide(value) for value in draws]
        with (
            returned(recipe, self._options, self._taken) as module_values,
            on_attention_math(),
            ReplayedDraws(draws),
            self._type(),
        ):
            self.loss = loss = self._training.step(batch)
        self.outputs = {name: _array(value) for name, value in module_values.outputs.items()}
        return loss

    @contextlib.contextmanager
    def _type(self) -> Iterator[None]:
        """Let new tensors be of float64, too."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if self._wide else before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def states(self) -> Arrays:
        """Copies of all states."""
        states = {cell.name: _array(cell.current) for cell in self._places}
        if self._options.ema is not None:
            states |= {f"ema.{name}": _array(value) for name, value in self._training.averages.items()}
        if self._options.loss_scale == DYNAMIC:
            scaler = self._training.scaler
            scale, tracker = scaler.get_scale(), scaler._get_growth_tracker()
            states |= {SCALE: np.asarray(scale, np.float32), TRACKER: np.asarray(tracker, np.int32)}
        return states


def _array(value: torch.Tensor) -> np.ndarray:
    value = value.detach()
    return value.float().numpy().copy() if value.dtype is torch.bfloat16 else value.numpy().copy()


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


def _widen(recipe: Recipe) -> None:
    """Turn parameters, buffers and optimizer states into float64, in place."""
    for module in (recipe.module, recipe.loss):
        if isinstance(module, torch.nn.Module):
            module.double()
    for optimizer in recipe.optimizers:
        for key, state in optimizer.state.items():
            optimizer.state[key] = mapped(state, lambda leaf: _wide(leaf) if isinstance(leaf, torch.Tensor) else leaf)
