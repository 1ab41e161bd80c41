"""Gradients of operators that map each spatial axis linearly: means of windows, resampling, repeated borders.

Such an operator is one constant matrix per axis, and the gradient the product with the transposes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten
Decompositions = dict[Any, Callable[..., Any]]
_NARROW = (torch.float16, torch.bfloat16)


def along_axes(x: Any, matrices: Sequence[torch.Tensor]) -> Any:
    """Multiply the last axes of ``x`` by matrices [new size, old size], a matrix per axis."""
    mapped = x.float() if x.dtype in _NARROW else x
    for index, matrix in enumerate(matrices):
        axis = x.dim() - len(matrices) + index
        mapped = (mapped.transpose(axis, -1) @ matrix.to(mapped.dtype).T).transpose(axis, -1)
    return mapped.to(x.dtype)


def _means(size: int, windows: Sequence[tuple[int, int]], counts: Sequence[int]) -> torch.Tensor:
    """The matrix [windows, size] of sums over windows, each divided by the count. A window is (start, end)."""
    with _disable_current_modes():
        positions = torch.arange(size)[None]
        starts, ends = (torch.tensor(bounds)[:, None] for bounds in zip(*windows))
        return ((positions >= starts) & (positions < ends)).float() / torch.tensor(counts)[:, None]


def pooling(
    size: int, outputs: int, kernel: int, stride: int, pad: int, include_pad: bool, divided: bool
) -> torch.Tensor:
    """The matrix [outputs, size] of means of ``kernel`` samples. ``divided``: whether sums become means here."""
    starts = [index * stride - pad for index in range(outputs)]
    wide = [min(start + kernel, size + pad) - start for start in starts]
    windows = [(max(start, 0), min(start + kernel, size)) for start in starts]
    counts = wide if include_pad else [end - start for start, end in windows]
    return _means(size, windows, counts if divided else [1] * outputs)


def _outputs(size: int, kernel: int, stride: int, pad: int, ceil_mode: bool) -> int:
    """The number of windows along an axis: none begins behind the end of the input and the first padding."""
    count = (size + 2 * pad - kernel + (stride - 1 if ceil_mode else 0)) // stride + 1
    return count - (ceil_mode and (count - 1) * stride >= size + pad)


def avg_pool(axes: int) -> Callable[..., Any]:
    """``avg_pool2d`` or ``avg_pool3d`` where the exporter's form is another: with a divisor, or incomplete windows."""

    def forward(
        x: Any, kernel: Any, stride: Any = (), pad: Any = (0,), ceil_mode: Any = False, include_pad: Any = True,
        divisor: Any = None,
    ) -> Any:  # fmt: skip
        if divisor is None and not ceil_mode:
            return NotImplemented
        sizes = [list(value) * axes if len(value) == 1 else value for value in (kernel, stride or kernel, pad)]
        matrices = [
            pooling(size, _outputs(size, k, s, p, ceil_mode), k, s, p, include_pad, divisor is None)
            for size, k, s, p in zip(x.shape[-axes:], *sizes, strict=True)
        ]
        means = along_axes(x, matrices)
        return means if divisor is None else means / divisor

    return forward


def avg_pool_backward(axes: int) -> Callable[..., Any]:
    """The gradient of ``avg_pool2d`` or ``avg_pool3d``; g[..., outputs], x[..., sizes]."""

    def backward(
        g: Any, x: Any, kernel: Any, stride: Any, pad: Any, ceil_mode: Any, include_pad: Any, divisor: Any
    ) -> Any:
        sizes = (list(value) * axes if len(value) == 1 else value for value in (kernel, stride or kernel, pad))
        matrices = [
            pooling(size, outputs, k, s, p, include_pad, divisor is None).T
            for size, outputs, k, s, p in zip(x.shape[-axes:], g.shape[-axes:], *sizes, strict=True)
        ]
        means = along_axes(g, matrices)
        return means if divisor is None else means / divisor

    return backward


