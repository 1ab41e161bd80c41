"""From a plan to a step: the model, and the truth about it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
from helpers import scramble

from steps_gen import forms
from steps_gen.graphs import into_functions, reordered
from steps_gen.networks import NETWORKS, Batch, Net, losses
from steps_gen.plan import Plan
from steps_gen.rules import RULES, Hold, mixed
from steps_gen.tape import Tape, backward


@dataclass
class Made:
    """A step and what is true of it; names are those of ``model``, of which ``plain`` is the same, easier to read."""

    plan: Plan
    model: onnx.ModelProto
    plain: onnx.ModelProto
    names: dict[str, str]
    """Names of ``plain`` -> names of ``model``."""
    gradients: dict[str, str]
    """Parameter -> its true local gradient, up to a constant or a scalar of the graph; plain names, like all below."""
    states: dict[str, str]
    statistics: list[str]
    loss: str
    batch: Batch
    hyper: dict[str, list[np.ndarray]]
    """Input -> its values, one a step, round and round."""
    known: dict[str, np.ndarray]
    """The value of every name as the generator once computed it."""


@dataclass
class Writer:
    """Writes the update behind a network's gradients."""

    plan: Plan
    t: Tape
    net: Net
    states: dict[str, str] = field(default_factory=dict)
    hyper: dict[str, list[np.ndarray]] = field(default_factory=dict)
    scale: str = ""
    gate: str = ""
    rate: str = ""
    loss: str = ""

    def setting(self, name: str, values: list[object], dtype: str = "float32") -> str:
        self.hyper[name] = [np.asarray(value, dtype) for value in values]
        return self.t.input(name, (), dtype, values[0])

    def write(self, gradients: dict[str, str]) -> None:
        t, plan = self.t, self.plan
        t.part = "common"
        self.rate = self._rate()
        if plan.trap == "loss-rate":
            self.rate = t.op("Mul", self.rate, t.op("Min", t.cast(self.loss, "float32"), t.const(2.0)))
        wide = {name: t.cast(g, "float32") for name, g in gradients.items()}
        if self.scale:
            wide = {name: t.op("Div", g, self.scale) for name, g in wide.items()}
        if plan.trap == "count":
            seen = t.cast(next(iter(self.net.batch)), "float32")
            positive = t.cast(t.op("Greater", seen, t.const(0.5)), "float32")
            count = t.op("Add", t.op("ReduceSum", positive, keepdims=0), t.const(1.0))
            wide = {name: t.op("Div", g, count) for name, g in wide.items()}
        if plan.layout == "joined":
            wide = dict(zip(wide, forms.joined(t, list(wide.values())), strict=True))
        else:
            wide = {name: forms.unchanged(t, plan.layout, g) for name, g in wide.items()}
        self._gate(list(wide.values()))
        if plan.gate == "accumulate":
            wide = self._accumulated(wide)
        if plan.scale == "dynamic":
            grown = t.op("Mul", self.scale, t.const(1.125))
            if plan.gate == "finite":
                grown = t.op("Where", self.gate, grown, t.op("Mul", self.scale, t.const(0.5)))
            self.states[self.scale] = grown
        elif plan.scale == "state":
            self.states[self.scale] = t.op("Min", self.scale, t.const(1024.0))
        wide = self._clipped(wide)
        if plan.metric:
            norms = [t.op("ReduceL2", g, keepdims=0) for g in wide.values()]
            t.output("norm", t.op("ReduceMax", forms.stacked(t, norms), keepdims=0), ())
        if plan.trap == "batch-mean":
            seen = t.op("ReduceMean", t.cast(next(iter(self.net.batch)), "float32"), keepdims=0)
            wide = {name: t.op("Add", g, t.op("Mul", seen, t.const(0.1))) for name, g in wide.items()}
        if plan.joint:
            self._joint(wide)
            return
        for place, (name, g) in enumerate(wide.items()):
            t.part = name
            self._update(place, name, g)
        t.part = "common"

    def _joint(self, gradients: dict[str, str]) -> None:
        """All parameters as one row: what flat buffers of optimizers are."""
        t, names = self.t, list(gradients)
        one = t.const([-1], "int64")
        rows = [
            t.op("Concat", *(t.op("Reshape", name, one) for name in group), axis=0)
            for group in (names, gradients.values())
        ]
        hold = Hold(t, "all", rows[0])
        way = RULES[self.plan.rules[0]](hold, rows[1])
        new = t.op("Sub", rows[0], t.op("Mul", way, self.rate))
        if self.gate:
            new = forms.gated(t, self.plan.gate_form, self.gate, new, rows[0])
        for name, part in zip(names, forms.cut_up(t, new, names), strict=True):
            for kind in self.plan.tail:
                part = forms.tail(t, kind, part)
            self.states[name] = part
        for state, value in hold.states:
            self.states[state] = forms.gated(t, self.plan.gate_form, self.gate, value, state) if self.gate else value

    def _rate(self) -> str:
        t, kind = self.t, self.plan.schedule
        rate = self.setting("lr", [0.05, 0.03])
        if kind == "none":
            return rate
        dtype = "float32" if kind == "warm-up" else "int64"
        step = t.state("step", np.asarray(1, dtype))
        new = self.states[step] = t.op("Add", step, t.const(1, dtype))
        if kind == "table":
            return t.op("Mul", rate, t.op("Gather", t.const(np.linspace(1.5, 0.1, 30)), new))
        if kind.startswith("if"):
            early = t.op("Less", new, t.const(3, dtype))
            held = "" if kind == "if" else t.op("Mul", rate, t.const(0.5))
            return t.op("Mul", rate, t.op("If", early, **_branches(held)))
        part = t.op("Div", t.cast(new, "float32"), t.const(10.0))
        return t.op("Mul", rate, t.op("Min", t.const(1.0), part))

    def _gate(self, gradients: list[str]) -> None:
        t, kind = self.t, self.plan.gate
        if kind == "flag":
            self.gate = self.setting("flag", [True, False, True], "bool")
        elif kind == "flag-number":
            self.gate = t.op("Greater", self.setting("flag", [1.0, 0.0, 1.0]), t.const(0.5))
        elif kind in ("every", "accumulate"):
            micro = t.state("micro", np.asarray(1, np.int64))
            count = t.op("Add", micro, t.const(1, "int64"))
            self.gate = t.op("GreaterOrEqual", count, t.const(2, "int64"))
            self.states[micro] = t.op("Where", self.gate, t.const(0, "int64"), count)
        elif kind == "finite":
            flags = [t.op("ReduceMax", t.cast(t.op("IsInf", g), "float32"), keepdims=0) for g in gradients]
            bad = [t.op("ReduceMax", t.cast(t.op("IsNaN", g), "float32"), keepdims=0) for g in gradients]
            self.gate = t.op("Equal", forms.total(t, flags + bad), t.const(0.0))
        elif kind == "small":
            squares = [t.op("ReduceSumSquare", g, keepdims=0) for g in gradients]
            self.gate = t.op("Less", t.op("Sqrt", forms.total(t, squares)), t.const(1.0))

    def _accumulated(self, gradients: dict[str, str]) -> dict[str, str]:
        t, used = self.t, {}
        for name, g in gradients.items():
            held = t.state(f"{name}.acc", t.generator.uniform(-1e-2, 1e-2, t.shape(g)).astype(np.float32))
            total = t.op("Add", held, g)
            self.states[held] = t.op("Where", self.gate, t.const(np.zeros(t.shape(g))), total)
            used[name] = t.op("Mul", total, t.const(0.5))
        return used

    def _clipped(self, gradients: dict[str, str]) -> dict[str, str]:
        t, kind, layout = self.t, self.plan.clip, self.plan.clip_layout
        if kind == "none":
            return gradients
        given = {name: forms.unchanged(t, layout, g) for name, g in gradients.items()}
        if kind == "value":
            done = {name: t.op("Clip", g, t.const(-0.1), t.const(0.1)) for name, g in given.items()}
        elif kind == "norm":
            done = {name: t.op("Mul", g, self._bound(t.op("ReduceL2", g, keepdims=0))) for name, g in given.items()}
        elif kind == "global":
            squares = [t.op("ReduceSum", t.op("Mul", g, g), keepdims=0) for g in given.values()]
            bound = self._bound(t.op("Sqrt", forms.total(t, squares)))
            done = {name: t.op("Mul", g, bound) for name, g in given.items()}
        elif kind == "global-signs":
            terms = [t.op("ReduceSum", t.op("Mul", g, g), keepdims=0) for g in given.values()]
            while len(terms) > 1:
                pair = terms.pop(0), terms.pop(int(t.generator.integers(len(terms))))
                terms.append(t.op(str(t.generator.choice(["Add", "Sub"])), *pair))
            bound = self._bound(t.op("Abs", terms[0]))
            done = {name: t.op("Mul", g, bound) for name, g in given.items()}
        elif kind == "global-flat":
            flat = {name: t.op("Reshape", g, t.const([-1], "int64")) for name, g in given.items()}
            norms = forms.stacked(t, [t.op("ReduceL2", g, keepdims=0) for g in flat.values()])
            bound = self._bound(t.op("ReduceL2", norms, keepdims=0))
            done = {name: t.op("Mul", g, bound) for name, g in flat.items()}
            done = {name: t.op("Reshape", g, t.const(t.shape(given[name]), "int64")) for name, g in done.items()}
        else:
            tops = forms.stacked(t, [t.op("ReduceMax", t.op("Abs", g), keepdims=0) for g in given.values()])
            bound = self._bound(t.op("ReduceMax", tops, keepdims=0))
            done = {name: t.op("Mul", g, bound) for name, g in given.items()}
        return {name: forms.unchanged(t, layout, g) for name, g in done.items()}

    def _bound(self, norm: str) -> str:
        t = self.t
        return t.op("Min", t.const(1.0), t.op("Div", t.const(0.3), t.op("Add", norm, t.const(1e-6))))

    def _update(self, place: int, name: str, g: str) -> None:
        t, plan = self.t, self.plan
        held = name
        if plan.precision == "master":
            held = t.state(f"{name}.master", t.values[name].astype(np.float32))
        hold = Hold(t, name, t.cast(held, "float32"))
        if plan.decay == "coupled":
            g = t.op("Add", g, t.op("Mul", hold.value, t.const(0.02)))
        elif plan.decay == "absolute":
            g = t.op("Add", g, t.op("Mul", t.op("Sign", hold.value), t.const(0.02)))
        way = RULES[plan.rules[place % len(plan.rules)]](hold, g)
        if mask := self._mask(name):
            way = t.op("Mul", way, mask)
        new = self._moved(place, hold.value, way)
        self._finish(hold, held, new)

    def _mask(self, name: str) -> str:
        if self.plan.mask == "none" or len(self.net.params[name]) != 2:
            return ""
        return self.net.masks[name]

    def _finish(self, hold: Hold, held: str, new: str) -> None:
        """Gate, tail and narrowing of a parameter and of its states; what averages it."""
        t, plan, name = self.t, self.plan, hold.name
        half = plan.precision == "half"
        if self.gate:
            new = forms.gated(t, plan.gate_form, self.gate, new, hold.value)
        wide = new
        if half:
            new = t.cast(new, "float16")
        for kind in plan.tail:
            new = forms.tail(t, kind, new)
        self.states[held] = new
        if plan.precision == "master":
            self.states[name] = t.cast(new, "float16")
        for state, value in hold.states:
            if self.gate:
                value = forms.gated(t, plan.gate_form, self.gate, value, state)
            for kind in plan.tail if plan.tail_on == "all" else ():
                value = forms.tail(t, kind, value)
            self.states[state] = value
        if plan.average == "none":
            return
        copy = t.state(f"{name}.copy", t.values[name].astype(np.float32) * np.float32(0.9))
        mixed = hold.mixed(copy, wide, 0.9)
        if plan.average == "lookahead" and self.gate:
            mixed = t.op("Where", self.gate, mixed, copy)
        self.states[copy] = mixed

    def _moved(self, place: int, value: str, way: str) -> str:
        """A parameter's new value, in one of many forms."""
        t, plan, rate = self.t, self.plan, self.rate
        if plan.rates == "own":
            rate = t.op("Mul", rate, t.const(1.0 + 0.25 * place))
        elif plan.rates == "rows" and t.shape(value):
            rate = t.op("Mul", rate, t.const(forms.wide(t.shape(value), t.generator)))
        if plan.decay == "decoupled":
            value = t.op("Mul", value, t.op("Sub", t.const(1.0), t.op("Mul", rate, t.const(0.1))))
        step = t.op("Mul", way, rate)
        one = t.const(1.0)
        made = {
            "sub": lambda: t.op("Sub", value, step),
            "add-neg": lambda: t.op("Add", t.op("Neg", step), value),
            "exp": lambda: t.op("Mul", value, t.op("Exp", t.op("Neg", step))),
            "relative": lambda: t.op("Mul", value, t.op("Sub", one, step)),
            "lerp": lambda: mixed(t, value, t.op("Sub", value, step), 0.75),
            "factor": lambda: t.op("Mul", t.op("Sub", t.op("Div", value, rate), way), rate),
            "sum": lambda: t.op("Sum", value, t.op("Neg", step), t.const(0.0)),
            "bounded": lambda: t.op("Min", t.op("Max", t.op("Sub", value, step), t.const(-2.0)), t.const(2.0)),
        }  # fmt: skip
        return made[plan.form]()


