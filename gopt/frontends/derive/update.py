"""Writes the update behind the gradients: loss scale, clip, schedule and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx

from gopt.frontends.derive import gradient_rules
from gopt.frontends.derive.optimizers import COUPLED_DECAY, DECOUPLED_DECAY, Decay, attributes
from gopt.frontends.derive.options import DYNAMIC, DeriveOptions
from gopt.frontends.derive.writer import StepWriter, scalar
from gopt.frontends.functional_step import UPDATED
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, numpy_dtype

LR, STEP, SCHEDULE_STEP, SCALE, TRACKER = "lr", "step", "schedule.step", "loss_scale", "loss_scale.growth_tracker"
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000
"""The changes of torch.amp.GradScaler to its scale."""
FIRST_SCALE = 65536.0
TINY = 1e-6
"""The number that torch's clip_grad_norm_ adds to the norm."""


@dataclass
class DerivedUpdate:
    """Writes the update of all parameters. ``gradients``: parameter -> gradient."""

    writer: StepWriter
    options: DeriveOptions
    parameters: Mapping[str, Tensor]
    gradients: dict[str, str]
    rate: str = ""
    """The learning rate in float32, a value."""
    lr: str = ""
    """The input that holds the learning rate, or ''."""
    overflowed: str = ""
    replaced: dict[str, tuple[TensorType, str]] = field(default_factory=dict)
    """States that an overflow leaves as they were, with their types and new values."""

    def write(self, scale: str) -> None:
        """Append the update; ``scale``: the loss scale in the gradients, or ''."""
        self._scale(scale)
        self._clip()
        results = self._scalars()
        for name, tensor in self.parameters.items():
            self._parameter(name, tensor, results)
        for name, (kind, new) in self.replaced.items():
            self.writer.replace(name, kind, self._gated(name, new))
        if scale and self.options.loss_scale == DYNAMIC:
            self._new_scale(scale)

    # --- gradients --------------------------------------------------------------------------------------------------

    def _scale(self, scale: str) -> None:
        if not scale:
            return
        writer, flags = self.writer, []
        unscale = writer.node("Reciprocal", [scale], "unscale")
        for name, gradient in self.gradients.items():
            flags += writer.call(gradient_rules.NOT_FINITE, [gradient], [f"{gradient}.not_finite"])
            inverse = self._as(unscale, "float32", self._dtype(name))
            self.gradients[name] = writer.call(gradient_rules.UNSCALE, [inverse, gradient], [f"{gradient}.unscaled"])[0]
        count = writer.node("Sum", flags, "overflowed.count") if len(flags) > 1 else flags[0]
        zero = writer.number("overflowed.none", 0, "float32")
        self.overflowed = writer.node("Greater", [count, zero], "overflowed")

    def _clip(self) -> None:
        writer, options = self.writer, self.options
        if options.clip_value is not None:
            bounds = {"low": -options.clip_value, "high": options.clip_value}
            for name, gradient in self.gradients.items():
                clipped = writer.call(
                    gradient_rules.CLIP_VALUE, [gradient], [f"{gradient}.clipped"], bounds, self._dtype(name)
                )
                self.gradients[name] = clipped[0]
        if options.clip_norm is not None:
            squares = [
                writer.call(gradient_rules.SQUARED_NORM, [gradient], [f"{gradient}.squared_norm"])[0]
                for gradient in self.gradients.values()
            ]
            total = writer.node("Sum", squares, "squared_norm") if len(squares) > 1 else squares[0]
            bound = {"bound": options.clip_norm, "tiny": TINY, "one": 1.0}
            (share,) = writer.call(gradient_rules.CLIP_FACTOR, [total], ["clip_factor"], bound, "float32")
            for name, gradient in self.gradients.items():
                factor = self._as(share, "float32", self._dtype(name))
                self.gradients[name] = writer.node("Mul", [gradient, factor], f"{gradient}.clipped")

    # --- scalars ----------------------------------------------------------------------------------------------------

    def _scalars(self) -> list[str]:
        """The scalar operands of the updates, in float32."""
        writer, options, rule = self.writer, self.options, self.options.rule
        rate = self._rate()
        results = {LR: rate}
        if rule.counts:
            counter = writer.state(STEP, scalar(0))
            one = writer.number("one", 1, "float32")
            count = writer.node("Add", [counter, one], self._new(counter))
            self.replaced[counter] = TensorType("float32", ()), count
            wide = [self._as(rate, "float32", "float64"), self._as(count, "float32", "float64")]
            carried = [writer.state(name, scalar(start)) for name, start in rule.carried.items()]
            wide += [self._as(name, "float32", "float64") for name in carried]
            outputs = [f"optimizer.{name}" for name in rule.results]
            settings = {**rule.options, **options.optimizer_options}
            outputs = writer.call(rule.scalars, wide, [*outputs, *(f"{name}.wide" for name in carried)], settings)
            for name, new in zip(carried, outputs[len(rule.results) :]):
                narrow = writer.node("Cast", [new], self._new(name), to=onnx.TensorProto.FLOAT)
                self.replaced[name] = TensorType("float32", ()), narrow
            results |= {name: self._as(output, "float64", "float32") for name, output in zip(rule.results, outputs)}
        self.rate = rate
        return [results[name] for name in rule.results]

    def _rate(self) -> str:
        writer, options = self.writer, self.options
        if options.lr is None:
            base = self.lr = writer.input(LR, TensorType("float32", ()))
        else:
            base = writer.number("lr.constant", options.lr, "float32")
        schedule = options.scheduled
        if schedule is None:
            return base
        counter = writer.state(SCHEDULE_STEP, scalar(0))
        one = writer.number("one", 1, "float32")
        writer.replace(counter, TensorType("float32", ()), writer.node("Add", [counter, one], f"{counter}{UPDATED}"))
        wide = [self._as(base, "float32", "float64"), self._as(counter, "float32", "float64")]
        settings = {
            name: value for name, value in {**schedule.options, **options.schedule_options}.items() if value is not None
        }
        (rate,) = writer.call(schedule.rule, wide, ["schedule.rate"], settings)
        return self._as(rate, "float64", "float32")

    def _as(self, name: str, have: str, want: str) -> str:
        return name if have == want else self.writer.cast(name, want)

    def _dtype(self, name: str) -> str:
        return self.parameters[name].type.dtype

    # --- one parameter ----------------------------------------------------------------------------------------------

    def _parameter(self, name: str, tensor: Tensor, results: list[str]) -> None:
        writer, rule, dtype = self.writer, self.options.rule, tensor.type.dtype
        parameter, gradient, decay = name, self.gradients[name], self.options.decay
        narrow = {result: self._as(result, "float32", dtype) for result in (*results, self.rate)}
        if decay and rule.decay is Decay.COUPLED:
            settings = {"weight_decay": decay}
            (gradient,) = writer.call(COUPLED_DECAY, [parameter, gradient], [f"{gradient}.decayed"], settings, dtype)
        elif decay:
            settings = {"weight_decay": decay, "one": 1.0}
            inputs = [narrow[self.rate], name]
            (parameter,) = writer.call(DECOUPLED_DECAY, inputs, [f"{name}.decayed"], settings, dtype)
        zeros = Tensor(tensor.type, reader=lambda: np.zeros(tensor.type.dims, numpy_dtype(dtype)))
        states = [writer.state(f"{name}.{state}", zeros) for state in rule.states]
        scalars = [narrow[result] for result in results]
        settings = attributes({**rule.options, **self.options.optimizer_options})
        news = [self._new(state) for state in (name, *states)]
        news = writer.call(rule.update, [*scalars, parameter, gradient, *states], news, settings, dtype)
        writer.values[name] = tensor
        self.replaced.update((state, (tensor.type, new)) for state, new in zip((name, *states), news))

    # --- behind the update ------------------------------------------------------------------------------------------

    def _new(self, state: str) -> str:
        """The wished name of a state's new value, before the selection of ``_gated``, if any."""
        return f"{state}.next" if self.overflowed else f"{state}{UPDATED}"

    def _gated(self, state: str, new: str) -> str:
        """The new value, or the old one where a gradient overflowed."""
        return self.writer.node("Where", [self.overflowed, state, new], f"{state}{UPDATED}") if self.overflowed else new

    def _new_scale(self, scale: str) -> None:
        writer = self.writer
        tracker = writer.state(TRACKER, scalar(0))
        settings = {"growth": GROWTH, "backoff": BACKOFF, "interval": INTERVAL, "one": 1.0, "zero": 0.0}
        inputs, wished = [scale, tracker, self.overflowed], [f"{name}{UPDATED}" for name in (scale, tracker)]
        news = writer.call(gradient_rules.NEW_SCALE, inputs, wished, settings, "float32")
        for name, new in zip((scale, tracker), news):
            writer.replace(name, TensorType("float32", ()), new)
