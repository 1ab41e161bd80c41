"""Small optimizers that branch on values of the step."""

from __future__ import annotations

import math

import torch


class Branching(torch.optim.Optimizer):
    """SGD whose factor a subclass computes of a count of steps."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr, "step": 0})

    def factor(self, group, parameter, state):
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    change = parameter.grad * self.factor(group, parameter, self.state[parameter])
                    parameter.sub_(group["lr"] * change)


class Warm(Branching):
    """A rate that rises over three steps, as of schedule-free optimizers."""

    def factor(self, group, parameter, state):
        return group["step"] / 3 if group["step"] < 3 else 1.0


class Rectified(Branching):
    """The rule of RAdam: momentum alone before a term is large enough, and a root that is no number there."""

    def factor(self, group, parameter, state):
        if not state:
            state["square"] = torch.zeros_like(parameter)
        state["square"].mul_(0.8).addcmul_(parameter.grad, parameter.grad, value=0.2)
        largest = 2 / (1 - 0.8) - 1
        length = largest - 2 * group["step"] * 0.8 ** group["step"] / (1 - 0.8 ** group["step"])
        if length >= 4:
            root = math.sqrt((length - 4) * (length - 2) * largest / ((largest - 4) * (largest - 2) * length))
            return root / (state["square"].sqrt() + 0.1)
        return 1.0


class Every(Branching):
    """Another state at every third step, and early ends."""

    @torch.no_grad()
    def step(self, closure=None):
        total = sum(parameter.grad.abs().sum() for group in self.param_groups for parameter in group["params"])
        if total == 0:
            return
        super().step()

    def factor(self, group, parameter, state):
        if not state:
            state["anchor"] = torch.zeros_like(parameter)
        if group["step"] % 3 == 0:
            state["anchor"].copy_(parameter.grad)
        return 1.0 + 0.1 * state["anchor"]


class Quotient(Branching):
    """A division by zero on the side that is not taken at first."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.param_groups[0]["norm"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        norm = group["norm"]
        self.now = 1 / (1 + 1 / norm) if norm > 0 else 0.5
        group["norm"] = sum(parameter.grad.norm() for parameter in group["params"])
        super().step()

    def factor(self, group, parameter, state):
        return self.now


class Far(Branching):
    """A side that is taken late."""

    def factor(self, group, parameter, state):
        return 0.5 if group["step"] > 100 else 1.0


class Clipped(Branching):
    """A branch on the gradient of each parameter."""

    def factor(self, group, parameter, state):
        return 0.5 if parameter.grad.norm() > 0.2 else 1.0


class Flagged(Branching):
    """A side that changes a flag of Python."""

    def __init__(self, params):
        super().__init__(params)
        self.late = False

    def factor(self, group, parameter, state):
        if group["step"] > 100:
            self.late = True
        return 0.5 if self.late else 1.0


class Storing(Branching):
    """A side, taken late, that stores a state."""

    def factor(self, group, parameter, state):
        if group["step"] > 100:
            state["late"] = parameter.grad.clone()
        return 1.0


class Growing(Branching):
    """An option that the first two steps do not change."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.param_groups[0]["scale"] = 1.0

    def factor(self, group, parameter, state):
        group["scale"] = max(group["scale"], (group["step"] - 1) / 2)
        return group["scale"]


ALL = (Warm, Rectified, Every, Quotient, Growing)
