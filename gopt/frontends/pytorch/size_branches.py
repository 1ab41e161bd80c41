"""Uses of the number of samples beside arithmetic: branches on it, and numbers of Python made of it.

Forward and backward run on tensors without values whose number of samples is a symbol of torch. A branch asks the
symbol, a slice with a bound or a division with a rest gives a size that is no multiple of the symbol: each is recorded
with the line of user code. The same run separates inputs with samples from inputs with equally many rows by chance: a
step compares symbols of the first, and the symbol of the second with a number.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import math
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.functions import FloatTrueDiv, IntTrueDiv, Mod, PythonMod, ToFloat

from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.batch_sizes import pairs_of_sizes
from gopt.frontends.pytorch.eager import autocast
from gopt.frontends.pytorch.eager_code import on_attention_math, readable
from gopt.frontends.pytorch.eager_steps import tensors_of
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.options import ExportOptions
from gopt.frontends.pytorch.raising_guards import may_catch, only_raises
from gopt.frontends.pytorch.reads import is_of_user, user_frames, user_line
from gopt.frontends.pytorch.samples import ROWS, Sampled, behind_time, dimensions, of_one_size, resized, samples_of
from gopt.text.sanitize import show

SMOOTH = (
    sympy.Symbol, sympy.Number, sympy.Add, sympy.Mul, sympy.Pow, sympy.logic.boolalg.Boolean, IntTrueDiv, FloatTrueDiv,
    ToFloat,
)  # fmt: skip
"""Of these an expression is one formula at every size; a comparison among them is seen where it is asked."""
_SMALL, _SETTLED = 4, 64
"""Formulas with numbers up to the first change at sizes below the second alone; the check runs at one above it."""
LAYOUT = ("fake_impls.py", "conv")
"""File and function of torch that ask for the number of samples to choose a layout of memory."""
CHECKS = ("__init__.py", "_check_with")
"""File and function of torch that only raise."""


@dataclass(slots=True)
class SizeUses:
    """``branches``: lines with a branch on the number of samples; ``assumed``: lines raising at other sizes;
    ``numbers``: lines turning it into a Python number or text, which hides branches; ``failed``: the reason for not
    following the code, or ''."""

    branches: dict[str, None] = field(default_factory=dict)
    assumed: dict[str, None] = field(default_factory=dict)
    numbers: dict[str, None] = field(default_factory=dict)
    failed: str = ""

    def add_branch(self) -> None:
        """Record the line of user code running now."""
        frames = [*user_frames(_run.__code__)]
        raises = _stands_in(CHECKS) or (bool(frames) and only_raises(frames[0]))
        raises = raises and not any(map(may_catch, frames))
        (self.assumed if raises else self.branches)[user_line(_run.__code__)] = None


def refuse_branches(
    recipe: Recipe, options: ExportOptions, size: int, sampled: Sampled, compared: Collection[int]
) -> SizeUses:
    """Return the step's uses of the number of samples; raises UnsupportedError, naming the line, for a branch between
    other sizes than ``compared``.

    ``size``: a number that is not a dimension of the step. ``sampled``: inputs with samples.
    """
    uses, env = SizeUses(), ShapeEnv()
    env.guards = _Guards(uses, frozenset(compared))  # type: ignore[assignment]
    _run(recipe, options, resized(recipe.batch, size, sampled), sampled, DimDynamic.DUCK, env, uses)
    if uses.branches:
        raise UnsupportedError(
            "--dynamic batch: the step takes a branch on the number of samples, or a rest or a bound of it, "
            f"{next(iter(uses.branches))}",
            "the file would hold one side of it; leave it out of the step, or export without --dynamic",
        )
    return uses


def inputs_with_samples(recipe: Recipe, options: ExportOptions) -> Sampled:
    """Return the inputs with samples: behind time, else in dimension 0, by use in the step; all of the first input's
    size if torch cannot follow the step.

    Raises UnsupportedError for an input of this size not combined with others.
    """
    named = behind_time(recipe) or of_one_size(recipe.batch)
    if len(named) < 2 or any(mark != ROWS for mark in named.values()):
        return named
    env, ignored = ShapeEnv(duck_shape=False), SizeUses()
    symbols = _run(recipe, options, recipe.batch, named, DimDynamic.DYNAMIC, env, ignored)
    if ignored.failed:
        return named
    sizes = {name: env.replace(symbols[name].shape[0].node.expr) for name in named}
    tied = {name: size for name, size in sizes.items() if size.free_symbols}
    if not tied:
        return named
    leader = next(iter(tied))
    for name, size in tied.items():
        if size != tied[leader] and _runs_without(recipe, options, set(tied) - {name}):
            raise UnsupportedError(
                f"--dynamic batch: {show(leader)} and {show(name)} have {samples_of(recipe.batch)} rows each, and the "
                "step runs with another number of rows in one of them: do both have the samples?",
                f"where {show(name)} has none, give it another number of rows in the example batch; where it has them, "
                "let the step say so: assert a.shape[0] == b.shape[0]",
            )
    return dict.fromkeys(tied, ROWS)


def _runs_without(recipe: Recipe, options: ExportOptions, sampled: Collection[str]) -> bool:
    """Return whether the forward runs if only these inputs have another number of samples. An input with a row read for
    each sample has too few then."""
    size = next(pairs_of_sizes(dimensions(recipe)))[0]
    try:
        with torch.no_grad(), on_attention_math(), autocast(options):
            copy.deepcopy(recipe).loss_of(resized(recipe.batch, size, dict.fromkeys(sampled, ROWS)))
    except Exception:  # whatever eager code raises for shapes that do not fit
        return False
    return True


def _run(
    recipe: Recipe, options: ExportOptions, batch: Mapping[str, torch.Tensor], sampled: Sampled, size: DimDynamic,
    env: ShapeEnv, uses: SizeUses,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Run forward and backward of a copy with symbols for the numbers of samples; returns its batch."""
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    symbols: dict[str, torch.Tensor] = {}
    try:
        tried = copy.deepcopy(recipe)
        for kind in ("_parameters", "_buffers"):
            for spots in tensors_of(tried.whole, kind).values():
                fake = mode.from_tensor(spots[0][0][spots[0][1]], static_shapes=True)
                for table, key, _ in spots:
                    table[key] = fake
        for name, value in batch.items():
            axis, outer = (sampled[name].axis, sampled[name].outer) if name in sampled else (-1, 1)
            apart = value.unflatten(axis, (outer, -1)) if outer > 1 else value
            open_ = axis + (outer > 1)
            axes = [size if dim == open_ else DimDynamic.STATIC for dim in range(apart.dim())]
            context = StatelessSymbolicContext(dynamic_sizes=axes)
            fake = mode.from_tensor(apart, symbolic_context=context, source=ConstantSource(name))
            with mode:
                symbols[name] = fake.flatten(axis, open_) if outer > 1 else fake
        with _watched(uses), on_attention_math(), _without_mkldnn(), mode, enable_python_dispatcher(), readable():
            with autocast(options):
                loss = tried.loss_of(symbols)
            loss.backward()
    except Exception as error:
        if not isinstance(error, RuntimeError) and _raised_by_gopt(error):
            raise
        # Some operators of torch have no symbolic form, and code of the user may raise anything at another size.
        uses.failed = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:200]
    return symbols


