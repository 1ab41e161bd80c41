"""Code that raises for some numbers of samples: pytest rewrites asserts of tests, and not these."""

from __future__ import annotations

import torch


def refused(h, x):
    if x.shape[0] > 512:
        raise ValueError(f"{x.shape[0]} samples")
    return h


def asserted(h, x):
    assert x.shape[0] <= 512, "too many"
    return h


def divided(h, x):
    if x.shape[0] // 100 <= 4:
        return h
    else:
        raise ValueError("too many")


def torch_checked(h, x):
    torch._check(x.shape[0] <= 512)
    return h


def one_line(h, x):
    assert len(x) < 512
    h = h * 2
    return h


def caught(h, x):
    try:
        return refused(h, x)
    except ValueError:
        return h * 2


def kept(h, x):
    if (many := x.shape[0] // 128) > 4:
        raise ValueError("too many")
    return h * (1 + many)


def both(h, x):
    if x.shape[0] > 512:
        h = h * 2
        raise ValueError(h)
    return h


def beside(h, x):
    h = h * (1 + x.shape[0] // 128)
    assert len(x) < 512
    return h
