"""Networks over places, drawn at random and split by rows or columns: ``cd tests && python
tensor_parallel/fuzz_images.py``.

``--seed S --minutes M``. What members make together is held against the whole; prints what differs with its seed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from members import AXIS, Array, bare, graph_of, joined, run, simulated

from gopt.ir.graph import Node
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.records.placements import REPLICATED, Placement, Replicated, Shard
from gopt.tensor_parallel.check import check
from gopt.tensor_parallel.propagate import propagate

KINDS = (
    "Conv", "Conv", "ConvTranspose", "MaxPool", "Places", "AveragePool", "LpPool", "Pad", "Slice", "Relu", "Gradient",
    "Mean", "BatchNormalization",
)  # fmt: skip


class Drawn:
    """A graph in the making, run as it grows."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.nodes: list[Node] = []
        self.values: dict[str, Array] = {}
        self.given: dict[str, Array] = {}
        self.places = self.random.choice([1, 2, 2, 2, 3])
        places = [self.random.randint(4, 14) for _ in range(self.places)]
        shape = (self.random.randint(1, 2), self.random.randint(1, 4), *places)
        self.last = self.value("x", self.numbers.standard_normal(shape).astype(np.float32))

    def value(self, name: str, array: Array) -> str:
        self.values[name] = self.given[name] = array
        return name

    def weight(self, *shape: int) -> str:
        return self.value(f"w{len(self.given)}", 0.5 * self.numbers.standard_normal(shape).astype(np.float32))

    def ints(self, *values: int) -> str:
        return self.value(f"i{len(self.given)}", np.array(values, np.int64))

    def add(self, op_type: str, inputs: list[str], results: int = 1, **attributes: Any) -> list[str]:
        node = Node(op_type, inputs, [f"v{len(self.nodes)}_{place}" for place in range(results)], attributes=attributes)
        made = run([node], self.values, node.outputs, 20)
        assert all(each.size and np.isfinite(each).all() for each in made)
        self.values |= dict(zip(node.outputs, made))
        self.nodes.append(node)
        return node.outputs

    def windows(self, least: int = 1) -> dict[str, Any]:
        """Kernel, strides, pads for the last value."""
        pick, count = self.random.randint, self.places
        kernel = [pick(least, 5) for _ in range(count)]
        dilations = [1 if size > 3 else pick(1, 2) for size in kernel]
        pads = [pick(0, (size - 1) * step) for size, step in zip(kernel, dilations)]
        behind = [pick(0, (size - 1) * step) for size, step in zip(kernel, dilations)]
        found = {
            "kernel_shape": kernel, "strides": [pick(1, 3) for _ in range(count)], "pads": [*pads, *behind],
            "dilations": dilations,
        }  # fmt: skip
        if self.random.random() < 0.15 and max(dilations) == 1:
            found["auto_pad"] = self.random.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])
            del found["pads"]
        return found

    def step(self) -> None:
        """One more operator."""
        kind, (_, channels, *places) = self.random.choice(KINDS), self.values[self.last].shape
        given = self.windows()
        if kind == "Conv":
            group = self.random.choice([1, 1, channels])
            made = group * self.random.randint(1, 3)
            inputs = [self.last, self.weight(made, channels // group, *given["kernel_shape"])]
            (self.last,) = self.add("Conv", inputs + self.bias(made), group=group, **given)
        elif kind == "ConvTranspose":
            made = self.random.randint(1, 3)
            more = [self.random.randint(0, stride - 1) for stride in given["strides"]]
            if "pads" not in given:
                given = {key: value for key, value in given.items() if key != "auto_pad"}
            inputs = [self.last, self.weight(channels, made, *given["kernel_shape"])]
            (self.last,) = self.add("ConvTranspose", inputs + self.bias(made), output_padding=more, **given)
        elif kind == "Gradient":
            self.gradient(channels, given)
        elif kind in ("MaxPool", "Places"):
            self.last, *_ = self.add("MaxPool", [self.last], 1 + (kind == "Places"), **self.pooled(given))
        elif kind in ("AveragePool", "LpPool"):
            given = self.pooled(given)
            if kind == "AveragePool":
                given["count_include_pad"] = self.random.randint(0, 1)
            (self.last,) = self.add(kind, [self.last], **given)
        elif kind == "Pad":
            pads = [self.random.randint(-1, 2) for _ in range(2 * self.places)]
            pads = [0, 0, *pads[: self.places], 0, 0, *pads[self.places :]]
            (self.last,) = self.add("Pad", [self.last, self.ints(*pads)])
        elif kind == "Slice":
            axes = range(2, self.places + 2)
            starts = [self.random.randint(0, 2) for _ in axes]
            ends = [size - self.random.randint(0, 2) for size in places]
            steps = [self.random.randint(1, 2) for _ in axes]
            (self.last,) = self.add("Slice", [self.last, *(self.ints(*each) for each in (starts, ends, axes, steps))])
        elif kind == "Mean":
            (mean,) = self.add("ReduceMean", [self.last, self.ints(*range(2, self.places + 2))])
            (self.last,) = self.add("Sub", [self.last, mean])
        elif kind == "BatchNormalization":
            rows = [self.numbers.uniform(0.5, 2, channels).astype("f4") for _ in range(4)]
            rows = [self.value(f"b{len(self.nodes)}_{place}", row) for place, row in enumerate(rows)]
            self.last, *_ = self.add("BatchNormalization", [self.last, *rows], 3, training_mode=1)
        else:
            (self.last,) = self.add("Relu", [self.last])

    def pooled(self, given: dict[str, Any]) -> dict[str, Any]:
        """Windows that see something."""
        pads = given.get("pads")
        if pads:
            kernel = given["kernel_shape"] * 2
            given = {**given, "pads": [min(pad, size - 1) for pad, size in zip(pads, kernel)]}
        return given

    def bias(self, count: int) -> list[str]:
        return [self.weight(count)] if self.random.random() < 0.4 else []

    def gradient(self, channels: int, given: dict[str, Any]) -> None:
        """The convolution of a value with what another one made of it, as the gradient of the weight."""
        weight = self.weight(2, channels, *given["kernel_shape"])
        (made,) = self.add("Conv", [self.last, weight], **given)
        perm = [1, 0, *range(2, self.places + 2)]
        (left,), (right,) = (self.add("Transpose", [name], perm=perm) for name in (self.last, made))
        pads = given.get("pads")
        if pads is not None:
            self.add("Conv", [left, right], pads=pads, strides=given["dilations"], dilations=given["strides"])
            self.add("ConvTranspose", [made, weight], **given)
        self.last = made


def judge(seed: int) -> Counter[str]:
    """Compare a drawn network, split, with the whole; returns how often what was done."""
    drawn = Drawn(seed)
    for _ in range(drawn.random.randint(2, 6)):
        try:
            drawn.step()
        except Exception:  # nothing is left of the places, or the runtime has no such operator
            drawn.last = next(name for name in reversed(drawn.values) if drawn.values[name].ndim == drawn.places + 2)
    members, dim = drawn.random.randint(2, 4), drawn.random.randint(2, drawn.places + 1)
    ends = sorted(drawn.random.randint(0, drawn.values["x"].shape[dim]) for _ in range(members - 1))
    ends = [0, *ends, drawn.values["x"].shape[dim]]
    seeds: dict[str, Placement] = {"x": Shard(dim, tuple(b - a for a, b in pairwise(ends)))}
    graph = graph_of(drawn.nodes, drawn.values, 20)
    for name, each in drawn.given.items():
        if name != "x":
            graph.initializers[name] = Tensor(TensorType(str(each.dtype), each.shape), array=each)
    step = bare(graph, ["x"])
    made = propagate(step, graph, AXIS, members, seeds)
    check(step, made.graph, AXIS, seeds)
    placed = {**seeds, **made.placements}
    held = simulated(made.graph, placed, {"x": drawn.values["x"]}, members)
    for node in drawn.nodes:
        for name in node.outputs:
            placement = placed.get(name, REPLICATED)
            if isinstance(placement, (Replicated, Shard)):
                whole, found = drawn.values[name].astype("f8"), joined(held[name], placement).astype("f8")
                scale = max(float(np.abs(whole).max()), 1.0)
                np.testing.assert_allclose(found / scale, whole / scale, 0, 2e-5, err_msg=f"{name} of {node}")
    return made.conversions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**8))
    parser.add_argument("--minutes", type=float, default=2.0)
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    end, seed, wrong = time.monotonic() + 60 * given.minutes, given.seed, 0
    while time.monotonic() < end:
        try:
            counts.update(judge(seed))
        except Exception as error:
            wrong += 1
            print(f"{seed}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        seed += 1
    print(f"seeds {given.seed} to {seed - 1}: {wrong} wrong; {dict(counts)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
