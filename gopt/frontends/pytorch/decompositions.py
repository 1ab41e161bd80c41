"""Decompositions of ATen operators with no ONNX form."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

from gopt.frontends.pytorch.ctc import CTC
from gopt.frontends.pytorch.linear_maps import linear_maps
from gopt.frontends.pytorch.running_products import OPERATOR, cumprod

aten = torch.ops.aten


def convolution_backward(
    g: Any,
    x: Any,
    w: Any,
    bias_sizes: Any,
    stride: Any,
    pad: Any,
    dilation: Any,
    transposed: Any,
    output_padding: Any,
    groups: Any,
    mask: Any,
) -> Any:
    """Gradients of an n-d convolution with groups, x[N, C, …], w[M, C / group, k…], as convolutions and a sum."""
    if transposed:  # the gradient of a convolution from the output's space to the input's, with the same weights
        gx = aten.convolution.default(g, w, None, stride, pad, dilation, False, [0] * len(stride), groups)
        gw = weight_gradient(x, g, w, stride, pad, dilation, groups) if mask[1] else None
        return gx if mask[0] else None, gw, g.sum([0, *range(2, g.dim())]) if mask[2] else None
    n = x.dim() - 2
    gx = gw = gb = None
    if mask[0]:
        extra = [
            x.shape[2 + i] - ((g.shape[2 + i] - 1) * stride[i] - 2 * pad[i] + dilation[i] * (w.shape[2 + i] - 1) + 1)
            for i in range(n)
        ]
        gx = aten.convolution.default(g, w, None, stride, pad, dilation, True, extra, groups)
    if mask[1]:
        gw = weight_gradient(g, x, w, stride, pad, dilation, groups)
    if mask[2]:
        gb = g.sum([0, *range(2, g.dim())])
    return gx, gw, gb


def weight_gradient(g: Any, x: Any, w: Any, stride: Any, pad: Any, dilation: Any, groups: Any) -> Any:
    """The gradient of a convolution's weights. Batch and channels change places: (groups, N, C / groups) is convolved
    with a kernel for each sample."""
    batch, channels, *space = x.shape
    samples = x.reshape(batch, groups, channels // groups, *space).permute(2, 1, 0, *range(3, x.dim() + 1))
    samples = samples.reshape(channels // groups, groups * batch, *space)
    kernels = g.transpose(0, 1)
    gw = aten.convolution.default(samples, kernels, None, dilation, pad, stride, False, [0] * len(space), groups)
    gw = gw.transpose(0, 1)
    for axis in range(2, w.dim()):
        gw = aten.slice.Tensor(gw, axis, 0, w.shape[axis])
    return gw


def max_pool_backward(axes: int) -> Any:
    """Gradient of max pooling over the last ``axes`` as a scatter in float32. ``pooled``: options, then the indices."""

    def backward(g: Any, x: Any, *pooled: Any) -> Any:
        lead, flat = x.shape[:-axes], math.prod(x.shape[-axes:])
        grad = torch.zeros([*lead, flat], dtype=torch.float64 if g.dtype is torch.float64 else torch.float32)
        positions, values = (tensor.reshape(*lead, -1) for tensor in (pooled[-1], g.to(grad.dtype)))
        return grad.scatter_add(-1, positions, values).reshape(x.shape).to(g.dtype)

    return backward


def adaptive_max_pool(x: Any, output_size: Any) -> Any:
    """Windows of equal size: max pooling."""
    sizes = list(zip(x.shape[-2:], output_size))
    if any(size % outputs for size, outputs in sizes):
        return NotImplemented
    kernel = [size // outputs for size, outputs in sizes]
    return aten.max_pool2d_with_indices.default(x, kernel, kernel)


def weight_norm_backward(g: Any, v: Any, scale: Any, norms: Any, dim: Any) -> Any:
    """Gradients of ``v`` and ``scale`` in ``v * scale / norms``, norms over all dimensions but one."""
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()]
    unit = v / norms
    along = (g * unit).sum(axes, keepdim=True)
    return (g - unit * along) * (scale / norms), along.reshape(scale.shape)


def scatter_reduce(x: Any, dim: Any, index: Any, source: Any, reduce: Any, include_self: Any = True) -> Any:
    """Means, and results without the old elements, missing in the exporter."""
    if reduce not in ("sum", "mean", "amax", "amin") or (include_self and reduce != "mean"):
        return NotImplemented
    neutral = {"amax": -math.inf, "amin": math.inf}.get(reduce, 0.0)
    base = x if include_self else x.scatter(dim, index, neutral)
    if reduce in ("amax", "amin"):
        return aten.scatter_reduce.two(base, dim, index, source, reduce)
    total = base.scatter_add(dim, index, source)
    if reduce == "sum":
        return total
    one = torch.ones_like(x)
    count = (one if include_self else one.scatter(dim, index, 0.0)).scatter_add(dim, index, torch.ones_like(source))
    return total / count.clamp(min=1.0)


def empty_permuted(size: Any, order: Any, **options: Any) -> Any:
    return torch.zeros(size, dtype=options.get("dtype"))


def new_empty_strided(x: Any, size: Any, stride: Any, **options: Any) -> Any:
    return torch.zeros(size, dtype=options.get("dtype") or x.dtype)


def empty_strided(size: Any, stride: Any, **options: Any) -> Any:
    return torch.zeros(size, dtype=options.get("dtype"))


def copy(x: Any, source: Any, non_blocking: Any = False) -> Any:
    return aten.expand.default(source.to(x.dtype), x.shape)


def as_strided_scatter(x: Any, source: Any, size: Any, stride: Any, offset: Any = None) -> Any:
    """Only for a contiguous tensor in row-major order."""
    positions = sum(
        (torch.arange(n).mul(step).reshape([-1] + [1] * (len(size) - axis - 1))
         for axis, (n, step) in enumerate(zip(size, stride))),
        torch.full([1] * len(size), offset or 0),
    )  # fmt: skip
    return x.reshape(-1).scatter(0, positions.reshape(-1), source.reshape(-1)).reshape(x.shape)


def diagonal_scatter(x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """As a scatter into the flat matrix: PyTorch's own form writes in place."""
    matrix = x.movedim((dim1, dim2), (-2, -1))
    *lead, rows, columns = matrix.shape
    positions = torch.arange(source.shape[-1]) * (columns + 1) + (offset if offset > 0 else -offset * columns)
    flat = matrix.reshape(*lead, rows * columns).scatter(-1, positions.expand(source.shape), source)
    return flat.reshape(matrix.shape).movedim((-2, -1), (dim1, dim2))


