"""Small optimizers and models that count their steps in Python, each in another place."""

from __future__ import annotations

import itertools
import math

import torch


class Counting(torch.optim.Optimizer):
    """SGD whose rate has a factor that ``factor`` computes from where the count is kept."""

    def __init__(self, params, lr=0.05, decay=0.99):
        super().__init__(params, {"lr": lr, "decay": decay})
        self.count = 0

    def factor(self, group, state):
        raise NotImplementedError

    def begin(self):
        pass

    @torch.no_grad()
    def step(self, closure=None):
        self.begin()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * group["lr"] * self.factor(group, self.state[parameter]))


class Attribute(Counting):
    def begin(self):
        self.count += 1

    def factor(self, group, state):
        return group["decay"] ** self.count


class Power(Attribute):
    def factor(self, group, state):
        return math.sqrt(1 - math.pow(group["decay"], self.count))


class Group(Counting):
    """The option appears in the first step."""

    def begin(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1

    def factor(self, group, state):
        return group["decay"] ** group["step"]


class State(Counting):
    """The count is raised before it is stored."""

    def factor(self, group, state):
        state["step"] = state.get("step", 0) + 1
        return group["decay"] ** state["step"]


class Previous(Attribute):
    """The old count is read after the new one stands."""

    def begin(self):
        self.previous = self.count
        self.count += 1

    def factor(self, group, state):
        return group["decay"] ** self.previous


class Late(Attribute):
    """Another rate after five steps."""

    def factor(self, group, state):
        return 1.0 if self.count <= 5 else 0.5


class LateInState(State):
    def factor(self, group, state):
        super().factor(group, state)
        return 1.0 if state["step"] <= 5 else 0.5


class LateInGroup(Group):
    def factor(self, group, state):
        return 1.0 if group["step"] <= 5 else 0.5


class Whole(Attribute):
    def factor(self, group, state):
        return 0.99 ** int(self.count)


class Real(Attribute):
    def factor(self, group, state):
        return 0.99 ** float(self.count) if isinstance(0.5, float) else 0.0


class Listed(Counting):
    """The length of a list is the count."""

    def begin(self):
        self.past = [*getattr(self, "past", []), 1]

    def factor(self, group, state):
        return 1.0 if len(self.past) <= 5 else 0.5


class Nested(Counting):
    """A tensor below a parameter's state, not in it."""

    def factor(self, group, state):
        held = state.setdefault("held", {"sum": torch.zeros(())})
        held["sum"].add_(1.0)
        return 1 / held["sum"]


class OwnRate(Counting):
    """Changes its learning rate, which is an input."""

    def factor(self, group, state):
        group["lr"] *= 0.99
        return 1.0


class InClass(Counting):
    """The class has the count."""

    total = 0

    def begin(self):
        InClass.total += 1

    def factor(self, group, state):
        return 1.0 if InClass.total <= 5 else 0.5


class Iterated(Counting):
    """Only the iterator changes, which has no attributes."""

    def __init__(self, params):
        super().__init__(params)
        self.steps = itertools.count(1)

    def factor(self, group, state):
        return 1.0 if next(self.steps) <= 60 else 0.5


class Slots:
    __slots__ = ("steps",)


class InSlots(Counting):
    def __init__(self, params):
        super().__init__(params)
        self.held = Slots()
        self.held.steps = 0

    def factor(self, group, state):
        self.held.steps += 1
        return 1.0 if self.held.steps <= 60 else 0.5


class Deep(Counting):
    """A count eight dictionaries deep."""

    def __init__(self, params):
        super().__init__(params)
        self.held = {"n": 0}
        for _ in range(8):
            self.held = {"inner": self.held}

    def factor(self, group, state):
        held = self.held
        while "inner" in held:
            held = held["inner"]
        held["n"] += 1
        return 1.0 if held["n"] <= 60 else 0.5


class InClosure(Counting):
    """A function that is kept as an attribute counts."""

    def __init__(self, params):
        super().__init__(params)
        steps = 0

        def count():
            nonlocal steps
            steps += 1
            return steps

        self.number = count

    def factor(self, group, state):
        return 1.0 if self.number() <= 60 else 0.5


class Called:
    """A loss that is an object, and counts."""

    def __init__(self):
        self.calls = 0

    def __call__(self, made, target):
        self.calls += 1
        return torch.nn.functional.mse_loss(made, target) * (1.0 if self.calls <= 15 else 0.5)


CALLS = {"step": 0}


class InGlobal(Counting):
    def begin(self):
        CALLS["step"] += 1

    def factor(self, group, state):
        return 1.0 if CALLS["step"] <= 5 else 0.5


class CountingLayer(torch.nn.Linear):
    """A layer that is scaled anew after five calls, and keeps its last result."""

    def __init__(self, *sizes, counts=True):
        super().__init__(*sizes)
        self.calls, self.counts = 0, counts

    def forward(self, x):
        self.calls += self.counts
        self.last = super().forward(x)
        return self.last if self.calls <= 5 else self.last * 0.5


def counting_loss():
    """A loss that is another one after five calls."""
    calls = 0

    def loss(made, target):
        nonlocal calls
        calls += 1
        return torch.nn.functional.mse_loss(made, target) * (1.0 if calls <= 5 else 0.5)

    return loss