def adaptive_means(size: int, outputs: int) -> torch.Tensor:
    """The matrix [outputs, size] of adaptive means."""
    windows = [(index * size // outputs, -(-(index + 1) * size // outputs)) for index in range(outputs)]
    return _means(size, windows, [end - start for start, end in windows])


def adaptive_avg_pool(x: Any, output_size: Any) -> Any:
    sizes = x.shape[-len(output_size) :]
    return along_axes(x, [adaptive_means(*pair) for pair in zip(sizes, output_size)])


def adaptive_avg_pool_backward(axes: int) -> Callable[..., Any]:
    """The gradient of ``_adaptive_avg_pool2d`` or 3d."""
    return lambda g, x: along_axes(g, [adaptive_means(*pair).T for pair in zip(x.shape[-axes:], g.shape[-axes:])])


def replication_pad_backward(g: Any, x: Any, padding: Any) -> Any:
    """``padding``: start and end of the last axis, of the axis before, and so on."""
    axes = len(padding) // 2
    matrices = []
    for index, size in enumerate(x.shape[-axes:]):
        start, end = padding[2 * (axes - 1 - index) : 2 * (axes - index)]
        with _disable_current_modes():
            read = (torch.arange(size + start + end) - start).clamp(0, size - 1)
            matrices.append((torch.arange(size)[:, None] == read[None]).float())
    return along_axes(g, matrices)


def resampled(operator: Any, size: int, outputs: int, options: Sequence[Any]) -> torch.Tensor:
    """The matrix [size, outputs] of resampling one axis by ``operator``, of one axis or two."""
    with _disable_current_modes(), torch.no_grad():
        rows = torch.eye(size)[None]
        if "2d" in str(operator):
            return operator(rows[:, :, None], [1, outputs], *options[:-1], None, options[-1])[0, :, 0]
        return operator(rows, [outputs], *options)[0]


def resampling_backward(operator: Any) -> Callable[..., Any]:
    """The gradient of a resampling with ``operator`` as form for an axis; options are the alignment, if any, and a
    scale per axis or None."""
    aligned = any(argument.name == "align_corners" for argument in operator._schema.arguments)

    def backward(g: Any, output_size: Any, input_size: Any, *options: Any) -> Any:
        align, scales = (options[:1], options[1:]) if aligned else ((), options)
        all_scales = [*scales, *[None] * (len(output_size) - len(scales))]
        matrices = [
            resampled(operator, size, outputs, [*align, scale])
            for size, outputs, scale in zip(input_size[2:], output_size, all_scales, strict=True)
        ]
        return along_axes(g, matrices)

    return backward


_RESAMPLINGS = {
    aten.upsample_nearest1d.default: ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    aten._upsample_nearest_exact1d.default: (
        "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    ),
    aten.upsample_linear1d.default: ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"),
    aten.upsample_bicubic2d.default: ("upsample_bicubic2d",),
    aten._upsample_bilinear2d_aa.default: ("_upsample_bilinear2d_aa",),
    aten._upsample_bicubic2d_aa.default: ("_upsample_bicubic2d_aa",),
}  # fmt: skip
"""Form for one axis -> operators whose gradients it gives."""


def linear_maps() -> Decompositions:
    """Decompositions by operator."""
    maps: Decompositions = {
        aten.avg_pool2d.default: avg_pool(2),
        aten.avg_pool3d.default: avg_pool(3),
        aten.avg_pool2d_backward.default: avg_pool_backward(2),
        aten.avg_pool3d_backward.default: avg_pool_backward(3),
        aten._adaptive_avg_pool2d.default: adaptive_avg_pool,
        aten._adaptive_avg_pool3d.default: adaptive_avg_pool,
        aten._adaptive_avg_pool2d_backward.default: adaptive_avg_pool_backward(2),
        aten._adaptive_avg_pool3d_backward.default: adaptive_avg_pool_backward(3),
        aten.replication_pad1d_backward.default: replication_pad_backward,
        aten.replication_pad2d_backward.default: replication_pad_backward,
        aten.replication_pad3d_backward.default: replication_pad_backward,
    }
    for operator, names in _RESAMPLINGS.items():
        maps |= {getattr(aten, f"{name}_backward").default: resampling_backward(operator) for name in names}
    return maps
