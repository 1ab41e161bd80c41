"""Makes eager code traceable: patches queries for compilation, and uses of Python numbers."""

from __future__ import annotations

import builtins
import contextlib
import math
import operator
import sys
import types
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from gopt.frontends.pytorch.foreach_calls import is_foreach, tensor_by_tensor

Tensor = torch.Tensor
ADD = {torch.add: 1, Tensor.add: 1, Tensor.add_: 1, torch.sub: -1, Tensor.sub: -1, Tensor.sub_: -1}
IN_PLACE = {Tensor.add_, Tensor.sub_, Tensor.addcmul_, Tensor.addcdiv_}
COMPARISONS = {
    getattr(Tensor, name): getattr(operator, name)
    for name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "eq", "ne", "lt", "le", "gt", "ge")
    if hasattr(operator, name)
}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
CTC_LOSSES = {torch.ctc_loss, torch.nn.functional.ctc_loss}
PRODUCTS = {torch.addcmul, Tensor.addcmul, Tensor.addcmul_}
QUOTIENTS = {torch.addcdiv, Tensor.addcdiv, Tensor.addcdiv_}


class TensorsForNumbers(TorchFunctionMode):
    """Expands ``alpha=`` and ``value=`` that are tensors, sums of a number and a tensor, calls for lists of tensors,
    lists of lengths, and distances of rows. ``item()`` returns the tensor itself, without its gradient.

    ``settings``: id of an input -> name and represented number. Code comparing an input with a number, such as
    ``weight_decay != 0``, gets the result for the number; ``fixed`` records the name.
    """

    def __init__(self, settings: Any = None, fixed: Any = None) -> None:
        super().__init__()
        self.settings = settings or {}
        self.fixed = fixed if fixed is not None else set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.item:  # a number of Python is of float64
            number = args[0].detach().reshape(()) if args[0].numel() == 1 else args[0]
            return number.double() if number.is_floating_point() else number
        if function == _SET_DATA and args[0].shape == args[1].shape and args[0].dtype is args[1].dtype:
            with torch.no_grad():  # an assignment changes the memory of a tensor, which a traced one has not
                return args[0].detach().copy_(args[1])
        if function is torch.cdist:
            return distances(*args, **kwargs)
        if function in CTC_LOSSES:  # of lists it makes tensors without memory in a trace
            args, kwargs = [*map(_tensor, args)], {name: _tensor(value) for name, value in kwargs.items()}
            return function(*args, **kwargs)
        if is_foreach(function):
            with self:
                return tensor_by_tensor(function, args, kwargs)
        if function in COMPARISONS and id(args[0]) in self.settings and isinstance(args[1], int | float):
            name, number = self.settings[id(args[0])]
            self.fixed.add(name)
            return COMPARISONS[function](number, args[1])
        term = None
        if function in ADD and (isinstance(kwargs.get("alpha"), Tensor) or not isinstance(args[0], Tensor)):
            term = args[1] * kwargs.get("alpha", 1) * ADD[function]
        elif function in PRODUCTS and isinstance(kwargs.get("value"), Tensor):
            term = args[1] * args[2] * kwargs["value"]
        elif function in QUOTIENTS and isinstance(kwargs.get("value"), Tensor):
            term = args[1] / args[2] * kwargs["value"]
        if term is None:
            return function(*args, **kwargs)
        return args[0].add_(term) if function in IN_PLACE else args[0] + term


def _tensor(value: Any) -> Any:
    """A tensor of a list's numbers; any other value as given."""
    return torch.tensor(value) if isinstance(value, list | tuple) else value


def embedding_bag(
    weight: Any, indices: Any, offsets: Any, scale_grad_by_freq: Any = False, mode: Any = 0, sparse: Any = False,
    per_sample_weights: Any = None,
    include_last_offset: Any = False, padding_idx: Any = None,
) -> Any:  # fmt: skip
    """``torch.embedding_bag`` (sums and means of rows) by operators with an ONNX form."""
    if mode not in (0, 1) or scale_grad_by_freq:
        raise NotImplementedError("embedding bags of maxima, or with gradients scaled by frequency")
    starts = offsets[:-1] if include_last_offset else offsets
    bags = (torch.arange(indices.shape[0])[:, None] >= starts[None, :]).sum(1) - 1
    rows = weight[indices]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    counts = torch.ones(indices.shape[0], dtype=weight.dtype)
    if padding_idx is not None and padding_idx >= 0:
        counts = (indices != padding_idx).to(weight.dtype)
        rows = rows * counts[:, None]
    summed = torch.zeros(starts.shape[0], weight.shape[1], dtype=weight.dtype).index_add(0, bags, rows)
    if mode == 1:
        sizes = torch.zeros(starts.shape[0], dtype=weight.dtype).index_add(0, bags, counts)
        summed = summed / sizes.clamp(min=1)[:, None]
    return summed, bags, starts, starts


