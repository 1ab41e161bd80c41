"""Small optimizers that treat their first step in another way."""

from __future__ import annotations

import torch


class Sgd(torch.optim.Optimizer):
    """SGD; subclasses give the update of a parameter."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    def update(self, parameter, state):
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.update(parameter, self.state[parameter]) * group["lr"])


class Difference(Sgd):
    """Its first step stores the gradient, so that the difference is zero there."""

    def update(self, parameter, state):
        if not state:
            state["previous"] = parameter.grad.clone()
        change = parameter.grad - state["previous"]
        state["previous"].copy_(parameter.grad)
        return parameter.grad + 0.5 * change


class Centered(Sgd):
    """Its first step moves the parameters too."""

    def update(self, parameter, state):
        if not state:
            parameter.sub_(parameter.mean())
            state["sum"] = torch.zeros_like(parameter)
        state["sum"].mul_(0.9).add_(parameter.grad)
        return state["sum"]


class RandomStart(Sgd):
    """Its first momentum is random."""

    def update(self, parameter, state):
        if not state:
            state["sum"] = torch.empty_like(parameter).normal_(0.0, 0.1)
        state["sum"].mul_(0.9).add_(parameter.grad)
        return state["sum"]


class Flagged(Sgd):
    """Keeps None and a text beside a tensor in its state."""

    def update(self, parameter, state):
        if not state:
            state["kind"], state["none"], state["sum"] = "plain", None, torch.zeros_like(parameter)
        assert state["kind"] == "plain" and state["none"] is None
        state["sum"].mul_(0.9).add_(parameter.grad)
        return state["sum"]


class InLists(Sgd):
    """Works on lists of tensors by default, and stores something else there."""

    def __init__(self, params, lr=0.05, foreach=None):
        super().__init__(params, lr)
        self.foreach = foreach

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            given = [each for each in group["params"] if each.grad is not None]
            rate = 0.9 if self.foreach is False else 0.8
            for each in given:
                self.state[each].setdefault("sum", torch.zeros_like(each))
            sums = [self.state[each]["sum"] for each in given]
            torch._foreach_mul_(sums, rate)
            torch._foreach_add_(sums, [each.grad for each in given])
            torch._foreach_add_(given, sums, alpha=-group["lr"])


class Narrow(Sgd):
    """Computes its update in bfloat16, of matrices."""

    factor = 1.0

    def update(self, parameter, state):
        state.setdefault("sum", torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)
        x = state["sum"].bfloat16()
        x = x / (x.norm() + 1e-7)
        for _ in range(4):
            square = x @ x.mT
            x = 1.5 * x - 0.5 * square @ x
        return x.float() * self.factor


class ReadScale(Sgd):
    """A tensor without dimensions that is used as a tensor, not as a number."""

    def update(self, parameter, state):
        size = state.setdefault("size", torch.zeros(()))
        size.lerp_(parameter.grad.square().mean(), weight=0.1)
        return parameter.grad * torch.rsqrt(size + 1e-3)
