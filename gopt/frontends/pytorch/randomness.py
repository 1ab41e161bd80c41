"""Random numbers of a step as inputs: eager code and trace use the same numbers, in the order of the calls."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gopt.documents.draws import Distribution, Draw
from gopt.errors import GoptError, UnsupportedError

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class DrawnInput:
    """An input of random numbers: integers in int64, others in float32."""

    draw: Draw
    shape: tuple[int, ...]

    def values(self, generator: torch.Generator) -> torch.Tensor:
        """Fresh numbers."""
        draw, kind = self.draw, self.draw.distribution
        if kind is Distribution.INTEGERS:
            return torch.randint(int(draw.low), int(draw.high), self.shape, generator=generator)
        if kind is Distribution.PERMUTATION:
            return torch.randperm(self.shape[0], generator=generator)
        if kind is Distribution.NORMAL:
            return torch.randn(self.shape, generator=generator)
        return torch.rand(self.shape, generator=generator)


UNIFORM, NORMAL, PERMUTATION = map(Draw, (Distribution.UNIFORM, Distribution.NORMAL, Distribution.PERMUTATION))


def draw_names(count: int) -> list[str]:
    return [f"draw_{index}" for index in range(count)]


def named(draws: Sequence[DrawnInput]) -> dict[str, Draw]:
    """Input of random numbers -> distribution."""
    return {name: draw.draw for name, draw in zip(draw_names(len(draws)), draws)}


class RandomSource(TorchDispatchMode):
    """Replaces random operators of ATen by the numbers of ``next``; raises UnsupportedError for other random
    operators."""

    def next(self, draw: Draw, shape: Sequence[int]) -> torch.Tensor:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if torch._C._current_graph_task_id() != -1:
            raise UnsupportedError(
                "the step draws random numbers in its backward (dropout inside gradient checkpointing): PyTorch "
                "repeats the forward's there, and inputs would not",
                "leave dropout out of what is checkpointed",
            )
        rule = _RULES.get(func)
        if rule is None:
            raise UnsupportedError(
                f"the step draws random numbers by {func}, which cannot become an input",
                "draw them outside and put them into the batch",
            )
        return rule(self, *args, **kwargs)


@contextlib.contextmanager
def no_draws_of_python() -> Iterator[None]:
    """Raise UnsupportedError where code draws by ``random`` or by NumPy: the trace sees a number like any other."""
    before = _generators()
    refusal = None
    try:
        yield
    except GoptError as error:  # perhaps for what follows from the numbers
        refusal = error
    if _generators() != before:
        raise UnsupportedError(
            "the step draws random numbers by Python's random or by NumPy, which would be constants of the graph",
            "draw them outside and put them into the batch, or draw tensors by torch (torch.rand)",
        )
    if refusal is not None:
        raise refusal


def _generators() -> tuple[Any, ...]:
    return random.getstate(), pickle.dumps(np.random.get_state())


class RecordedDraws(RandomSource):
    """Draws random numbers, and records each draw."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.found: list[DrawnInput] = []
        self._generator = torch.Generator().manual_seed(seed)

    def next(self, draw: Draw, shape: Sequence[int]) -> torch.Tensor:
        self.found.append(DrawnInput(draw, tuple(int(size) for size in shape)))
        return self.found[-1].values(self._generator)


class ReplayedDraws(RandomSource):
    """Returns the numbers of inputs, in order. ``expected``: their distributions, if known."""

    def __init__(self, values: Sequence[torch.Tensor], expected: Sequence[DrawnInput] = ()) -> None:
        super().__init__()
        self._values, self._expected = values, expected
        self.taken = 0

    def next(self, draw: Draw, shape: Sequence[int]) -> torch.Tensor:
        index = self.taken
        differs = index == len(self._values) or tuple(self._values[index].shape) != tuple(shape)
        if differs or (self._expected and self._expected[index].draw != draw):
            raise UnsupportedError(
                "the step draws other random numbers when it runs again",
                "draw them outside and put them into the batch",
            )
        self.taken += 1
        return self._values[self.taken - 1]


def _uniform(source: RandomSource, x: torch.Tensor) -> torch.Tensor:
    return source.next(UNIFORM, x.shape)


def _normal(source: RandomSource, x: torch.Tensor) -> torch.Tensor:
    return source.next(NORMAL, x.shape)


