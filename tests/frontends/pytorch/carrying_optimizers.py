"""Small optimizers with states in other places than tensors of a parameter's state."""

from __future__ import annotations

from collections import deque

import torch


class _Descent(torch.optim.Optimizer):
    """SGD whose direction a subclass computes."""

    def __init__(self, params, lr=0.05, **options):
        super().__init__(params, {"lr": lr, **options})

    def begin(self):
        pass

    def direction(self, group, parameter):
        raise NotImplementedError

    def end(self):
        pass

    @torch.no_grad()
    def step(self, closure=None):
        self.begin()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * self.direction(group, parameter))
        self.end()


class Nested(_Descent):
    """Momenta by their decays in a dict, norms in a list and in a tuple, and what is no tensor between them."""

    def direction(self, group, parameter):
        state = self.state[parameter]
        if not state:
            state["momenta"] = {decay: torch.zeros_like(parameter) for decay in (0.9, 0.5)}
            state["norms"] = []
            state["norms"].append(torch.zeros(()))
            state["norms"].append([])
            state["pair"] = (torch.zeros_like(parameter), None, 3)
        for decay, momentum in state["momenta"].items():
            momentum.mul_(decay).add_(parameter.grad)
        state["norms"][0] = 0.9 * state["norms"][0] + parameter.grad.square().sum()
        total = state["pair"][0]
        state["pair"] = (total + parameter.grad.square(), *state["pair"][1:])
        return sum(state["momenta"].values()) / (1 + state["norms"][0]) / (1 + state["pair"][0].sqrt())


class InGroup(_Descent):
    """An estimate in options of groups: a tensor that groups share, and a number that becomes a tensor."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr, scale=0.5, slope=None)

    def begin(self):
        first = self.param_groups[0]
        if first["slope"] is None:
            first["slope"] = torch.zeros(1)
        first["slope"].mul_(0.9)

    def direction(self, group, parameter):
        self.param_groups[0]["slope"].add_(parameter.grad.abs().sum())
        return parameter.grad * group["scale"]

    def end(self):
        slope = self.param_groups[0]["slope"]
        for group in self.param_groups:
            group["slope"] = slope
            group["scale"] = max(group["scale"] * 0.9, (1 / (2 + slope)).item())
            group["last"] = slope / 2


class OwnRate(_Descent):
    def end(self):
        for group in self.param_groups:
            group["lr"] *= 0.9

    def direction(self, group, parameter):
        return parameter.grad


class OfNoParameter(_Descent):
    """A count and averages in ``optimizer.state`` under keys of their own."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.state["averages"] = {"short": 0.0}

    def begin(self):
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0])
        self.state["averages"]["short"] = 0.5 * self.state["averages"]["short"] + 0.25

    def direction(self, group, parameter):
        return parameter.grad / (self.state["k"] + 1) ** 0.5 / (1 + self.state["averages"]["short"])

    def end(self):
        self.state["k"].add_(1)


class InAttribute(_Descent):
    """A tensor in an attribute, and a count in a dict there."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.size, self.counts = torch.zeros(()), {"step": 0}

    def begin(self):
        self.size.mul_(0.5)
        self.counts["step"] += 1

    def direction(self, group, parameter):
        self.size.add_(parameter.grad.square().sum())
        return parameter.grad / (1 + self.size) / self.counts["step"]


class SizedOnce(_Descent):
    """The first step gives a state the shape that it has from then on."""

    def direction(self, group, parameter):
        state = self.state[parameter]
        if not state:
            state["size"] = torch.zeros(1)
        state["size"] = 0.9 * state["size"].reshape(()) + parameter.grad.square().sum()
        return parameter.grad / (1 + state["size"])


class Shared(_Descent):
    """Two places of one tensor."""

    def begin(self):
        if "a" not in self.state:
            self.state["a"] = self.state["b"] = torch.zeros(())
        self.state["a"].add_(1)

    def direction(self, group, parameter):
        return parameter.grad * self.state["b"]


class Late(_Descent):
    """A count; values that change from the fourth step on, read in the next one."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr, step=0)
        self.factor = torch.ones(())

    def excess(self):
        return max(0.0, self.param_groups[0]["step"] - 3)

    def begin(self):
        self.param_groups[0]["step"] += 1

    def direction(self, group, parameter):
        return parameter.grad * self.factor

    def end(self):
        self.factor = self.factor + torch.ones(()) * self.excess()


class LateInList(Late):
    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.param_groups[0]["factors"] = [torch.ones(3), 0.5]

    def direction(self, group, parameter):
        return parameter.grad * group["factors"][0].sum() * group["factors"][1]

    def end(self):
        factors = self.param_groups[0]["factors"]
        factors[0] = factors[0] + torch.ones(3) * self.excess()
        factors[1] = factors[1] + self.excess()


class LateRate(Late):
    def end(self):
        if self.param_groups[0]["step"] == 4:
            self.param_groups[0]["lr"] *= 0.3


class MadeOnce(Late):
    """A number that the first step makes."""

    def direction(self, group, parameter):
        return parameter.grad * group.get("size", 1.0)

    def end(self):
        group = self.param_groups[0]
        group["size"] = group["size"] + self.excess() if "size" in group else 2.0


class LateInState(Late):
    """A number in a dict of a parameter's state: no state of the graph, for the first steps leave it as it is."""

    def direction(self, group, parameter):
        state = self.state[parameter]
        if not state:
            state["scales"] = {"own": 1.0}
        state["scales"]["own"] = state["scales"]["own"] + self.excess()
        return parameter.grad * state["scales"]["own"]


class LateInQueue(Late):
    """A number where gopt sees no state."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.queue = deque([1.0], maxlen=1)

    def direction(self, group, parameter):
        return parameter.grad * self.queue[0]

    def end(self):
        self.queue.append(self.queue[0] + self.excess())


LATE = (Late, LateInList, LateRate, MadeOnce)
ALL = (Nested, InGroup, OwnRate, OfNoParameter, InAttribute, SizedOnce)
