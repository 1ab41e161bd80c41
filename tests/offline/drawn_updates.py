"""One optimizer step with a drawn rule, drawn hyper-parameters and a drawn spelling, written node by node.

Formulas: the documentation of torch.optim; You et al. 2020 (LAMB); Chen et al. 2023 (Lion)."""

from __future__ import annotations

import random

from offline_graphs import Step


class DrawnUpdate:
    """``name`` and ``hyper``: the rule that the graph of ``step`` has, in the words of ``gopt inspect``."""

    def __init__(self, seed: int, rule: str) -> None:
        self.dice, self.name, self.step = random.Random(seed), rule, Step()
        self.hyper: dict[str, float | bool | None] = {}
        s, spelling = self.step, self.dice.choice(["input", "constant", "scheduled"])
        self.rate = s.number(self.number(-4, -1)) if spelling == "constant" else "lr"
        if spelling == "scheduled":
            s.extra.append("warm")
            self.rate = s.mul("lr", "warm")
        upwards = self.coin()
        self.g = s.op("Neg", s.gradient) if upwards else s.gradient
        getattr(self, rule)()
        if upwards:
            self.hyper["maximize"] = None  # of a single parameter: as well the sign of the backward

    def coin(self) -> bool:
        return self.dice.random() < 0.5

    def number(self, low: float, high: float) -> float:
        """Three digits between two powers of ten."""
        return float(f"{10 ** self.dice.uniform(low, high):.3g}")

    def beta(self, key: str, least: float = 0.5) -> float:
        """A share of an average, as a hyper-parameter."""
        value = float(f"{1 - (1 - least) * 10 ** self.dice.uniform(-2.5, 0):.4g}")
        self.hyper[key] = value
        return value

    def decayed(self, *, apart: bool | None = None) -> str:
        """The parameter with the decoupled weight decay; a coupled decay goes into the gradient."""
        s, decay = self.step, self.number(-4, -1) if self.coin() else 0.0
        self.hyper["weight_decay"] = decay
        if not decay:
            return "w"
        self.hyper["decoupled"] = apart = self.coin() if apart is None else apart
        if not apart:
            self.g = s.op("Add", self.g, s.mul("w", s.number(decay)))
            return "w"
        if self.coin():
            return s.op("Sub", "w", s.mul(self.rate, s.number(decay), "w"))
        return s.mul("w", s.op("Sub", s.number(1.0), s.mul(self.rate, s.number(decay))))

    def mean(self, state: str, new: str, beta: float) -> str:
        """beta · state + (1 - beta) · new, or state + (1 - beta) · (new - state)."""
        s = self.step
        whole = s.mean(state, new, beta)
        result = whole if self.coin() else s.op("Add", state, s.mul(s.op("Sub", new, state), s.number(1 - beta)))
        s.state(state, result)
        return result

    def moments(self) -> tuple[str, str]:
        """Both moments; RAdam rectifies only where beta2 is above 0.6."""
        return self.mean("m", self.g, self.beta("beta1")), self.mean("v", self.squared(), self.beta("beta2", 0.7))

    def squared(self) -> str:
        return self.step.mul(self.g, self.g)

    def count(self) -> str:
        """The count of steps with this step, a state."""
        later = self.step.op("Add", "t", self.step.number(1.0))
        self.step.state("t", later, [])
        return later

    def correction(self, key: str, t: str) -> str:
        """1 - beta^t."""
        power = self.step.op("Pow", self.step.number(float(self.hyper[key] or 0)), t)
        return self.step.op("Sub", self.step.number(1.0), power)

    def root(self, square: str, share: str = "") -> str:
        """The root of a second moment over ``share``, with epsilon beside or inside."""
        s, eps = self.step, self.number(-8, -3)
        self.hyper["eps"] = eps
        if share and self.coin():
            return s.op("Add", s.op("Div", s.op("Sqrt", square), s.op("Sqrt", share)), s.number(eps))
        square = s.op("Div", square, share) if share else square
        if self.coin():
            return s.op("Add", s.op("Sqrt", square), s.number(eps))
        self.hyper["eps_inside_root"] = True
        return s.op("Sqrt", s.op("Add", square, s.number(eps)))

    def descend(self, old: str, direction: str) -> None:
        """The new parameter: old - rate · direction."""
        self.step.state("w", self.step.op("Sub", old, self.step.mul(self.rate, direction)))

    # --- the rules ---

    def SGD(self) -> None:
        self.descend(self.decayed(), self.g)
        self.hyper.pop("decoupled", None)

    def momentum(self) -> None:
        s, old, beta, nesterov = self.step, self.decayed(), self.beta("momentum"), self.coin()
        m = s.op("Add", s.mul("m", s.number(beta)), self.g)
        s.state("m", m)
        self.hyper |= {"nesterov": nesterov, "dampening": 0.0}
        self.descend(old, s.op("Add", self.g, s.mul(m, s.number(beta))) if nesterov else m)

    def Adam(self) -> None:
        s, old = self.step, self.decayed()
        (m, v), corrected = self.moments(), self.coin()
        self.name = "AdamW" if self.hyper.get("decoupled") else "Adam"
        if self.coin():
            self.hyper["amsgrad"], v = True, s.op("Max", "top", v)
            s.state("top", v)
        self.hyper["bias_correction"] = corrected
        if corrected:
            t = self.count()
            m, share = s.op("Div", m, self.correction("beta1", t)), self.correction("beta2", t)
        self.descend(old, s.op("Div", m, self.root(v, share if corrected else "")))

    def Adamax(self) -> None:
        s, old, eps = self.step, self.decayed(apart=False), self.number(-8, -3)
        m = self.mean("m", self.g, self.beta("beta1"))
        u = s.op("Max", s.mul("u", s.number(self.beta("beta2"))), s.op("Add", s.op("Abs", self.g), s.number(eps)))
        s.state("u", u)
        share = self.correction("beta1", self.count())
        self.hyper |= {"eps": eps, "bias_correction": True}
        self.descend(old, s.op("Div", m, s.mul(share, u)))

    def RAdam(self) -> None:
        s, old = self.step, self.decayed()
        m, v = self.moments()
        t, beta = self.count(), float(self.hyper["beta2"] or 0)
        most, power = 2 / (1 - beta) - 1, s.op("Pow", s.number(beta), t)
        share = s.op("Sub", s.number(1.0), power)
        length = s.op("Sub", s.number(most), s.op("Div", s.mul(s.number(2.0), t, power), share))
        above = s.mul(s.op("Sub", length, s.number(4.0)), s.op("Sub", length, s.number(2.0)), s.number(most))
        square = s.op("Div", above, s.mul(s.number((most - 4) * (most - 2)), length))
        eps, mean = self.number(-8, -3), s.op("Div", m, self.correction("beta1", t))
        below = s.op("Add", s.op("Div", s.op("Sqrt", v), s.op("Sqrt", share)), s.number(eps))
        rectified = s.op("Div", s.mul(mean, s.op("Sqrt", square)), below)
        self.hyper["eps"] = eps
        self.descend(old, s.op("Where", s.op("Greater", length, s.number(5.0)), rectified, mean))

    def NAdam(self) -> None:
        s, old = self.step, self.decayed()
        m, v = self.moments()
        t, beta, decay = self.count(), float(self.hyper["beta1"] or 0), self.number(-3, -1)

        def share(count: str) -> str:
            power = s.op("Pow", s.number(0.96), s.mul(count, s.number(decay)))
            return s.mul(s.number(beta), s.op("Sub", s.number(1.0), s.mul(s.number(0.5), power)))

        one, now, later = s.number(1.0), share(t), share(s.op("Add", t, s.number(1.0)))
        product = s.mul("product", now)
        s.state("product", product, [])
        this = s.mul(self.g, s.op("Div", s.op("Sub", one, now), s.op("Sub", one, product)))
        follows = s.mul(m, s.op("Div", later, s.op("Sub", one, s.mul(product, later))))
        eps = self.number(-8, -3)
        below = s.op("Add", s.op("Sqrt", s.op("Div", v, self.correction("beta2", t))), s.number(eps))
        self.hyper |= {"eps": eps, "momentum_decay": decay}
        self.descend(old, s.op("Div", s.op("Add", this, follows), below))

    def LAMB(self) -> None:
        s, decay = self.step, self.number(-3, -1)
        m, v = self.moments()
        direction = s.op("Add", s.op("Div", m, self.root(v)), s.mul("w", s.number(decay)))
        norms = [s.op("ReduceL2", value, keepdims=0) for value in ("w", direction)]
        self.hyper |= {"weight_decay": decay, "decoupled": True, "bias_correction": False}
        self.descend("w", s.mul(s.op("Div", *norms), direction))

    def Adagrad(self) -> None:
        s, old = self.step, self.decayed(apart=False)
        total = s.op("Add", "total", self.squared())
        s.state("total", total)
        if self.rate == "lr" and self.coin():
            self.hyper["lr_decay"] = decay = self.number(-3, -1)
            before = s.op("Sub", self.count(), s.number(1.0))
            self.rate = s.op("Div", "lr", s.op("Add", s.number(1.0), s.mul(before, s.number(decay))))
        self.descend(old, s.op("Div", self.g, self.root(total)))

    def RMSProp(self) -> None:
        s, old = self.step, self.decayed(apart=False)
        v = self.mean("v", self.squared(), self.beta("alpha"))
        if self.coin():
            self.hyper["centered"] = True
            mean = self.mean("mean", self.g, float(self.hyper["alpha"] or 0))
            v = s.op("Sub", v, s.mul(mean, mean))
        direction = s.op("Div", self.g, self.root(v))
        if self.coin():
            direction = s.op("Add", s.mul("steps", s.number(self.beta("momentum"))), direction)
            s.state("steps", direction)
        self.descend(old, direction)

    def Adadelta(self) -> None:
        s, old, eps = self.step, self.decayed(), self.number(-8, -3)
        rho = self.beta("rho")
        v = self.mean("v", self.squared(), rho)
        above, below = (s.op("Sqrt", s.op("Add", square, s.number(eps))) for square in ("u", v))
        step = s.mul(s.op("Div", above, below), self.g)
        self.mean("u", s.mul(step, step), rho)
        self.hyper["eps"] = eps
        self.descend(old, step)

    def Lion(self) -> None:
        s, old = self.step, self.decayed()
        mixed = s.mean("m", self.g, self.beta("beta1"))
        self.mean("m", self.g, self.beta("beta2"))
        self.descend(old, s.op("Sign", mixed))

    def Rprop(self) -> None:
        s, minus, plus = self.step, self.dice.choice([0.3, 0.5, 0.7]), self.dice.choice([1.1, 1.2, 1.5])
        least, most = self.number(-7, -4), self.number(0, 2)
        turn = s.mul(self.g, "last")
        up, down = (s.op(kind, turn, s.number(0.0)) for kind in ("Greater", "Less"))
        factor = s.op("Where", up, s.number(plus), s.op("Where", down, s.number(minus), s.number(1.0)))
        sizes = s.op("Clip", s.mul("sizes", factor), s.number(least), s.number(most))
        gradient = s.op("Where", down, s.number(0.0), self.g)
        s.state("w", s.op("Sub", "w", s.mul(sizes, s.op("Sign", gradient))))
        s.state("last", gradient)
        s.state("sizes", sizes)
        self.hyper |= {"etaminus": minus, "etaplus": plus, "step_size_min": least, "step_size_max": most}

    def ASGD(self) -> None:
        s, decay = self.step, self.number(-4, -1) if self.coin() else 0.0
        lambd, alpha, begins = self.number(-5, -2), self.dice.choice([0.5, 0.75, 0.9]), self.dice.choice([10.0, 1e4])
        t, one = self.count(), s.number(1.0)
        loss = s.op("Add", self.g, s.mul("w", s.number(decay))) if decay else self.g
        old = s.mul("w", s.op("Sub", one, s.mul(s.number(lambd), "eta")))
        new = s.op("Sub", old, s.mul("eta", loss))
        slower = s.op("Pow", s.op("Add", one, s.mul(s.number(lambd), self.rate, t)), s.number(alpha))
        s.state("w", new)
        s.state("ax", s.op("Add", "ax", s.mul("mu", s.op("Sub", new, "ax"))))
        s.state("eta", s.op("Div", self.rate, slower), [])
        s.state("mu", s.op("Div", one, s.op("Max", one, s.op("Sub", t, s.number(begins)))), [])
        self.hyper |= {"lambd": lambd, "alpha": alpha, "t0": begins, "weight_decay": decay}


RULES = (
    "SGD", "momentum", "Adam", "Adamax", "RAdam", "NAdam", "LAMB", "Adagrad", "RMSProp", "Adadelta", "Lion", "Rprop",
    "ASGD",
)  # fmt: skip
