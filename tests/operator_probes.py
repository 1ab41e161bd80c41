"""A use of an operator, computed by onnx's reference, with gopt's kernels where that is wrong, for any operands."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import helper
from onnx.reference import ReferenceEvaluator
from operator_forms import Array, Case, forms

from gopt.operators.operator import Slope
from gopt.runtime.fallback_kernels import operators

NEAR = 1e-6
"""Size of a small move, in units of the value's own."""


class Probe:
    """``inputs``: the operands, floats widened; ``floats``: places of operands that are floats."""

    def __init__(self, op_type: str, case: Case, *, wide: bool = True) -> None:
        self.case = case
        self.inputs = [
            each.astype(np.float64) if wide and each is not None and each.dtype == np.float32 else each
            for each in case.inputs
        ]
        self.floats = [place for place, each in enumerate(self.inputs) if each is not None and each.dtype.kind == "f"]
        names = [f"x{place}" if each is not None else "" for place, each in enumerate(self.inputs)]
        outputs = [f"y{place}" for place in range(case.results)]
        node = helper.make_node(op_type, names, outputs, **case.attributes)
        values = {name: each for name, each in zip(names, self.inputs) if each is not None}
        types = {name: helper.np_dtype_to_tensor_dtype(each.dtype) for name, each in values.items()}
        infos = [helper.make_tensor_value_info(name, type, None) for name, type in types.items()]
        ends = [helper.make_empty_tensor_value_info(name) for name in outputs]
        graph = helper.make_graph([node], "probe", infos, ends)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", case.opset)])
        self._evaluator = ReferenceEvaluator(model, new_ops=list(operators()))

    def result(self, changed: dict[int, Array] | None = None) -> Array:
        """The first result, with other values of some operands."""
        return self.results(changed)[0]

    def results(self, changed: dict[int, Array] | None = None) -> list[Array]:
        """All results, with other values of some operands."""
        values = {place: each for place, each in enumerate(self.inputs) if each is not None} | (changed or {})
        with np.errstate(all="ignore"):
            found = self._evaluator.run(None, {f"x{place}": each for place, each in values.items()})
        return [np.asarray(each) for each in found]

    def slope(self, place: int, generator: np.random.Generator) -> Slope:
        """How the result is seen to follow an operand; NONE where it is no float."""
        found = Slope.LINEAR
        moved = followed = False
        for scale, value, other in self._values(place, generator):
            at, near = self.result({place: value}), scale * NEAR * generator.standard_normal(value.shape)
            if at.dtype.kind != "f":
                return Slope.NONE
            up, down = self.result({place: value + near}), self.result({place: value - near})
            rest = self.result({place: other})
            between, twice = self.result({place: (value + 3 * other) / 4}), self.result({place: 2 * value})
            sound = np.isfinite(at + up + down + rest + between + twice)
            if not sound.any():
                continue
            at, up, down, rest, between, twice = (each[sound] for each in (at, up, down, rest, between, twice))
            size = max(float(np.abs(at).max()), float(np.abs(rest).max()), 1e-30)
            first, second = np.abs(up - down), np.abs(up + down - 2 * at)
            moved |= bool(first.max() > 1e-12 * size)
            followed |= bool((at != rest).any())
            if second.max() > 1e-8 * first.max() and second.max() > 1e-14 * size:
                found = max(found, Slope.CURVED)
            if np.abs(between - (at + 3 * rest) / 4).max() > 1e-9 * size:
                found = max(found, Slope.BENT)
            elif np.abs(twice - 2 * at).max() > 1e-9 * size:
                found = max(found, Slope.AFFINE)
        return found if moved else Slope.STEP if followed else Slope.NONE

    def _values(self, place: int, generator: np.random.Generator) -> Iterator[tuple[float, Array, Array]]:
        """Sizes, and two values of an operand of this size, of either sign or above zero."""
        shape = self.inputs[place].shape
        for scale in (0.3, 1.0, 4.0):
            one, other = (scale * generator.standard_normal(shape) for _ in range(2))
            yield scale, np.asarray(one), np.asarray(other)
            yield scale, np.abs(one) + 0.01, np.abs(other) + 0.01


def probes(op_type: str, count: int = 6, *, wide: bool = False) -> Iterator[Probe]:
    """The uses of an operator that onnx's reference computes: it has not every form, such as a scalar for Softsign."""
    for each in forms(op_type, count):
        try:
            probe = Probe(op_type, each, wide=wide)
            probe.result()
        except Exception:
            continue
        yield probe