def diagonal_backward(g: Any, sizes: Any, offset: int, dim1: int, dim2: int) -> Any:
    return diagonal_scatter(torch.zeros(sizes, dtype=g.dtype), g, offset, dim1, dim2)


def diagonal_embed(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """A matrix of zeros with each last row of ``x`` as its diagonal."""
    axes = x.dim() + 1
    size, start_dim, second = x.shape[-1] + abs(offset), dim1 % axes, dim2 % axes
    sizes = list(x.shape[:-1])
    for axis in sorted((start_dim, second)):
        sizes.insert(axis, size)
    return diagonal_scatter(torch.zeros(sizes, dtype=x.dtype), x, offset, start_dim, second)


def squeeze(x: Any, dims: Any) -> Any:
    """Without the dimensions of length 1: PyTorch leaves the others, and Squeeze of ONNX refuses them."""
    for dim in sorted((d % x.dim() for d in dims if x.shape[d] == 1), reverse=True):
        x = aten.squeeze.dim(x, dim)
    return x


def squeeze_one(x: Any, dim: Any) -> Any:
    """As ``squeeze``."""
    return NotImplemented if x.dim() and x.shape[dim] == 1 else aten.alias.default(x)


def native_layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: Any) -> Any:
    """In float32 if input and weight have different types: ONNX has a single type for both."""
    if weight is None or weight.dtype == x.dtype == torch.float32:
        return NotImplemented
    axes = list(range(x.dim() - len(shape), x.dim()))
    wide = x.float()
    mean = wide.mean(axes, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(axes, keepdim=True) + eps)
    normal = (wide - mean) * rstd * weight.float()
    normal = normal if bias is None else normal + bias.float()
    return normal.to(x.dtype), mean, rstd


def clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    """Both bounds are converted to one type: the exporter has no clamp between a float and an integer."""
    bounds = [bound for bound in (low, high) if bound is not None]
    if not x.is_floating_point() or all(isinstance(bound, float) for bound in bounds):
        return NotImplemented
    return aten.clamp.default(x, *(None if bound is None else float(bound) for bound in (low, high)))


def least(x: Any, dims: Any = (), keepdim: Any = False) -> Any:
    """Over all dimensions: the exporter needs explicit dimensions."""
    return NotImplemented if dims else aten.amin.default(x, list(range(x.dim())), keepdim)


def greatest(x: Any, dims: Any = (), keepdim: Any = False) -> Any:
    """As ``least``."""
    return NotImplemented if dims else aten.amax.default(x, list(range(x.dim())), keepdim)


def lerp(x: Any, end: Any, weight: Any) -> Any:
    """As PyTorch's kernel computes it: from the nearer end, in float32 for narrow types."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return lerp(x.float(), end.float(), weight).to(x.dtype)
    return x + weight * (end - x) if abs(weight) < 0.5 else end - (end - x) * (1 - weight)


def lerp_by_tensor(x: Any, end: Any, weight: Any) -> Any:
    """As ``lerp``; PyTorch's own form copies strides, unknown to ONNX."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return lerp_by_tensor(x.float(), end.float(), weight.float()).to(x.dtype)
    return torch.where(weight.abs() < 0.5, x + weight * (end - x), end - (end - x) * (1 - weight))