def _raised_by_gopt(error: Exception) -> bool:
    """Return whether a line of gopt raises: a defect, or a refusal."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith("gopt.")


def _without_mkldnn() -> AbstractContextManager[Any]:
    return torch.backends.mkldnn.flags(enabled=False)  # type: ignore[no-any-return, no-untyped-call]


class _Guards(list[Any]):
    """The answers noted by torch while code runs, as uses of the size."""

    def __init__(self, uses: SizeUses, compared: frozenset[int]) -> None:
        super().__init__()
        self._found = uses
        self._compared = compared

    def append(self, guard: Any) -> None:
        super().append(guard)
        if _stands_in(LAYOUT) or _holds_elsewhere(guard.expr, self._compared):
            return
        if isinstance(guard.expr, sympy.Eq):
            self._found.numbers[user_line(_run.__code__)] = None
        else:
            self._found.add_branch()


def _stands_in(function: tuple[str, str]) -> bool:
    """Return whether a function of torch, given by the file and name, runs now."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        stands = (Path(frame.f_code.co_filename).name, frame.f_code.co_name) == function
        if stands and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
            return True
        frame = frame.f_back
    return False


def _holds_elsewhere(condition: Any, compared: frozenset[int]) -> bool:
    """Return whether a condition on the size is false at ``compared`` sizes alone.

    1 counts as compared: a symbol begins at 2, and a step of 1 sample is compared separately.
    """
    symbols = condition.free_symbols
    if len(symbols) != 1 or not isinstance(condition, sympy.core.relational.Relational):
        return False
    symbol, known_sizes = next(iter(symbols)), compared | {1}
    if not condition.has(Mod, PythonMod):
        line = sympy.expand(condition.lhs - condition.rhs)
        if not line.is_polynomial(symbol) or sympy.degree(line, symbol) != 1:
            return False
        root = -line.coeff(symbol, 0) / line.coeff(symbol, 1)
        if isinstance(condition, sympy.Ne):
            return not root.is_integer or root < 1 or int(root) in known_sizes
        rises = (line.coeff(symbol, 1) > 0) == isinstance(condition, sympy.Gt | sympy.Ge)
        if isinstance(condition, sympy.Eq) or not rises or root > _SETTLED:
            return False
    elif not all(_settles(atom) for atom in condition.atoms(Mod, PythonMod)):
        return False
    return all(size in known_sizes for size in range(1, _SETTLED + 2) if not condition.subs(symbol, size))


