"""Loads and checks the user's factory, ``MODULE:FACTORY`` or a function."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from gopt.errors import GoptError, InputError, OptionError, UnsupportedError
from gopt.frontends.pytorch.copies import OPTIMIZER_HOOKS, copy_tensor_hooks, rebind_hooks, rebound
from gopt.frontends.pytorch.scripts import Script, script_factory
from gopt.system.python_files import named_module, run_file
from gopt.text.sanitize import show
from gopt.text.suggestions import did_you_mean

RESERVED = ("lr", "loss")
"""An input and an output of each step."""
SHAPE = "(module, loss function or None, optimizer, example batch[, scheduler])"


class ModuleWithLoss(torch.nn.Module):
    """A module under its own names, and a loss module under ``loss``."""

    def __init__(self, module: torch.nn.Module, loss: torch.nn.Module) -> None:
        super().__init__()
        self._both = [("", module), ("loss", loss)]

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the modules of both; other lists of a module are made of these."""
        memo = set() if memo is None else memo
        for name, module in self._both:
            yield from module.named_modules(memo, name, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield both, for ``train`` and ``eval``."""
        yield from self._both


@dataclass(slots=True)
class Recipe:
    """A training step as the user writes it: plain eager code.

    ``loss``: called as ``loss(module, batch)`` for a batch that is a dict or a tensor, as ``loss(module(*inputs),
    target)`` for a tuple; None if the module returns the loss. ``batch``: tensors by input name.
    """

    module: torch.nn.Module
    loss: Callable[..., Any] | None
    optimizers: list[torch.optim.Optimizer]
    batch: dict[str, torch.Tensor]
    scheduler: Any = None
    positional: bool = False
    """Whether the batch was given as a tuple."""
    form: Any = None
    """The batch as the user nests it, with input names for tensors; None: the flat dict, or its values in order."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Recipe:
        """A copy of everything trained. Optimizers copy only groups and states; other attributes, such as settings of
        third-party optimizers, are copied here."""
        whole = self.whole
        for mode in {vars(parameter).get("fake_mode") for parameter in whole.parameters()} - {None}:
            memo[id(mode)] = mode  # tensors of two modes do not mix
        for module in whole.modules():
            for value in vars(module).values():
                if isinstance(value, torch.Tensor) and not value.is_leaf:  # a result that the module keeps
                    memo[id(value)] = value.detach()
        copied = Recipe(*(copy.deepcopy(getattr(self, field.name), memo) for field in fields(self)))
        for old, new in zip(self.optimizers, copied.optimizers):
            for key, value in vars(old).items():
                if key not in vars(new) and key != "step":  # a scheduler's is bound to the old one
                    vars(new)[key] = copy.deepcopy(value, memo)
                elif key in OPTIMIZER_HOOKS:
                    vars(new)[key] = copy.copy(value)
        for parameter in whole.parameters():
            if id(parameter) in memo:
                copy_tensor_hooks(parameter, memo[id(parameter)], memo)
        for owner in (*copied.whole.modules(), *copied.optimizers):
            rebind_hooks(owner, memo)
        copied.loss = rebound(copied.loss, memo)
        return copied

    @property
    def whole(self) -> torch.nn.Module:
        """All modules of the step as one: the module, and the loss if a module."""
        return ModuleWithLoss(self.module, self.loss) if isinstance(self.loss, torch.nn.Module) else self.module

    def loss_of(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a batch, a tensor of a single element; raises InputError without a loss."""
        return _one_element(self._result(batch))

    def evaluated(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The loss of a batch, and other tensors of a single element returned beside it: metrics by the keys, or
        ``metric_1``, ... by the places in a tuple."""
        result = self._result(batch)
        metrics = {"loss": _one_element(result)}
        if isinstance(result, Mapping):
            beside = [(str(name), value) for name, value in result.items()]
        else:
            several = isinstance(result, Sequence) and not isinstance(result, torch.Tensor)
            beside = [(f"metric_{index}", value) for index, value in enumerate(result) if index] if several else []
        scalars = {name: value for name, value in beside if isinstance(value, torch.Tensor) and value.numel() == 1}
        return metrics | {name: value.reshape(()) for name, value in scalars.items() if name not in metrics}

    def _result(self, batch: Mapping[str, torch.Tensor]) -> Any:
        batch_form = _filled(
            self.form, {name: value.detach() for name, value in batch.items()}
        )  # it may get a gradient
        if self.loss is not None and not self.positional:
            return self.loss(self.module, batch_form)
        if self.loss is not None:
            *inputs, target = batch_form.values()
            return self.loss(self.module(*inputs), target)
        return self.module(*batch_form.values()) if self.positional else self.module(**batch_form)


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A part of a batch other than a tensor: None, or a flag such as ``return_dict=True``."""

    value: str | bool | None


def _filled(form: Any, batch: Mapping[str, torch.Tensor]) -> Any:
    """The batch in the user's nesting."""
    if form is None:
        return dict(batch)
    if isinstance(form, _Fixed):
        return form.value
    if isinstance(form, str):
        return batch[form]
    if isinstance(form, Mapping):
        return {key: _filled(inner, batch) for key, inner in form.items()}
    return type(form)(_filled(inner, batch) for inner in form)


def loss_in(result: Any) -> Any:
    """The loss in the result of a module or loss function: under ``loss``, or of a tuple the first, or the only tensor
    of a single element with a gradient."""
    if isinstance(result, Mapping) and "loss" in result:
        return result["loss"]
    if not isinstance(result, torch.Tensor) and isinstance(getattr(result, "loss", None), torch.Tensor):
        return result.loss
    if not isinstance(result, Sequence):
        return result
    single = [part for part in result if isinstance(part, torch.Tensor) and part.numel() == 1 and part.requires_grad]
    leading = result[0] if result else None
    return single[0] if len(single) == 1 and not any(leading is part for part in single) else leading


def _one_element(result: Any) -> torch.Tensor:
    result = loss_in(result)
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        what = f"a tensor of shape {list(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise InputError(
            f"the model gives {what}, not a loss of one element",
            "let the factory return a loss function: loss(module, batch), or loss(output, target) for a tuple",
        )
    return result.reshape(())


def make_recipe(parts: Any) -> Recipe:
    """Check the result of a factory; raises InputError naming the missing part."""
    if isinstance(parts, Recipe):
        return parts
    if not isinstance(parts, tuple) or len(parts) not in (4, 5):
        what = f"a tuple of {len(parts)}" if isinstance(parts, tuple) else type(parts).__name__
        raise InputError(f"the factory returns {what}", f"return {SHAPE}")
    module, loss, optimizers, batch, *rest = parts
    if not isinstance(module, torch.nn.Module):
        several = isinstance(module, list | tuple | Mapping)
        raise InputError(
            f"the first thing that the factory returns is not a module, but {type(module).__name__}",
            "make one of several: torch.nn.ModuleDict; the loss takes its parts" if several else
            "gopt help export says what FACTORY returns",
        )  # fmt: skip
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        raise UnsupportedError(
            "the module is wrapped in DistributedDataParallel", "give the module in it (.module): gopt shard adds ranks"
        )
    if any(isinstance(module, torch.jit.ScriptModule) for module in module.modules()):
        raise UnsupportedError("the module is compiled by torch.jit", "give the module that it was made of")
    if loss is not None and not callable(loss):
        hint = "return None where the module has one"
        raise InputError(f"the loss is not a function, but {type(loss).__name__}", hint)
    chosen, rest = _configured(optimizers, rest)
    for optimizer in chosen or [None]:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(
                f"the optimizer is not a torch.optim.Optimizer, but {type(optimizer).__name__}",
                "gopt help export says what FACTORY returns",
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UnsupportedError(
                f"{type(optimizer).__name__} runs forward and backward several times a step, by a closure",
                "take an optimizer whose step() needs none, such as torch.optim.AdamW: a graph has one forward",
            )
    named, positional, form = _batch(module, loss, batch)
    scheduler = rest[0] if rest else None
    is_scheduler = isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) or hasattr(scheduler, "last_epoch")
    if scheduler is not None and not is_scheduler:
        raise InputError(
            f"the scheduler is not of torch.optim.lr_scheduler, but {type(scheduler).__name__}",
            "return a scheduler of torch.optim.lr_scheduler, or none",
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UnsupportedError(
            "ReduceLROnPlateau computes the rate from a metric, outside of the step",
            "leave it out, and feed lr: gopt run --resume --set lr=... goes on at another rate",
        )
    return Recipe(module, loss, chosen, named, scheduler, positional, form)


def _configured(parts: Any, rest: list[Any]) -> tuple[list[Any], list[Any]]:
    """Optimizers and scheduler from a factory, or from Lightning's ``configure_optimizers``: a dict, or lists of both.
    Raises UnsupportedError for a scheduler that moves once an epoch."""
    beside: Any = []
    if isinstance(parts, Mapping) and "optimizer" in parts:
        parts, beside = parts["optimizer"], parts.get("lr_scheduler") or []
    elif isinstance(parts, list | tuple) and len(parts) == 2 and all(isinstance(part, list | tuple) for part in parts):
        parts, beside = parts
    for config in beside if isinstance(beside, list | tuple) else [beside]:
        if not isinstance(config, Mapping) or config.get("interval", "epoch") != "step":
            raise UnsupportedError(
                "the optimizer comes with a scheduler that moves once an epoch, and a step's moves at each step",
                'let it move so, by {"scheduler": ..., "interval": "step"}; or leave it out: gopt run --set lr=...',
            )
        rest = [*rest, config["scheduler"]]
    return list(parts) if isinstance(parts, list | tuple) else [parts], rest


def _batch(module: torch.nn.Module, loss: Any, example: Any) -> tuple[dict[str, torch.Tensor], bool, Any]:
    """Tensors by name, whether positional, and the nesting."""
    if isinstance(example, DataLoader):
        example = next(iter(example))
    single = isinstance(example, torch.Tensor) and loss is not None
    if isinstance(example, torch.Tensor):
        example = (example,)
    if single:
        parts = dict(zip(_input_names(module, None, 1), example))
    elif isinstance(example, Mapping):
        parts = {str(name): value for name, value in example.items()}
    elif isinstance(example, list | tuple) and example:
        parts = dict(zip(_input_names(module, loss, len(example)), example))
    else:
        raise InputError(f"the example batch is {type(example).__name__}", "return a dict or a tuple of tensors")
    named: dict[str, torch.Tensor] = {}
    form = {name: _flattened(name, value, named) for name, value in parts.items()}
    reserved = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    for name in named:
        if name.startswith("gopt.") or name in RESERVED:
            raise InputError(f"the example batch has {show(name)}, a name that gopt uses itself", "rename it")
        if name in reserved:
            raise InputError(f"the example batch has {show(name)}, which the module has too", "rename it")
    return (named, False, form.popitem()[1]) if single else (named, not isinstance(example, Mapping), form)


def _flattened(name: str, value: Any, named: dict[str, torch.Tensor]) -> Any:
    """Put the tensors of a value into ``named``; returns the value with the names in the places.

    A tensor standing twice in a batch is two inputs.
    """
    if isinstance(value, torch.Tensor):
        if name in named:
            raise InputError(f"the example batch has {show(name)} twice", "rename one")
        named[name] = value.clone() if any(tensor is value for tensor in named.values()) else value
        return name
    if isinstance(value, Mapping):
        return {key: _flattened(f"{name}.{key}", inner, named) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_flattened(f"{name}.{index}", inner, named) for index, inner in enumerate(value))
    if value is None or isinstance(value, bool | str):
        return _Fixed(value)
    raise InputError(
        f"the example batch's {show(name)} is not a tensor, but {type(value).__name__}",
        "a batch has its numbers as tensors (torch.as_tensor)",
    )


def _input_names(module: torch.nn.Module, loss: Any, count: int) -> list[str]:
    """Names for a tuple: the names of ``forward``, and ``target``; wrappers have the inner module's."""
    if isinstance(module, torch.nn.DataParallel):
        module = module.module
    module = getattr(module, "_orig_mod", module)  # of torch.compile
    try:
        names_known = [
            name
            for name, parameter in inspect.signature(module.forward).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        names_known = []
    inputs = count - (loss is not None)
    names = names_known[:inputs] if len(names_known) >= inputs else [f"input_{index}" for index in range(inputs)]
    return [*names, "target"][:count] if "target" not in names else [f"input_{index}" for index in range(count)]


def load_factory(text: str) -> Callable[[], Any]:
    """The function named by ``MODULE:FACTORY`` or ``FILE.py:FACTORY``, or the only one of ``FILE.py``; raises
    OptionError, InputError."""
    where, colon, name = text.rpartition(":")
    if text.endswith(".py"):
        return script_factory(_there(Path(text)), _from_file)[0]
    if not colon or not where or not name:
        raise OptionError(
            f"{text!r} names no factory", "write MODULE:FACTORY or FILE.py:FACTORY",
            "gopt init writes a file with one, and what to fill in",
        )  # fmt: skip
    if where.endswith(".py"):
        Script.read(_there(Path(where))).refuse_training_factory(name)
    module = _from_file(Path(where)) if where.endswith(".py") else _from_path(where)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            functions = [name for name in vars(module) if callable(getattr(module, name))]
            raise OptionError(f"{where} has no {name!r}", *filter(None, [did_you_mean(name, functions)]))
        value = getattr(value, part)
    if not callable(value):
        raise OptionError(
            f"{text} is not a function, but {type(value).__name__}", "write MODULE:FACTORY with the name of a function"
        )
    return value  # type: ignore[no-any-return]


def _file_or_module(factory: str) -> str:
    return factory if factory.endswith(".py") else factory.rpartition(":")[0]


def script_of(factory: Any) -> Script | None:
    """The script that ``FILE.py:FACTORY`` or ``FILE.py`` names."""
    path = _file_or_module(factory) if isinstance(factory, str) else ""
    return Script.read(Path(path)) if path.endswith(".py") else None


@contextlib.contextmanager
def own_arguments(factory: str) -> Iterator[None]:
    """A script and the factory see an empty command line, not gopt's; raises InputError if either ends Python."""
    name = _file_or_module(factory)
    arguments, sys.argv = sys.argv, [name]
    try:
        yield
    except SystemExit as error:
        raise InputError(
            f"{name} ended itself, as sys.exit and argument parsers do: {show(error.code)}",
            "it gets no arguments here: let those that it needs have defaults, or return before it ends",
        ) from error
    finally:
        sys.argv = arguments


def call_factory(factory: Callable[[], Any], name: str) -> Recipe:
    """Call the factory; raises InputError for any error in it."""
    try:
        parts = factory()
    except GoptError:
        raise
    except Exception as error:
        raise InputError(f"{name} raised {type(error).__name__}: {error}", "--debug shows where") from error
    return make_recipe(parts)


def _there(path: Path) -> Path:
    if not path.is_file():
        raise InputError(
            f"there is no file {path}", "write MODULE:FACTORY with a .py file, or with a module on PYTHONPATH"
        )
    return path


def _from_file(path: Path) -> Any:
    Script.read(_there(path)).refuse_training()
    try:
        return run_file(path)
    except Exception as error:
        raise InputError(f"{path} raised {type(error).__name__}: {error}", "--debug shows where") from error


def _from_path(name: str) -> Any:
    try:
        return named_module(name)
    except Exception as error:
        hint = "write FILE.py:FACTORY for a file" if isinstance(error, ImportError) else "--debug shows where"
        raise InputError(f"importing {name} raised {type(error).__name__}: {error}", hint) from error