def pow_scalar(base: Any, exponent: Any) -> Any:
    """Keep the base in float64: the exporter rounds it to float32, and ``1 - 0.999 ** count`` loses its digits."""
    if exponent.dtype is not torch.float64:
        return NotImplemented
    return aten.pow.Tensor_Tensor(torch.tensor(float(base), dtype=torch.float64), exponent)


def pow_of_two_types(base: Any, exponent: Any) -> Any:
    """Give base and exponent the type of the result: Pow of ONNX has the base's."""
    if base.dtype is exponent.dtype:
        return NotImplemented
    kind = torch.result_type(base, exponent)
    return aten.pow.Tensor_Tensor(base.to(kind), exponent.to(kind))


def unsqueeze(x: Any, dim: int) -> Any:
    """A dimension of complex numbers, in front of the pairs of reals: the exporter has none."""
    if not x.is_complex():
        return NotImplemented
    return torch.view_as_complex(torch.view_as_real(x).unsqueeze(dim if dim >= 0 else dim - 1))


def expand(x: Any, size: Any, *, implicit: bool = False) -> Any:
    """Complex numbers repeated along dimensions: pairs of reals are."""
    if not x.is_complex():
        return NotImplemented
    return torch.view_as_complex(torch.view_as_real(x).expand([*size, 2]))


def in_float32(operator: Any) -> Any:
    """The operator on bfloat16, missing in ONNX, in float32 with a rounded result: PyTorch's kernels add up in float32,
    too."""

    def widened(*args: Any, **options: Any) -> Any:
        if not any(isinstance(arg, torch.Tensor) and arg.dtype is torch.bfloat16 for arg in args):
            return NotImplemented
        return _cast(operator(*_cast(args, torch.bfloat16, torch.float32), **options), torch.float32, torch.bfloat16)

    return widened


def _cast(value: Any, old: torch.dtype, new: torch.dtype) -> Any:
    """Tensors of one type, also in tuples, as another type."""
    if isinstance(value, tuple | list):
        return type(value)(_cast(part, old, new) for part in value)
    return value.to(new) if isinstance(value, torch.Tensor) and value.dtype is old else value


NO_BFLOAT16 = (aten.convolution.default, aten.max_pool2d_with_indices.default)
"""Operators whose ONNX forms have no bfloat16 at the opset of an export."""


def table() -> Any:
    """PyTorch's core ATen decompositions, and decompositions of operators without an ONNX form."""
    rules = dict(core_aten_decompositions())
    rules.pop(aten.squeeze.dim, None)  # it would become squeeze.dims
    rules |= get_decompositions(
        [
            aten.native_batch_norm,
            aten._native_batch_norm_legit,
            aten._native_batch_norm_legit_functional,
            aten.native_batch_norm_backward,
            aten._batch_norm_with_update,
            aten._batch_norm_with_update_functional,
            aten.batch_norm_backward,
            aten.native_layer_norm_backward,
            aten.native_group_norm_backward,
        ]
    )
    written = {
        aten.convolution_backward.default: convolution_backward,
        aten.max_pool2d_with_indices_backward.default: max_pool_backward(2),
        aten.max_pool3d_with_indices_backward.default: max_pool_backward(3),
        aten.adaptive_max_pool2d.default: adaptive_max_pool,
        aten.adaptive_max_pool2d_backward.default: max_pool_backward(2),
        aten._weight_norm_interface_backward.default: weight_norm_backward, aten.empty_permuted.default: empty_permuted,
        aten.new_empty_strided.default: new_empty_strided, aten.empty_strided.default: empty_strided,
        aten.copy.default: copy, aten.clamp.default: clamp, aten.native_layer_norm.default: native_layer_norm,
        aten.lerp.Scalar: lerp, aten.lerp.Tensor: lerp_by_tensor, aten.amin.default: least, aten.amax.default: greatest,
        aten.squeeze.dim: squeeze_one, aten.squeeze.dims: squeeze, aten.diagonal_scatter.default: diagonal_scatter,
        aten.diagonal_backward.default: diagonal_backward, aten.diag_embed.default: diagonal_embed,
        aten.pow.Scalar: pow_scalar, aten.pow.Tensor_Tensor: pow_of_two_types, aten.scatter_reduce.two: scatter_reduce,
        aten.unsqueeze.default: unsqueeze, aten.expand.default: expand, OPERATOR: cumprod,
        aten.as_strided_scatter.default: as_strided_scatter,
    }  # fmt: skip
    return rules | linear_maps() | written | CTC | {operator: in_float32(operator) for operator in NO_BFLOAT16}
