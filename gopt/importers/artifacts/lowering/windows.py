"""Gradients of convolutions and pools of any number of dimensions, from the shapes of the operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from gopt.importers.artifacts.hints import EXPORT_AGAIN
from gopt.importers.artifacts.lowering.builder import Builder


@dataclass(frozen=True, slots=True)
class LoweredWindow:
    """How a kernel moves over ``space``: per dimension its size, steps, and what is added before and after."""

    space: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    def results(self) -> tuple[int, ...]:
        """Places of the kernel in each dimension."""
        return tuple(
            (size + low + high - (kernel - 1) * dilation - 1) // stride + 1
            for size, kernel, stride, dilation, low, high in zip(
                self.space, self.kernel, self.strides, self.dilations, self.before, self.after
            )
        )

    def unread(self) -> tuple[int, ...]:
        """Elements behind the last place of the kernel in each dimension."""
        return tuple(
            size + low + high - ((count - 1) * stride + (kernel - 1) * dilation + 1)
            for size, count, kernel, stride, dilation, low, high in zip(
                self.space, self.results(), self.kernel, self.strides, self.dilations, self.before, self.after
            )
        )


def window(
    b: Builder, space: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
    pads: Sequence[int], auto_pad: str,
) -> LoweredWindow:  # fmt: skip
    """Raises UnsupportedError for padding not written out."""
    n = len(space)
    if auto_pad not in ("NOTSET", "VALID"):
        raise b.refusal(f"it has auto_pad {auto_pad}", "export the forward with its pads written out")
    ones, pads = (1,) * n, tuple(pads) or (0,) * (2 * n)
    sizes = LoweredWindow(
        tuple(space), tuple(kernel), tuple(strides) or ones, tuple(dilations) or ones, pads[:n], pads[n:]
    )  # fmt: skip
    parts = (sizes.kernel, sizes.strides, sizes.dilations, sizes.before, sizes.after)
    if any(len(part) != n for part in parts) or any(size < 1 for part in parts[:3] for size in part):
        raise b.refusal("its window does not fit its operand", EXPORT_AGAIN)
    return sizes


def conv_grad(
    b: Builder, dy: str, x: str, w: str, *, kernel_shape: list[int], strides: list[int], dilations: list[int],
    pads: list[int], group: int, auto_pad: str,
) -> tuple[str, ...]:  # fmt: skip
    """Gradients of operand, kernel and bias: a transposed convolution, a convolution with samples and channels in each
    other's place, and a sum."""
    batch, channels, *space = b.dims(x)
    sizes = b.dims(w)[2:]
    at = window(b, space, sizes, strides, dilations, pads, auto_pad)
    if kernel_shape and tuple(kernel_shape) != at.kernel:
        raise b.refusal(f"its kernel_shape is {kernel_shape}, and its kernel is {list(sizes)}", EXPORT_AGAIN)
    n = len(space)
    padding = [*at.before, *at.after]
    dx = b.op(
        "ConvTranspose", dy, w, kernel_shape=list(at.kernel), strides=list(at.strides), dilations=list(at.dilations),
        pads=padding, output_padding=list(at.unread()), group=group,
    )  # fmt: skip
    turn = [1, 0, *range(2, n + 2)]
    samples, kernel = x, b.op("Transpose", dy, perm=turn)
    if group == 1:
        samples = b.op("Transpose", x, perm=turn)
    else:  # each group is convolved with its own kernels
        part = channels // group
        samples = b.op("Reshape", samples, b.array([batch, group, part, *space]))
        samples = b.op("Transpose", samples, perm=[2, 1, 0, *range(3, n + 3)])
        samples = b.op("Reshape", samples, b.array([part, group * batch, *space]))
    dw = b.op(
        "Conv", samples, kernel, kernel_shape=list(at.results()), strides=list(at.dilations),
        dilations=list(at.strides), pads=padding, group=group,
    )  # fmt: skip
    dw = b.op("Transpose", dw, perm=turn)
    turned = LoweredWindow(at.space, at.results(), at.dilations, at.strides, at.before, at.after)
    if turned.results() != at.kernel:  # places that no step of the kernel reached are at the end
        axes = list(range(2, n + 2))
        dw = b.op("Slice", dw, b.array([0] * n), b.array(list(at.kernel)), b.array(axes))
    return dx, dw, b.reduce("ReduceSum", dy, [0, *range(2, n + 2)], keepdims=0)


def max_pool_grad(b: Builder, dy: str, positions: str, **attributes: object) -> str:
    """dY added up at the places the forward took, which count through the whole operand of the pool."""
    pool = b.makers.get(positions)
    if pool is None or pool.op_type != "MaxPool":
        raise b.refusal("its indices are not the second output of a MaxPool", EXPORT_AGAIN)
    if any(attribute.name == "storage_order" and attribute.i for attribute in pool.attribute):
        raise b.refusal("its pool numbers indices in column-major order", "export the forward with storage_order 0")
    x, y = pool.input[0], pool.output[0]
    dims, results = b.dims(x), b.dims(y)
    lead, plane, count = dims[:2], prod(dims[2:]), prod(results[2:])
    # The place in a plane, so that samples and channels stay apart.
    flat = b.op("Reshape", positions, b.array([*lead, count]))
    flat = b.op("Mod", flat, b.array(plane))
    flat_dy = b.op("Reshape", dy, b.array([*lead, count]))
    scattered = b.op("ScatterElements", b.zeros([*lead, plane], b.dtype(x)), flat, flat_dy, axis=2, reduction="add")
    return b.op("Reshape", scattered, b.array(list(dims)))


def average_pool_grad(
    b: Builder, dy: str, *, kernel_shape: list[int], strides: list[int], pads: list[int], auto_pad: str, ceil_mode: int,
    count_include_pad: int, dilations: list[int],
) -> str:  # fmt: skip
    """Each place of the window gets its share: a transposed convolution, channel by channel, with a kernel of ones."""
    like = b.outputs[0]
    dims = b.dims(like)
    at = window(b, dims[2:], kernel_shape, strides, dilations, pads, auto_pad)
    if ceil_mode and any(
        (size + low + high - kernel) % stride
        for size, kernel, stride, low, high in zip(at.space, at.kernel, at.strides, at.before, at.after)
    ):
        raise b.refusal("it has ceil_mode, and windows that reach over the end", "export with ceil_mode 0")
    if count_include_pad or not any((*at.before, *at.after)):
        share = b.op("Mul", dy, b.number_like(1 / prod(at.kernel), like))
    else:
        counts = b.op(
            "Conv", _ones(b, [1, 1, *at.space], like), _ones(b, [1, 1, *at.kernel], like),
            kernel_shape=list(at.kernel), strides=list(at.strides), dilations=list(at.dilations),
            pads=[*at.before, *at.after],
        )  # fmt: skip
        share = b.op("Div", dy, counts)
    channels = dims[1]
    gradient: str = b.op(
        "ConvTranspose", share, _ones(b, [channels, 1, *at.kernel], like), kernel_shape=list(at.kernel),
        strides=list(at.strides), dilations=list(at.dilations), pads=[*at.before, *at.after],
        output_padding=list(at.unread()), group=channels,
    )  # fmt: skip
    return gradient


def _ones(b: Builder, dims: list[int], like: str) -> str:
    return b.op("Add", b.zeros(dims, b.dtype(like)), b.number_like(1, like))
