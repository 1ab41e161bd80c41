"""Convolutions and pools by PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gopt.operators.torch_call import NodeSettings, numbers


@dataclass(frozen=True, slots=True)
class _Window:
    """A number for each spatial dimension. ``before``, ``behind``: padding; a negative number cuts."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[int]
    behind: list[int]

    @property
    def reach(self) -> list[int]:
        """Elements from the start to the end of a kernel."""
        return [(size - 1) * hole + 1 for size, hole in zip(self.kernel, self.dilations)]

    @property
    def even(self) -> bool:
        return self.before == self.behind and min(self.before) >= 0

    def padded(self, torch: Any, x: Any, value: float = 0.0) -> Any:
        if not any(self.before) and not any(self.behind):
            return x
        return torch.nn.functional.pad(x, _sides(self.before, self.behind), value=value)

    def lengths(self, dims: Sequence[int]) -> list[int]:
        """The results along padded dimensions."""
        sizes = zip(dims, self.before, self.behind, self.reach, self.strides)
        return [(size + low + high - reach) // step + 1 for size, low, high, reach, step in sizes]

    def views(self, x: Any) -> Any:
        """Views of a padded tensor: [N, C, out..., k...]."""
        for axis, (reach, step, hole) in enumerate(zip(self.reach, self.strides, self.dilations)):
            x = x.unfold(2 + axis, reach, step)[..., ::hole]
        return x


def _sides(before: Sequence[int], behind: Sequence[int]) -> list[int]:
    """Padding in the order of PyTorch, from the last dimension on."""
    return [side for pair in zip(reversed(before), reversed(behind)) for side in pair]


def _window(a: NodeSettings, dims: Sequence[int], kernel: Sequence[int]) -> _Window:
    """The window of a node over spatial ``dims``; the padding of ``ceil_mode`` ends with the last window."""
    rank, policy = len(dims), a.get("auto_pad", "NOTSET")
    strides, dilations = a.get("strides") or [1] * rank, a.get("dilations") or [1] * rank
    reach = [(size - 1) * hole + 1 for size, hole in zip(kernel, dilations)]
    pads = [0] * 2 * rank if policy == "VALID" else a.get("pads") or [0] * 2 * rank
    before, behind = [*pads[:rank]], [*pads[rank:]]
    if policy in ("SAME_UPPER", "SAME_LOWER"):
        lack = [max((-(-size // step) - 1) * step + far - size, 0) for size, step, far in zip(dims, strides, reach)]
        before, behind = _halves(lack, policy)
    if a.get("ceil_mode", 0):
        for axis, (size, far, step) in enumerate(zip(dims, reach, strides)):
            count = -(-(size + before[axis] + behind[axis] - far) // step) + 1
            count -= (count - 1) * step >= size + before[axis]  # a window beginning behind is left out
            behind[axis] = (count - 1) * step + far - size - before[axis]
    return _Window([*kernel], [*strides], [*dilations], before, behind)


def _halves(lengths: Sequence[int], policy: str) -> tuple[list[int], list[int]]:
    less = [length // 2 for length in lengths]
    more = [length - small for length, small in zip(lengths, less)]
    return (less, more) if policy == "SAME_UPPER" else (more, less)


def convolution(t: Any, a: NodeSettings, x: Any, weight: Any, bias: Any = None) -> Any:
    window = _window(a, x.shape[2:], weight.shape[2:])
    inside = window.before if window.even else [0] * len(window.kernel)
    x = x if window.even else window.padded(t, x)
    turned, extra = False, [0] * len(inside)
    return t.convolution(x, weight, bias, window.strides, inside, window.dilations, turned, extra, a.get("group", 1))


def transposed_convolution(t: Any, a: NodeSettings, x: Any, weight: Any, bias: Any = None) -> Any:
    dims, rank, policy = x.shape[2:], x.ndim - 2, a.get("auto_pad", "NOTSET")
    window = _window({**a, "auto_pad": "NOTSET"}, dims, weight.shape[2:])  # type: ignore[arg-type]
    extra = list(a.get("output_padding") or [0] * rank)
    before, behind = window.before, window.behind
    if a.get("output_shape") or policy in ("SAME_UPPER", "SAME_LOWER"):
        due = a.get("output_shape") or [size * step for size, step in zip(dims, window.strides)]
        sizes = zip(dims, window.strides, extra, window.reach, due[-rank:])
        over = [(size - 1) * step + more + reach - end for size, step, more, reach, end in sizes]
        before, behind = _halves([max(length, 0) for length in over], policy)
        if a.get("output_shape"):  # zeros behind where it is longer
            behind = [high + min(length, 0) for length, high in zip(over, behind)]
    room = all(more < max(step, hole) for more, step, hole in zip(extra, window.strides, window.dilations))
    if before == behind and min(before) >= 0 and room:
        return t.convolution(
            x, weight, bias, window.strides, before, window.dilations, True, extra, a.get("group", 1)
        )  # fmt: skip
    none = [0] * rank
    y = t.convolution(x, weight, None, window.strides, none, window.dilations, True, none, a.get("group", 1))
    y = t.nn.functional.pad(y, _sides([-low for low in before], [more - high for more, high in zip(extra, behind)]))
    return y if bias is None else y + bias.reshape(-1, *[1] * rank)


def causal_convolution(t: Any, a: NodeSettings, x: Any, weight: Any, bias: Any = None, past: Any = None) -> Any:
    """Each channel by a kernel, over the past state in front; the end is the next past state."""
    size = weight.shape[2] - 1
    x = t.cat([x.new_zeros(*x.shape[:2], size) if past is None else past, x], 2)
    y = t.convolution(x, weight, bias, [1], [0], [1], False, [0], x.shape[1])
    if a.get("activation", "none") != "none":
        y = t.nn.functional.silu(y)
    return y, x[:, :, x.shape[2] - size :]


def frames(t: Any, a: NodeSettings, x: Any, step: Any, window: Any = None, length: Any = None) -> Any:
    """An STFT: real and imaginary parts of the Fourier transform of frames. ``x``: [samples, time, 1 or 2]."""
    size = x.shape[1] if window is None else window.shape[0]
    size = size if length is None else int(numbers(length)[0])
    wide = x if x.dtype.itemsize >= 4 else x.float()
    signal = wide.squeeze(-1) if x.shape[-1] == 1 else t.view_as_complex(wide.contiguous())
    pieces = signal.unfold(1, size, int(numbers(step)[0]))
    pieces = pieces if window is None else pieces * window
    onesided = a.get("onesided", 1) and not pieces.is_complex()
    return t.view_as_real(t.fft.rfft(pieces) if onesided else t.fft.fft(pieces)).to(x.dtype)


def max_pool(t: Any, a: NodeSettings, x: Any) -> Any:
    dims, dtype = x.shape[2:], x.dtype
    window = _window(a, dims, a["kernel_shape"])
    wide = x if x.is_floating_point() else x.float()
    wide = window.padded(t, wide, -math.inf)
    pool = getattr(t.nn.functional, f"max_pool{len(dims)}d")
    if a.results < 2:
        return pool(wide, window.kernel, window.strides, 0, window.dilations).to(dtype)
    maxima, at = pool(wide, window.kernel, window.strides, 0, window.dilations, return_indices=True)
    flat = t.arange(x.shape[0] * x.shape[1], device=x.device).reshape(*x.shape[:2], *[1] * len(dims)) * math.prod(dims)
    for axis in reversed(range(len(dims))):
        length = wide.shape[2 + axis]
        behind = dims[:axis] if a.get("storage_order", 0) else dims[axis + 1 :]
        flat = flat + (at % length - window.before[axis]) * math.prod(behind)
        at = at.div(length, rounding_mode="floor")
    return maxima.to(dtype), flat


def average_pool(t: Any, a: NodeSettings, x: Any) -> Any:
    """A mean over places inside, and over padding that counts; elements added by ``ceil_mode`` never count."""
    dims = x.shape[2:]
    window = _window(a, dims, a["kernel_shape"])
    wide = window.padded(t, x)
    if max(window.dilations) > 1:
        mean = window.views(wide).mean([*range(-len(dims), 0)])
    else:
        mean = getattr(t.nn.functional, f"avg_pool{len(dims)}d")(wide, window.kernel, window.strides)
    low, high = [0] * len(dims), [0] * len(dims)
    if a.get("count_include_pad", 0):
        declared = _window({**a, "ceil_mode": 0}, dims, window.kernel)  # type: ignore[arg-type]
        low, high = declared.before, declared.behind
    for axis, count in enumerate(window.lengths(dims)):
        begin, step, hole = -window.before[axis], window.strides[axis], window.dilations[axis]
        reached = [[begin + out * step + k * hole for k in range(window.kernel[axis])] for out in range(count)]
        inside = [sum(-low[axis] <= at < dims[axis] + high[axis] for at in row) for row in reached]
        if any(number < window.kernel[axis] for number in inside):
            share = [window.kernel[axis] / max(number, 1) for number in inside]
            tail = [1] * (len(dims) - 1 - axis)
            mean = mean * t.tensor(share, dtype=x.dtype, device=x.device).reshape(-1, *tail)
    return mean


def lp_pool(t: Any, a: NodeSettings, x: Any) -> Any:
    window, power = _window(a, x.shape[2:], a["kernel_shape"]), a.get("p", 2)
    views = window.views(window.padded(t, x))
    return views.abs().pow(power).sum([*range(-len(window.kernel), 0)]).pow(1 / power)


def over_all_places(function: Callable[..., Any]) -> Callable[..., Any]:
    """A pool of all places: a function of the node, and of the places as last dimension."""

    def call(t: Any, a: NodeSettings, x: Any) -> Any:
        return function(a, x.reshape(*x.shape[:2], -1)).reshape(*x.shape[:2], *[1] * (x.ndim - 2))

    return call
