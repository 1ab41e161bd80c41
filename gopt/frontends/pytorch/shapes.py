"""Training code without values: parameters have only shapes, so a model needs no memory.

Buffers and the batch keep their values, because constants of the graph are computed from them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.eager import autocast, clip
from gopt.frontends.pytorch.eager_code import readable
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.options import ExportOptions
from gopt.text.sanitize import show


@contextlib.contextmanager
def without_values() -> Iterator[FakeTensorMode]:
    """Parameters registered inside the block are fake tensors: a shape and a type, no memory. Parameters of lazy
    modules, shaped by the first forward, become fake then."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    register, infer = torch.nn.Module.register_parameter, LazyModuleMixin._infer_parameters
    fakes: dict[int, tuple[torch.Tensor, torch.nn.Parameter]] = {}

    def registered(module: torch.nn.Module, name: str, parameter: Any) -> None:
        if isinstance(parameter, torch.Tensor) and not isinstance(parameter, FakeTensor) and not is_lazy(parameter):
            if id(parameter) not in fakes:
                with mode:
                    fake = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
                fakes[id(parameter)] = parameter, torch.nn.Parameter(fake, parameter.requires_grad)
            parameter = fakes[id(parameter)][1]
        register(module, name, parameter)

    def inferred(module: Any, *inputs: Any) -> None:
        infer(module, *inputs)
        for name, value in [*module._parameters.items()]:
            registered(module, name, value)

    with (
        mock.patch.object(torch.nn.Module, "register_parameter", registered),
        mock.patch.object(LazyModuleMixin, "_infer_parameters", inferred),
    ):
        yield mode


def check_trained(recipe: Recipe) -> None:
    """Raise UnsupportedError for a frozen parameter: a constant of the graph needs its value."""
    trained = {id(param) for one in recipe.optimizers for group in one.param_groups for param in group["params"]}
    for name, parameter in recipe.whole.named_parameters():
        if id(parameter) not in trained or not parameter.requires_grad:
            raise UnsupportedError(
                f"--no-values: {show(name)} is not trained, and would be a constant without a value",
                "leave --no-values out, or train it",
            )


def one_step(recipe: Recipe, options: ExportOptions) -> None:
    """Run forward, backward and update on shapes, for the states stored by optimizers."""
    with _numbers_as_tensors(recipe):
        with autocast(options):
            loss = recipe.loss_of(recipe.batch)
        loss.backward()
        clip(recipe, options)
        for optimizer in recipe.optimizers:
            optimizer.step()


@contextlib.contextmanager
def _numbers_as_tensors(recipe: Recipe) -> Iterator[None]:
    """Set the options of optimizers so that counters, without values here, are not read."""
    for optimizer in recipe.optimizers:
        for group in optimizer.param_groups:
            for key, value in (("capturable", True), ("foreach", False), ("fused", False)):
                if key in group:
                    group[key] = value
    with readable():
        yield


def mode_of(recipe: Recipe) -> FakeTensorMode | None:
    """The mode of fake parameters; None for real parameters."""
    fake_parameter = next((param for param in recipe.whole.parameters() if isinstance(param, FakeTensor)), None)
    return None if fake_parameter is None else fake_parameter.fake_mode
