"""Results of modules, such as logits, under the user's names: outputs of the step, or values."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import textwrap
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch

from gopt.errors import OptionError, UnsupportedError
from gopt.frontends.pytorch.factory import Recipe, loss_in
from gopt.frontends.pytorch.options import ExportOptions
from gopt.text.sanitize import show
from gopt.text.suggestions import did_you_mean


@dataclasses.dataclass(slots=True)
class ModuleValues:
    """Tensors of a step by name. ``outputs``: kept by ``--outputs`` and ``--outputs-of``; ``returned``: other results
    of the module; ``given``: arguments of the call; ``arguments``: names in ``forward``."""

    outputs: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    returned: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    given: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    arguments: dict[str, str] = dataclasses.field(default_factory=dict)
    of_module: list[str] = dataclasses.field(default_factory=list)
    """Names of what the module itself returns, kept or not."""

    @property
    def hidden(self) -> dict[str, torch.Tensor]:
        """Named values that are no outputs."""
        return self.returned | self.given


@contextlib.contextmanager
def returned(recipe: Recipe, options: ExportOptions, names: Container[str]) -> Iterator[ModuleValues]:
    """Yield the record filled by the call of the module, without the loss.

    Names are keys and fields of results, names in the ``return``, ``output`` for a tensor, and ``output_0``, ... for a
    tuple; a name in ``names`` gets the prefix ``output.``, a submodule's name the path. Raises OptionError for an
    unknown submodule, UnsupportedError at the end if a submodule with kept results was not called exactly once.
    """
    values_out = ModuleValues()
    calls: dict[str, int] = dict.fromkeys((*([""] if options.outputs else []), *options.outputs_of), 0)
    filled: dict[str, bool] = {}
    modules = {"": recipe.module, **_submodules(recipe.module, options.outputs_of)}

    def before(module: Any, args: Any, kwargs: Any) -> None:
        for name, value in _arguments(module, args, kwargs).items():
            values_out.arguments[name] = f"input.{name}" if name in names else name
            values_out.given[values_out.arguments[name]] = value.detach().clone()  # forward may write to it

    def behind(path: str, module: Any, result: Any) -> None:
        calls[path] = calls.get(path, 0) + 1
        loss = loss_in(result) if recipe.loss is None and not path else None
        named = {}
        for name, value in _named(result, _return_names(module)):
            if value is not loss and name != "loss":
                name_out = path if path and name == "output" else f"{path}.{name}" if path else name
                is_used = name_out in names or name_out in values_out.given or name_out in values_out.outputs
                named[f"output.{name_out}" if is_used else name_out] = value.detach()
        filled[path] = bool(named)
        if path or options.outputs:
            values_out.outputs |= named
        else:
            values_out.returned |= {name: value.clone() for name, value in named.items()}
        if not path:
            values_out.of_module = list(named)

    def hooked(path: str) -> Any:
        return lambda module, args, result: behind(path, module, result)

    handles = [module.register_forward_hook(hooked(path)) for path, module in modules.items()]
    handles.append(recipe.module.register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield values_out
    finally:
        for handle in handles:
            handle.remove()
    for path, count in calls.items():
        if (path or options.outputs) and (count != 1 or not filled[path]):
            _refuse(path, count)
    if calls.get("") != 1:
        values_out.returned, values_out.given, values_out.arguments, values_out.of_module = {}, {}, {}, []


def _refuse(path: str, count: int) -> None:
    what = f"is called {count} times" if count != 1 else "returns no tensor beside the loss"
    if not path:
        hint = "let the loss function call module(...) once, or leave it out"
        raise UnsupportedError(f"--outputs: the module {what} in a step", hint)
    raise UnsupportedError(f"--outputs-of: {show(path)} {what} in a step", "leave it out")


def _submodules(module: torch.nn.Module, paths: Sequence[str]) -> dict[str, torch.nn.Module]:
    modules_by_path = dict(module.named_modules(remove_duplicate=False))
    for path in paths:
        if path not in modules_by_path or not path:
            hint = did_you_mean(path, modules_by_path) or f"it has {', '.join(list(modules_by_path)[1:9])}"
            raise OptionError(f"--outputs-of: the module has no submodule {show(path)}", hint)
    return {path: modules_by_path[path] for path in paths}


def _named(result: Any, names: Sequence[str | None], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a result. ``names``: from the code, for the result or for the parts."""
    if isinstance(result, torch.Tensor):
        yield (
            prefix.removesuffix(".") or next(filter(None, names[:1]), "output") if len(names) < 2 else "output",
            result,
        )
        return
    for name, value in _parts(result, names, prefix):
        yield from _named(value, (), f"{prefix}{name}.")


def _parts(result: Any, names: Sequence[str | None], prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(result, Mapping):
        yield from ((str(name), value) for name, value in result.items())
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        yield from ((field.name, getattr(result, field.name)) for field in dataclasses.fields(result))
    elif isinstance(result, Sequence) and not isinstance(result, str):
        fields = getattr(result, "_fields", names if len(names) == len(result) else [None] * len(result))
        for index, (name, value) in enumerate(zip(fields, result)):
            yield name or (str(index) if prefix else f"output_{index}"), value


def _return_names(module: torch.nn.Module) -> list[str | None]:
    """The variables in the ``return`` of ``forward``, if the same everywhere; None for other expressions, and for
    arguments of ``forward``."""
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(type(module).forward))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return []
    if not isinstance(function, ast.FunctionDef):
        return []
    inner = {id(part) for node in ast.walk(function) if _is_function(node) and node is not function
             for part in ast.walk(node)}  # fmt: skip
    results = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and id(node) not in inner]
    parts = [list(result.elts) if isinstance(result, ast.Tuple | ast.List) else [result] for result in results]
    arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    names = [
        [part.id if isinstance(part, ast.Name) and part.id not in arguments else None for part in one] for one in parts
    ]
    return names[0] if names and all(row == names[0] for row in names) else []


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _arguments(module: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
    """Tensors ``forward`` was called with, by the names."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {}
    return {name: value for name, value in bound.items() if isinstance(value, torch.Tensor)}