def _bernoulli_in_place(source: RandomSource, x: Any, p: Any = 0.5, generator: Any = None) -> Any:
    return x.copy_((_uniform(source, x) < p).to(x.dtype))


def _bernoulli(source: RandomSource, x: Any, p: Any = None, generator: Any = None) -> Any:
    return (_uniform(source, x) < (x if p is None else p)).to(x.dtype)


def _native_dropout(source: RandomSource, x: Any, p: float, train: Any) -> Any:
    if train is False or p == 0:
        return x, torch.ones_like(x, dtype=torch.bool)
    mask = _uniform(source, x) < 1.0 - p  # as bernoulli_(1 - p), which eager code on a CPU calls
    return x * mask.to(x.dtype) * (1.0 / (1.0 - p)), mask


def _dtype(options: dict[str, Any], default: torch.dtype | None = None) -> torch.dtype:
    return options.get("dtype") or default or torch.get_default_dtype()


def _rand(source: RandomSource, size: Any, **options: Any) -> Any:
    return source.next(UNIFORM, size).to(_dtype(options))


def _randn(source: RandomSource, size: Any, **options: Any) -> Any:
    return source.next(NORMAL, size).to(_dtype(options))


def _rand_like(source: RandomSource, x: Any, **options: Any) -> Any:
    return _uniform(source, x).to(_dtype(options, x.dtype))


def _randn_like(source: RandomSource, x: Any, **options: Any) -> Any:
    return _normal(source, x).to(_dtype(options, x.dtype))


def _uniform_in_place(source: RandomSource, x: Any, low: float = 0.0, high: float = 1.0, generator: Any = None) -> Any:
    return x.copy_((_uniform(source, x) * (high - low) + low).to(x.dtype))


def _normal_in_place(source: RandomSource, x: Any, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Any:
    return x.copy_((_normal(source, x) * std + mean).to(x.dtype))


def _normal_of_tensors(source: RandomSource, mean: Any, std: Any, generator: Any = None) -> Any:
    like = mean + std if isinstance(mean, torch.Tensor) and isinstance(std, torch.Tensor) else _tensor_of(mean, std)
    return (mean + std * _normal(source, like)).to(like.dtype)


def _tensor_of(mean: Any, std: Any) -> torch.Tensor:
    tensor: torch.Tensor = mean if isinstance(mean, torch.Tensor) else std
    return tensor


def _exponential_in_place(source: RandomSource, x: Any, lambd: float = 1.0, generator: Any = None) -> Any:
    return x.copy_((-torch.log1p(-_uniform(source, x)) / lambd).to(x.dtype))


def _integers(source: RandomSource, low: int, high: int, size: Any, **options: Any) -> Any:
    drawn = source.next(Draw(Distribution.INTEGERS, low=low, high=high), size)
    return drawn.to(options.get("dtype") or torch.int64)


def _permutation(source: RandomSource, count: int, **options: Any) -> Any:
    return source.next(PERMUTATION, (count,)).to(options.get("dtype") or torch.int64)


def _integers_like(source: RandomSource, x: torch.Tensor, low: int, high: int, **options: Any) -> Any:
    return _integers(source, low, high, x.shape, dtype=options.get("dtype") or x.dtype)


_RULES: dict[Any, Any] = {
    aten.bernoulli_.float: _bernoulli_in_place, aten.bernoulli_.Tensor: _bernoulli_in_place,
    aten.bernoulli.default: _bernoulli, aten.bernoulli.p: _bernoulli, aten.native_dropout.default: _native_dropout,
    aten.rand.default: _rand, aten.randn.default: _randn, aten.rand_like.default: _rand_like,
    aten.randn_like.default: _randn_like, aten.uniform_.default: _uniform_in_place,
    aten.normal_.default: _normal_in_place, aten.normal.Tensor_Tensor: _normal_of_tensors,
    aten.normal.Tensor_float: _normal_of_tensors, aten.normal.float_Tensor: _normal_of_tensors,
    aten.exponential_.default: _exponential_in_place,
    aten.randint.default: lambda source, high, size, **options: _integers(source, 0, high, size, **options),
    aten.randint.low: _integers,
    aten.randint_like.default: lambda source, x, high, **options: _integers_like(source, x, 0, high, **options),
    aten.randint_like.low_dtype: _integers_like, aten.randperm.default: _permutation,
}  # fmt: skip
