"""Steps on images drawn at random: convolutions, pools, norms and slices, with a backward by ``gopt derive``."""

from __future__ import annotations

import random
from pathlib import Path

import onnx
from helpers import Builder

import gopt

MESHES = ("h=2", "h=2", "h=3", "w=2", "w=3", "h=2,w=2", "dp=2,h=2", "h=4", "dp=2,w=2")


class Images:
    """A drawn forward: a batch ``x`` of images, a few operators, a loss."""

    def __init__(self, seed: int) -> None:
        self.b, self.dice = Builder(seed), random.Random(seed)
        self.shape = [self.dice.randint(1, 2), self.dice.randint(1, 3), *(self.dice.randint(6, 13) for _ in "hw")]

    def weight(self, *shape: int) -> str:
        return self.b.const(0.5 * self.b.generator.standard_normal(shape))

    def ints(self, *values: int) -> str:
        return self.b.const(values, "int64")

    def sliding(self, *, pool: bool) -> dict[str, list[int]]:
        """Kernel, strides, dilations and pads."""
        pick, kernel = self.dice.randint, [self.dice.randint(1, 3) for _ in "hw"]
        strides = [pick(1, 2) for _ in kernel]
        dilations = [1 if pool else pick(1, 2) for _ in kernel]
        most = [(size - 1) // (2 if pool else 1) * step for size, step in zip(kernel, dilations)]
        pads = [pick(0, size) for size in (*most, *most)]
        return {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": pads}

    def made(self, given: dict[str, list[int]]) -> list[int]:
        """The places of the result."""
        ends = [self.shape[2 + at] + given["pads"][at] + given["pads"][2 + at] for at in (0, 1)]
        rows = zip(ends, given["kernel_shape"], given["strides"], given["dilations"])
        return [(end - (kernel - 1) * dilation - 1) // stride + 1 for end, kernel, stride, dilation in rows]

    def step(self, value: str) -> str:
        b, kinds = (
            self.b,
            ["Conv", "Conv", "Conv", "ConvTranspose", "MaxPool", "AveragePool", "Relu", "Pad", "Slice", "Norm"],
        )
        kind = self.dice.choice(kinds)
        given = self.sliding(pool=kind in ("MaxPool", "AveragePool"))
        if kind == "Relu":
            return b.op("Relu", value)
        if kind == "Norm":
            mean = b.op("ReduceMean", value, self.ints(0, 2, 3))
            moved = b.op("Sub", value, mean)
            variance = b.op("ReduceMean", b.op("Mul", moved, moved), self.ints(0, 2, 3))
            return b.op("Div", moved, b.op("Sqrt", b.op("Add", variance, b.const(0.1))))
        if kind == "Pad":
            front, behind = ([self.dice.randint(0, 2) for _ in "hw"] for _ in "fb")
            self.shape[2:] = [size + a + z for size, a, z in zip(self.shape[2:], front, behind)]
            return b.op("Pad", value, self.ints(0, 0, *front, 0, 0, *behind))
        if kind == "Slice":
            starts = [self.dice.randint(0, 1) for _ in "hw"]
            ends = [size - self.dice.randint(0, 1) for size in self.shape[2:]]
            self.shape[2:] = [end - start for start, end in zip(starts, ends)]
            return b.op("Slice", value, self.ints(*starts), self.ints(*ends), self.ints(2, 3))
        if kind == "ConvTranspose":
            channels = self.dice.randint(1, 3)
            more = [self.dice.randint(0, stride - 1) for stride in given["strides"]]
            rows = zip(self.shape[2:], given["kernel_shape"], given["strides"], given["dilations"], more)
            sizes = [
                (size - 1) * stride + (kernel - 1) * step + 1 + extra for size, kernel, stride, step, extra in rows
            ]
            sizes = [size - given["pads"][at] - given["pads"][2 + at] for at, size in enumerate(sizes)]
            weight = self.weight(self.shape[1], channels, *given["kernel_shape"])
            self.shape[1:] = [channels, *sizes]
            return b.op("ConvTranspose", value, weight, output_padding=more, **given)
        sizes = self.made(given)
        if min(sizes) < 4:
            return value
        self.shape[2:] = sizes
        if kind == "Conv":
            channels = self.dice.randint(1, 3)
            weight = self.weight(channels, self.shape[1], *given["kernel_shape"])
            self.shape[1] = channels
            return b.op("Conv", value, weight, *([self.weight(channels)] if self.dice.random() < 0.4 else []), **given)
        if kind == "AveragePool":
            return b.op(kind, value, count_include_pad=self.dice.randint(0, 1), **given)
        return b.op(kind, value, **given)

    def forward(self) -> onnx.ModelProto:
        b = self.b
        value = b.input("x", self.shape)
        value = b.op("Conv", value, self.weight(2, self.shape[1], 3, 3), pads=[1, 1, 1, 1])
        self.shape[1] = 2
        for _ in range(self.dice.randint(1, 4)):
            if min(self.shape[2:]) > 4:
                value = self.step(value)
        square = b.op("Mul", value, value)
        loss = b.op("ReduceMean" if self.dice.random() < 0.5 else "ReduceSum", square, keepdims=0)
        b.output("loss", loss, ())
        return b.model()


def derived(seed: int, folder: Path) -> Path:
    """The step of a drawn forward. Raises GoptError for one without a step."""
    onnx.save(Images(seed).forward(), folder / "forward.onnx")
    gopt.derive(folder / "forward.onnx", folder / "step.onnx", gopt.DeriveOptions(loss="loss", optimizer="sgd"))
    return folder / "step.onnx"


def sharded(seed: int, folder: Path) -> Path | None:
    """The ranks of a drawn step on a drawn mesh; None where there are none."""
    try:
        step = gopt.load(derived(seed, folder))
        mesh = random.Random(seed).choice(MESHES)
        gopt.shard(step, gopt.Mesh.parse(mesh)).write(folder / "ranks")
    except gopt.GoptError:
        return None
    return folder / "ranks"
