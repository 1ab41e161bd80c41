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
    """Parameters that modules register inside the block are fake tensors: a shape and a type, no memory. Those of lazy
    modules, whose shape the first forward gives, are so from then on."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    register, infer = torch.nn.Module.register_parameter, LazyModuleMixin._infer_parameters
    known: dict[int, tuple[torch.Tensor, torch.nn.Parameter]] = {}

    def registered(module: torch.nn.Module, name: str, given: Any) -> None:
        if isinstance(given, torch.Tensor) and not isinstance(given, FakeTensor) and not is_lazy(given):
            if id(given) not in known:
                with mode:
                    fake = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="cpu")
                known[id(given)] = given, torch.nn.Parameter(fake, given.requires_grad)
            given = known[id(given)][1]
        register(module, name, given)

    def inferred(module: Any, *given: Any) -> None:
        infer(module, *given)
        for name, value in [*module._parameters.items()]:
            registered(module, name, value)

    with (
        mock.patch.object(torch.nn.Module, "register_parameter", registered),
        mock.patch.object(LazyModuleMixin, "_infer_parameters", inferred),
    ):
        yield mode


def check_trained(recipe: Recipe) -> None:
    """Raise UnsupportedError for a frozen parameter: a constant of the graph needs its value."""
    trained = {id(each) for one in recipe.optimizers for group in one.param_groups for each in group["params"]}
    for name, each in recipe.whole.named_parameters():
        if id(each) not in trained or not each.requires_grad:
            raise UnsupportedError(
                f"--no-values: {show(name)} is not trained, and would be a constant without a value",
                "leave --no-values out, or train it",
            )


def one_step(recipe: Recipe, options: ExportOptions) -> None:
    """Run forward, backward and update on shapes, for the states that the optimizers store."""
    with _numbers_as_tensors(recipe):
        with autocast(options):
            loss = recipe.loss_of(recipe.batch)
        loss.backward()
        clip(recipe, options)
        for optimizer in recipe.optimizers:
            optimizer.step()


@contextlib.contextmanager
def _numbers_as_tensors(recipe: Recipe) -> Iterator[None]:
    """Set the options of optimizers so that they do not read their counters, which have no values here."""
    for optimizer in recipe.optimizers:
        for group in optimizer.param_groups:
            for key, value in (("capturable", True), ("foreach", False), ("fused", False)):
                if key in group:
                    group[key] = value
    with readable():
        yield


def mode_of(recipe: Recipe) -> FakeTensorMode | None:
    """The mode of fake parameters; None where they have values."""
    found = next((each for each in recipe.whole.parameters() if isinstance(each, FakeTensor)), None)
    return None if found is None else found.fake_mode
