"""Loads and checks the user's factory, ``MODULE:FACTORY`` or a function."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from gopt.errors import GoptError, InputError, OptionError
from gopt.sanitize import show
from gopt.suggestions import did_you_mean

SHAPE = "(module, loss function or None, optimizer, example batch[, scheduler])"


@dataclass(slots=True)
class Recipe:
    """A training step as its user writes it: plain eager code.

    ``loss``: called as ``loss(module, batch)`` where the batch is a dict, as ``loss(module(*inputs), target)`` where it
    is a tuple; None where the module itself returns the loss. ``batch``: tensors by input name.
    """

    module: torch.nn.Module
    loss: Callable[..., Any] | None
    optimizers: list[torch.optim.Optimizer]
    batch: dict[str, torch.Tensor]
    scheduler: Any = None
    positional: bool = False
    """Whether the batch was given as a tuple."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Recipe:
        """A copy of everything that trains. Optimizers copy only their groups and states; their other attributes,
        such as the settings of third-party ones, are copied here."""
        for mode in {vars(each).get("fake_mode") for each in self.module.parameters()} - {None}:
            memo[id(mode)] = mode  # tensors of two modes do not mix
        made = Recipe(*(copy.deepcopy(getattr(self, each.name), memo) for each in fields(self)))
        for old, new in zip(self.optimizers, made.optimizers):
            for key, value in vars(old).items():
                if key not in vars(new) and not callable(value):
                    vars(new)[key] = copy.deepcopy(value, memo)
        return made

    def loss_of(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a batch, a tensor of one element; raises InputError where there is none."""
        if self.loss is not None and not self.positional:
            found = self.loss(self.module, dict(batch))
        elif self.loss is not None:
            *inputs, target = batch.values()
            found = self.loss(self.module(*inputs), target)
        else:
            found = self.module(*batch.values()) if self.positional else self.module(**batch)
        return _one_element(found)


def _one_element(found: Any) -> torch.Tensor:
    """The loss in the result of a module or loss function."""
    if isinstance(found, Mapping) and "loss" in found:
        found = found["loss"]
    elif not isinstance(found, torch.Tensor) and isinstance(getattr(found, "loss", None), torch.Tensor):
        found = found.loss
    elif isinstance(found, Sequence) and found and isinstance(found[0], torch.Tensor):
        found = found[0]
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        what = f"a tensor of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise InputError(
            f"the model gives {what}, not a loss of one element",
            "let the factory return a loss function: loss(module, batch), or loss(output, target) for a tuple",
        )
    return found.reshape(())


def make_recipe(given: Any) -> Recipe:
    """Check what a factory returned; raises InputError, which says what is missing."""
    if isinstance(given, Recipe):
        return given
    if not isinstance(given, tuple) or len(given) not in (4, 5):
        what = f"a tuple of {len(given)}" if isinstance(given, tuple) else type(given).__name__
        raise InputError(f"the factory returns {what}", f"return {SHAPE}")
    module, loss, optimizers, batch, *rest = given
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"the first thing that the factory returns is no module, but {type(module).__name__}")
    if loss is not None and not callable(loss):
        raise InputError(f"the loss is no function, but {type(loss).__name__}", "return None where the module has one")
    chosen = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    for optimizer in chosen or [None]:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(f"the optimizer is no torch.optim.Optimizer, but {type(optimizer).__name__}")
    named, positional = _batch(module, loss, batch)
    scheduler = rest[0] if rest else None
    if scheduler is not None and not hasattr(scheduler, "last_epoch"):
        raise InputError(f"the scheduler is none of torch.optim.lr_scheduler, but {type(scheduler).__name__}")
    return Recipe(module, loss, chosen, named, scheduler, positional)


def _batch(module: torch.nn.Module, loss: Any, given: Any) -> tuple[dict[str, torch.Tensor], bool]:
    """Tensors by name, and whether they are positional."""
    if isinstance(given, torch.Tensor):
        given = (given,)
    if isinstance(given, Mapping):
        named = {str(name): value for name, value in given.items()}
    elif isinstance(given, list | tuple) and given:
        named = dict(zip(_input_names(module, loss, len(given)), given))
    else:
        raise InputError(f"the example batch is {type(given).__name__}", "return a dict or a tuple of tensors")
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise InputError(f"the example batch's {show(name)} is no tensor, but {type(value).__name__}")
        if name.startswith("gopt.") or name in ("lr", "loss"):
            raise InputError(f"the example batch has {show(name)}, a name that gopt uses itself", "rename it")
    return named, not isinstance(given, Mapping)


def _input_names(module: torch.nn.Module, loss: Any, count: int) -> list[str]:
    """Names for a tuple: those of ``forward``, and ``target``."""
    try:
        known = [
            name
            for name, each in inspect.signature(module.forward).parameters.items()
            if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        known = []
    inputs = count - (loss is not None)
    names = known[:inputs] if len(known) >= inputs else [f"input_{place}" for place in range(inputs)]
    return [*names, "target"][:count] if "target" not in names else [f"input_{place}" for place in range(count)]


def load_factory(text: str) -> Callable[[], Any]:
    """The function that ``MODULE:FACTORY`` or ``FILE.py:FACTORY`` names; raises OptionError, InputError."""
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise OptionError(f"{text!r} names no factory", "write MODULE:FACTORY or FILE.py:FACTORY")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_path(where)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            functions = [each for each in vars(module) if callable(getattr(module, each))]
            raise OptionError(f"{where} has no {name!r}", *filter(None, [did_you_mean(name, functions)]))
        found = getattr(found, part)
    if not callable(found):
        raise OptionError(f"{text} is no function, but {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def call_factory(factory: Callable[[], Any], name: str) -> Recipe:
    """Call the factory; raises InputError for any error in it."""
    try:
        given = factory()
    except GoptError:
        raise
    except Exception as error:
        raise InputError(f"{name} raised {type(error).__name__}: {error}", "--debug shows where") from error
    return make_recipe(given)


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # pickles and dataclasses look there
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path} raised {type(error).__name__}: {error}", "--debug shows where") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _from_path(name: str) -> Any:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except Exception as error:
        hint = "write FILE.py:FACTORY for a file" if isinstance(error, ImportError) else "--debug shows where"
        raise InputError(f"importing {name} raised {type(error).__name__}: {error}", hint) from error
    finally:
        sys.path.remove("")