def _settles(rest: Any) -> bool:
    """Return whether the rest of a division by a multiple of the size is a single formula from small sizes on: with
    small numbers after removing the common factor. The rest of 5 by 5 n is five times the rest of 1 by n."""
    numbers = [int(factor) for side in rest.args for factor in _factors(side)]
    shared = math.gcd(*numbers) or 1
    small = all(abs(number) // shared <= _SMALL for number in numbers)
    return bool(small and rest.args[1].free_symbols and all(_smooth(arg) for arg in rest.args))


def _factors(expression: Any) -> list[Any]:
    """The coefficients of a polynomial of the size; for other formulas the numbers and 1, to leave no common factor."""
    symbols = expression.free_symbols
    if not symbols and expression.is_Integer:
        return [expression]
    if len(symbols) == 1 and expression.is_polynomial(*symbols):
        coefficients = sympy.Poly(expression, *symbols).coeffs()
        if all(coefficient.is_Integer for coefficient in coefficients):
            return list(coefficients)
    return [1, *(sympy.ceiling(abs(atom)) for atom in expression.atoms(sympy.Number))]


@contextlib.contextmanager
def _watched(uses: SizeUses) -> Iterator[None]:
    """Record sizes that are no formula of the number of samples, and Python numbers and texts; ``len`` gives
    symbols."""
    start, number, count, text = SymNode.__init__, SymNode.guard_int, builtins.len, torch.SymInt.__str__

    def init(node: Any, expression: Any, *rest: Any, **named: Any) -> None:
        start(node, expression, *rest, **named)
        if not _smooth(expression):
            uses.add_branch()

    def guard_int(node: Any, file: Any, line: Any) -> int:
        if node.expr.free_symbols and node.hint is not None:
            uses.numbers[user_line(_run.__code__)] = None
            return int(node.hint)
        return number(node, file, line)  # type: ignore[no-any-return]

    def written(size: Any) -> str:
        if not (is_of_user(sys._getframe(1)) and size.node.expr.free_symbols and size.node.hint is not None):
            return text(size)  # type: ignore[no-any-return]
        uses.numbers[user_line(_run.__code__)] = None
        return str(size.node.hint)

    def length(value: Any) -> Any:
        return value.shape[0] if isinstance(value, FakeTensor) and value.dim() else count(value)

    with (
        mock.patch.object(SymNode, "__init__", init), mock.patch.object(SymNode, "guard_int", guard_int),
        mock.patch.object(builtins, "len", length), mock.patch.object(torch.SymInt, "__str__", written),
        mock.patch.object(torch.SymInt, "__repr__", written),
    ):  # fmt: skip
        yield


def _smooth(expression: Any) -> bool:
    """Return whether an expression is the same formula at all sizes. ``Max(1, ...)`` is a stride of memory."""
    if not isinstance(expression, sympy.Basic) or not expression.free_symbols:
        return True
    if isinstance(expression, sympy.Max) or type(expression).__name__ == "Max":
        return 1 in expression.args and all(_smooth(arg) for arg in expression.args)
    if isinstance(expression, Mod | PythonMod):
        return _settles(expression)
    return isinstance(expression, SMOOTH) and all(_smooth(arg) for arg in expression.args)
