"""Outputs of the module itself, such as logits, as outputs of the step beside the loss."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch

from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.factory import Recipe


@contextlib.contextmanager
def returned(recipe: Recipe, taken: Container[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield a dict that the module's call fills: name -> tensor that it returned, without the loss.

    Names are the keys of what it returns, ``output`` for a tensor, ``output_0``, ... for a tuple; a name in ``taken``
    gets the prefix ``output.``. Raises UnsupportedError at the end where the module was not called exactly once.
    """
    found: dict[str, torch.Tensor] = {}
    calls = []

    def hook(module: Any, inputs: Any, result: Any) -> None:
        calls.append(result)
        for name, value in _named(result, recipe.loss is None):
            found[f"output.{name}" if name in taken else name] = value.detach()

    handle = recipe.module.register_forward_hook(hook)
    try:
        yield found
    finally:
        handle.remove()
    if len(calls) != 1 or not found:
        what = f"is called {len(calls)} times" if len(calls) != 1 else "returns no tensor beside the loss"
        raise UnsupportedError(
            f"--outputs: the module {what} in a step", "let the loss function call module(...) once, or leave it out"
        )


@contextlib.contextmanager
def no_outputs() -> Iterator[dict[str, torch.Tensor]]:
    """The context where outputs of the module are not kept."""
    yield {}


def _named(result: Any, with_loss: bool) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(result, torch.Tensor):
        if not with_loss:
            yield "output", result
    elif isinstance(result, Mapping):
        for name, value in result.items():
            if isinstance(value, torch.Tensor) and name != "loss":
                yield str(name), value
    elif isinstance(result, Sequence):
        for place, value in enumerate(result):
            if isinstance(value, torch.Tensor) and not (with_loss and place == 0):
                yield f"output_{place}", value