def _branches(held: str) -> dict[str, onnx.GraphProto]:
    """Two bodies that give a factor of the rate: constants, or one that reads the graph around it."""
    helper = onnx.helper

    def body(name: str, value: float) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{name}.out", 1, ())
        number = helper.make_tensor(f"{name}.value", 1, (), [value])
        nodes = [helper.make_node("Constant", [], [f"{name}.out" if not held else f"{name}.c"], value=number)]
        if held:
            nodes.append(helper.make_node("Add", [held, f"{name}.c"], [f"{name}.out"]))
        return helper.make_graph(nodes, name, [], [out])

    return {"then_branch": body("early", 0.4), "else_branch": body("late", 1.0)}


def make(plan: Plan) -> Made:
    """Write the step of a plan."""
    t = Tape(seed=plan.seed % 1000)
    half = plan.precision != "single"
    net = Net(
        t,
        compute="float16" if half else "float32",
        stored="float16" if plan.precision in ("half", "master") else "float32",
        activation=plan.activation,
        mask=plan.mask,
    )
    prediction = NETWORKS[plan.network](net, plan.widths, plan.batch, plan.bias)
    writer = Writer(plan, t, net)
    loss, rest, factor = losses(net, plan.loss, prediction)
    if plan.scale in ("state", "dynamic"):
        writer.scale = t.state("loss_scale", np.float32(8))
    elif plan.scale == "constant":
        writer.scale = t.const(16.0)
    trained = list(net.params)[1 if plan.frozen and len(net.params) > 1 else 0 :]
    t.recording = False
    adjoint = t.op("Mul", rest, t.like(factor, rest))
    if writer.scale:
        adjoint = t.op("Mul", adjoint, t.cast(writer.scale, net.compute))
    gradients = backward(t, prediction, adjoint, set(trained))
    gradients = {name: gradients[name] for name in trained}
    writer.loss = loss
    t.output("loss", t.cast(loss, "float32"), ())
    writer.write(gradients)
    for name in net.masks.values():
        if plan.mask.startswith("input"):
            writer.hyper[name] = [t.values[name]]
    for state, value in {**net.statistics, **writer.states}.items():
        t.output(f"{state}_new", value, t.shape(value), t.dtype(value))
    plain = t.model()
    model = plain
    if plan.function:
        model = into_functions(model, {node: part for node, part in t.parts.items() if part in net.params})
    names: dict[str, str] = {}
    if plan.scrambled:
        model, names = scramble(reordered(model, plan.seed), plan.seed)
    real = {old: t.renamed.get(new, new) for old, new in gradients.items()}
    return Made(
        plan, model, plain, names, real, {name: f"{name}_new" for name in (*net.statistics, *writer.states)},
        list(net.statistics), "loss", net.batch, writer.hyper,
        {t.renamed.get(name, name): value for name, value in t.values.items()},
    )  # fmt: skip