def distances(x1: Any, x2: Any, p: Any = 2.0, compute_mode: Any = None) -> Any:
    """``torch.cdist`` by the same formula for every number of rows; the gradient at a distance of 0 is 0."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


class TensorMath:
    """`math` for numbers, tensor functions for tensors."""

    def __getattr__(self, name: Any) -> Any:
        def either(*args: Any) -> Any:
            if any(isinstance(a, Tensor) for a in args):
                return getattr(torch, name)(*args)
            return getattr(math, name)(*args)

        member = getattr(math, name)
        return either if callable(member) else member


class _FloatOfTensor(type):
    """``float``, but for tensors, which become float64 as numbers of Python are."""

    def __call__(cls, value: Any = 0.0) -> Any:
        return value.reshape(()).double() if isinstance(value, Tensor) else float(value)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, float)

    def __subclasscheck__(cls, kind: Any) -> bool:
        return issubclass(kind, float)


class FloatOrTensor(metaclass=_FloatOfTensor):
    """In the place of ``float`` in the code of optimizers."""


def extreme(builtin: Any, function: Any) -> Any:
    """``min`` or ``max`` without conversion of a tensor to bool."""

    def either(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 2 or not any(isinstance(a, Tensor) for a in args):
            return builtin(*args, **kwargs)
        tensor = next(a for a in args if isinstance(a, Tensor))
        return function(*(a if isinstance(a, Tensor) else torch.full_like(tensor, a) for a in args))

    return either


def _modules_of(optimizers: Any) -> list[Any]:
    """``torch.optim`` and the packages the classes of ``optimizers`` come from."""
    classes = {base for optimizer in optimizers for base in type(optimizer).__mro__}
    packages = {kind.__module__.partition(".")[0] for kind in classes} - {"torch", "builtins", "abc", "typing"}
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("torch.optim.") or name.partition(".")[0] in packages
    ]


def _for_tensors(module: Any) -> dict[str, Any]:
    """Name -> replacement in a module: `math` and the functions under any name, `max`, `min` and `float`."""
    names: dict[str, Any] = {
        "max": extreme(builtins.max, torch.maximum), "min": extreme(builtins.min, torch.minimum),
        "float": FloatOrTensor,
    }  # fmt: skip
    for name, value in vars(module).items():
        if value is math:
            names[name] = TensorMath()
        elif isinstance(value, types.BuiltinFunctionType) and value.__module__ == "math":
            names[name] = getattr(TensorMath(), value.__name__)
    return names


@contextlib.contextmanager
def readable(settings: Any = None, fixed: Any = None, optimizers: Any = ()) -> Any:
    """Patch torch during a trace, so that code of ``transformers`` and ``torch.optim`` reads no values of tensors."""
    with contextlib.ExitStack() as stack:
        for name in ("is_compiling", "is_exporting", "is_dynamo_compiling"):
            stack.enter_context(mock.patch.object(torch.compiler, name, lambda: True))
        for module in _modules_of(optimizers):
            for name, value in _for_tensors(module).items():
                stack.enter_context(mock.patch.object(module, name, value, create=True))
        stack.enter_context(mock.patch.object(torch, "embedding_bag", embedding_bag))
        stack.enter_context(mock.patch.object(torch.distributions.Distribution, "_validate_args", False))
        stack.enter_context(TensorsForNumbers(settings, fixed))
        yield


@contextlib.contextmanager
def on_attention_math() -> Any:
    """Compute scaled dot-product attention by the formula, as the trace does: fused kernels draw random numbers and
    round in another order."""
    with sdpa_kernel(SDPBackend.MATH):
        yield
