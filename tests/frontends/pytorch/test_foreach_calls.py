"""Calls for lists of tensors against those for one tensor after the other. By hand, ``pytest -m torch``."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from gopt.frontends.pytorch.foreach_calls import is_foreach, tensor_by_tensor  # noqa: E402


def tensors(seed, count=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(2, place + 1, generator=generator) + 0.5 for place in range(count)]


A, B, C = map(tensors, range(3))
NUMBERS = [0.5, 1.5, 2.0]
CALLS = [
    ("abs", (A,), {}), ("sqrt", (A,), {}), ("rsqrt", (A,), {}), ("neg", (A,), {}), ("exp", (A,), {}),
    ("reciprocal", (A,), {}), ("sign", (A,), {}), ("zero_", (A,), {}), ("max", (A,), {}),
    ("add", (A, B), {}), ("add", (A, B), {"alpha": 0.3}), ("add", (A, 2.0), {}), ("add", (A, NUMBERS), {}),
    ("add", (A, torch.tensor(2.0)), {}), ("sub", (A, B), {"alpha": 2}), ("mul", (A, B), {}), ("mul", (A, 0.1), {}),
    ("mul", (A, torch.tensor(2.0)), {}), ("div", (A, B), {}), ("div", (A, NUMBERS), {}), ("pow", (A, 2), {}),
    ("pow", (A, B), {}), ("pow", (2.0, A), {}), ("lerp", (A, B, 0.2), {}), ("lerp", (A, B), {"weight": 0.2}),
    ("lerp", (A, B, C), {}), ("lerp", (A, B, NUMBERS), {}), ("addcmul", (A, B, C), {"value": 0.5}),
    ("addcmul", (A, B, C, NUMBERS), {}), ("addcdiv", (A, B, C), {}), ("addcdiv", (A, B, C), {"scalars": NUMBERS}),
    ("addcdiv", (A, B, C, 0.25), {}), ("maximum", (A, B), {}), ("maximum", (A, 0.9), {}), ("minimum", (A, NUMBERS), {}),
    ("clamp_min", (A, 0.9), {}), ("clamp_max", (A, B), {}), ("norm", (A,), {}), ("norm", (A, 1), {}),
    ("copy", (A, B), {}),
]  # fmt: skip


def copies(value):
    if isinstance(value, list):
        return [each.clone() if isinstance(each, torch.Tensor) else each for each in value]
    return value


def result(call, args, kwargs, in_place):
    args = tuple(map(copies, args))
    given = call(*args, **kwargs)
    return args[0] if in_place else given


def _one_by_one(function):
    return lambda *args, **kwargs: tensor_by_tensor(function, args, kwargs)


@pytest.mark.parametrize("place", range(len(CALLS)), ids=[f"{name} {i}" for i, (name, *_) in enumerate(CALLS)])
def test_every_call_gives_what_torch_gives(place):
    name, args, kwargs = CALLS[place]
    variants = [name] if name.endswith("_") else [name, f"{name}_"]
    for variant in variants:
        function = getattr(torch, f"_foreach_{variant}", None)
        if function is None or (variant == "pow_" and args[0] == 2.0):
            continue
        in_place = variant.endswith("_")
        theirs = result(function, args, dict(kwargs), in_place)
        mine = result(_one_by_one(function), args, dict(kwargs), in_place)
        for one, other in zip(theirs, mine, strict=True):
            torch.testing.assert_close(other, one)


def test_tensors_may_stand_for_numbers():
    given = tensors(0)
    rate = torch.tensor(0.3)
    found = tensor_by_tensor(torch._foreach_lerp, (given, B), {"weight": rate})
    torch.testing.assert_close(found, torch._foreach_lerp(given, B, 0.3))


def test_only_calls_for_lists_are_taken():
    assert is_foreach(torch._foreach_add_) and not is_foreach(torch.Tensor.add_) and not is_foreach(object())
