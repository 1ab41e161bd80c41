"""Derivatives of convolutions and transposed convolutions in groups, by all operands, in any number of dimensions.

With spatial positions p of the smaller side, k of the kernel, stride s and dilation d, both sides of a convolution meet
where ``large[s p + d k - pad]`` and ``small[p]`` do, so each derivative is a convolution again:

- by the large side: the transposed convolution of the small side;
- by the small side: the convolution of the large side;
- by the kernel: the convolution of the large side with the small side as its kernel, with stride and dilation
  exchanged, where samples and channels trade places.
"""

from __future__ import annotations

from dataclasses import dataclass

from gopt.autodiff.operators import ForwardOperator
from gopt.errors import UnsupportedError
from gopt.ir.tape import ProtoTape
from gopt.text.sanitize import show


@dataclass(frozen=True, slots=True)
class ConvolutionSizes:
    """Sizes of a convolution per spatial dimension. ``large`` and ``small``: of the two sides; a transposed convolution
    makes the large side. ``pads``: begins, then ends, of the large side."""

    group: int
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    kernel: tuple[int, ...]
    large: tuple[int, ...]
    small: tuple[int, ...]
    transposed: bool

    @property
    def rank(self) -> int:
        return len(self.kernel)

    def padded(self, axis: int) -> int:
        return self.large[axis] + self.pads[axis] + self.pads[self.rank + axis]

    def spanned(self, axis: int) -> int:
        """Return the number of elements of the padded large side inside windows."""
        return self.strides[axis] * (self.small[axis] - 1) + self.dilations[axis] * (self.kernel[axis] - 1) + 1


def window_of(operator: ForwardOperator) -> ConvolutionSizes:
    """The sizes of a Conv or ConvTranspose, with explicit pads. Raises UnsupportedError where shapes are unknown, or a
    transposed convolution crops less than nothing."""
    node, attrs = operator.node, operator.attributes
    x, kernel, y = (operator.shape(name)[2:] for name in (node.input[0], node.input[1], node.output[0]))
    rank, transposed = len(kernel), node.op_type == "ConvTranspose"
    large, small = (y, x) if transposed else (x, y)
    ones = (1,) * rank
    strides, dilations = tuple(attrs.get("strides", ones)), tuple(attrs.get("dilations", ones))
    pads = tuple(attrs.get("pads") or (0,) * 2 * rank)
    padding = attrs.get("auto_pad", "NOTSET")
    if padding.startswith("SAME") or (transposed and "output_shape" in attrs):
        extra = attrs.get("output_padding", (0,) * rank)
        spans = [strides[i] * (small[i] - 1) + dilations[i] * (kernel[i] - 1) + 1 - large[i] for i in range(rank)]
        totals = [span + (extra[i] if transposed else 0) for i, span in enumerate(spans)]
        totals = totals if transposed else [max(total, 0) for total in totals]
        if min(totals) < 0:
            raise UnsupportedError(
                f"{node.op_type} {show(node.output[0])} pads its result: it cannot be differentiated by its weight",
                f"--freeze {node.input[1]}, or export it with pads",
            )
        firsts = [total // 2 if padding == "SAME_UPPER" else total - total // 2 for total in totals]
        pads = (*firsts, *(total - before for total, before in zip(totals, firsts)))
    elif padding == "VALID":
        pads = (0,) * 2 * rank
    group = attrs.get("group", 1)
    return ConvolutionSizes(group, strides, dilations, pads, tuple(kernel), tuple(large), tuple(small), transposed)


def differentiate_convolution(
    operator: ForwardOperator, emit: ProtoTape, adjoint: str, wanted: set[int]
) -> dict[int, str]:
    """Emit the derivatives by the operands ``wanted``, given the derivative by the result; returns them by operand."""
    node, window = operator.node, window_of(operator)
    x, weight, adjoints = node.input[0], node.input[1], {}
    transposed = window.transposed
    if 0 in wanted:
        adjoints[0] = (_by_small if transposed else _by_large)(window, emit, adjoint, weight)
    if 1 in wanted:
        large, small = (adjoint, x) if transposed else (x, adjoint)
        shapes = operator.shape(node.output[0]), operator.shape(x)
        samples, channels = shapes[0 if transposed else 1][:2]
        adjoints[1] = _by_kernel(window, emit, large, small, samples, channels)
    if 2 in wanted:
        adjoints[2] = emit.reduce("ReduceSum", adjoint, [0, *range(2, 2 + window.rank)], keepdims=0)
    return adjoints


def _by_large(window: ConvolutionSizes, emit: ProtoTape, small: str, kernel: str) -> str:
    rest = [window.padded(axis) - window.spanned(axis) for axis in range(window.rank)]
    return emit.op(
        "ConvTranspose", small, kernel, group=window.group, strides=window.strides, dilations=window.dilations,
        pads=window.pads, output_padding=rest,
    )  # fmt: skip


def _by_small(window: ConvolutionSizes, emit: ProtoTape, large: str, kernel: str) -> str:
    whole = emit.op(
        "Conv", large, kernel, group=window.group, strides=window.strides, dilations=window.dilations, pads=window.pads
    )  # fmt: skip
    return _cropped(window, emit, whole, window.small, window.strides)


def _by_kernel(window: ConvolutionSizes, emit: ProtoTape, large: str, small: str, samples: int, channels: int) -> str:
    """``samples``, ``channels``: the first two dimensions of the large side."""
    group, rank = window.group, window.rank
    inside, spatial = channels // group, list(range(3, 3 + rank))
    data = emit.reshape(large, [samples, group, inside, *window.large])
    data = emit.op("Transpose", data, perm=[2, 1, 0, *spatial])
    data = emit.reshape(data, [inside, group * samples, *window.large])
    filters = emit.op("Transpose", small, perm=[1, 0, *range(2, 2 + rank)])
    product = emit.op(
        "Conv", data, filters, group=group, strides=window.dilations, dilations=window.strides, pads=window.pads
    )
    product = _cropped(window, emit, product, window.kernel, window.dilations)
    return emit.op("Transpose", product, perm=[1, 0, *range(2, 2 + rank)])


def _cropped(
    window: ConvolutionSizes, emit: ProtoTape, name: str, sizes: tuple[int, ...], steps: tuple[int, ...]
) -> str:
    """Drop elements outside of the window: behind ``sizes``."""
    over = [(window.padded(axis) - window.spanned(axis)) // steps[axis] for axis in range(window.rank)]
    if not any(over):
        return name
    axes = emit.ints(range(2, 2 + window.rank))
    return emit.op("Slice", name, emit.ints([0] * window.rank), emit.ints(sizes), axes)
