"""Training scripts without a factory: the trained objects are found, or the missing lines are told.

A script is parsed before running. A script with training on import is never run.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader

from gopt.errors import InputError, OptionError
from gopt.frontends.pytorch.loop_inputs import LoopInputs
from gopt.frontends.pytorch.loop_notes import LoopNote, lacking, loop_notes
from gopt.frontends.pytorch.manual_updates import ManualUpdate
from gopt.frontends.pytorch.options import ExportOptions
from gopt.frontends.pytorch.parallel_code import Undistributed
from gopt.frontends.pytorch.script_blocks import GUARD, ScriptBlock, behind, blocks, bound, imported, statements_for
from gopt.frontends.pytorch.training_loops import (
    LOOPS,
    TrainingLoop,
    called,
    forward,
    functions_with,
    own_nodes,
    stepped,
    trains,
    trains_in,
    turns,
)
from gopt.text.sanitize import show

_LOSSES = ("criterion", "loss", "loss_fn", "loss_function", "compute_loss", "objective")
_BATCHES = ("batch", "example", "example_batch", "sample")
_LOADERS = ("train_loader", "train_dataloader", "trainloader", "loader", "dataloader")


@dataclass(frozen=True, slots=True)
class Script:
    """A file in Python's grammar, without its work for several processes."""

    path: Path
    tree: ast.Module
    advice: Sequence[str] = ()

    @classmethod
    def read(cls, path: Path) -> Script:
        """The script of a file; raises InputError."""
        try:
            alone = Undistributed()
            tree = alone.of(_WithoutSelf().visit(ast.parse(path.read_bytes(), path.name)))
            return cls(path, tree, alone.advice())
        except (OSError, SyntaxError, ValueError) as error:
            raise InputError(f"{path} raised {type(error).__name__}: {error}", "--debug shows where") from error

    def refuse_training(self) -> None:
        """Raise OptionError, with the lines for a factory, for a script with training on import."""
        line = self._training_line()
        if line is not None:
            raise OptionError(
                f"{self.path} trains while it is imported, from line {line} on, and was not run",
                f"put line {line}, and what trains behind it, under: {GUARD}",
                *self._missing(),
            )

    def refuse_training_factory(self, name: str) -> None:
        """Raise OptionError for a factory that trains and returns nothing."""
        function = _functions(self.tree).get(name)
        if function is not None and name in functions_with(_functions(self.tree)) and not any(_returned(function)):
            raise OptionError(f"{self.path}:{name} trains and returns nothing, and was not run", *self._missing())

    def factories(self) -> list[str]:
        """Functions without required arguments that return a tuple of four or five."""
        functions = [statement for statement in self.tree.body if isinstance(statement, ast.FunctionDef)]
        return [node.name for node in functions if _needs_nothing(node) and any(map(_is_recipe, _returned(node)))]

    def recipe(self, module: ModuleType) -> tuple[Any, ...]:
        """The result of a factory, made of the names in an imported script. Raises OptionError, with lines to add, for
        missing or repeated parts."""
        named = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        optimizers = _unique(value for value in named.values() if isinstance(value, torch.optim.Optimizer))
        if not optimizers:
            raise OptionError(f"{self.path} has no optimizer, where it is imported", *self._missing())
        model = self._one("module", _trained(named, optimizers))
        losses = {name: value for name, value in named.items() if _is_loss(name, value) and value is not model}
        loss = self._one("loss", losses) if losses else None
        batch = self._batch(named)
        if batch is None:
            names = ", ".join((*_BATCHES, *_LOADERS))
            raise OptionError(f"{self.path} has no batch, where it is imported: none of {names}", *self._missing())
        by_name = {name: v for name, v in named.items() if isinstance(v, torch.optim.lr_scheduler.LRScheduler)}
        loop = TrainingLoop.of(self.tree)
        lines = loop.lines_of_loss() if loop is not None else None
        if lines is not None:
            raise OptionError(
                f"{self.path} computes its loss in lines {lines[0]} to {lines[1]}, by more than a function of output "
                "and target",
                *self._missing(),
            )
        late = next((name for name in self._once_an_epoch() if name in by_name), None)
        if late is not None:
            raise OptionError(
                f"{self.path} moves {show(late)} once an epoch, and a step's scheduler moves at each step",
                *self._missing(),
            )
        schedulers = _unique(by_name.values())
        optimizer = optimizers[0] if len(optimizers) == 1 else optimizers
        return (model, loss, optimizer, batch, *(schedulers if len(schedulers) == 1 else ()))

    def _one(self, what: str, candidates: Mapping[str, Any]) -> Any:
        several = _unique(candidates.values())
        if len(several) != 1:
            names = f": {', '.join(map(show, candidates))}" if candidates else ""
            count = "several values that may be its" if several else "no"
            raise OptionError(f"{self.path} has {count} {what}, where it is imported{names}", *self._missing())
        return several[0]

    def _batch(self, named: Mapping[str, Any]) -> Any:
        """An example batch: under the usual names, or the first of a loader."""
        example = next((named[name] for name in _BATCHES if isinstance(named.get(name), dict | tuple | list)), None)
        loaders = {name: value for name, value in named.items() if isinstance(value, DataLoader)}
        name = next((name for name in (*_LOADERS, *loaders) if name in loaders), None)
        if example is None and name is not None:
            example = next(iter(loaders[name]))
        return tuple(example) if isinstance(example, list) else example

    def _training_line(self) -> int | None:
        """The first line, outside of functions and the guard, with a backward, direct or in a called function."""
        training = functions_with(_functions(self.tree))
        for statement in imported(self.tree.body):
            if any(trains(node, training) for node in own_nodes(statement)):
                return statement.lineno
        return None

    def left_out(self, options: ExportOptions, factory: str) -> list[str]:
        """Changes of the model beyond the factory, or the import, and the work of loops beyond the step with its
        options."""
        script = blocks(self.tree)
        runs = [script[0], *(block for block in script if block.function and block.function.name == factory)]
        models, optimizers, *_ = self.names()
        names = {*self._parts(models), *models, *optimizers}
        return [
            *self._behind(script, names, [statement for block in runs for statement in block.statements]),
            *lacking(self._notes(), options),
        ]

    def _notes(self) -> list[LoopNote]:
        models, optimizers, *_ = self.names()
        stepping = optimizers.keys() & self._moved().keys()
        return loop_notes(self.tree, blocks(self.tree), {*self._parts(models), *models}, stepping)

    def _missing(self) -> list[str]:
        """The lines of a factory, as hints, with the names and expressions of the script."""
        models, optimizers, loss, batch = self.names()
        scheduler = {name: call for optimizer in optimizers for name, call in self._scheduler(optimizer).items()}
        module, trained = next(iter(models)), ", ".join(optimizers)
        beside, loop, inputs = list[str](), TrainingLoop.of(self.tree), LoopInputs()
        lines = loop.lines_of_loss() if loop is not None else None
        if len(models) > 1:
            module = f"torch.nn.ModuleDict(dict({', '.join(f'{name}={name}' for name in models)}))"
            beside.append(
                f"def loss(module, batch) calls {' and '.join(f'module.{name}' for name in models)}; it returns the "
                "sum of several losses, and detaches in each what the others train (gopt help export shows one). All "
                "optimizers step at once, from the same values: no loss reads another's update"
            )
        elif loop is not None and lines is not None:
            inputs, loss_lines = self._loss_of(loop, module)
            where = f"lines {lines[0]} to {lines[1]} compute" if lines[0] < lines[1] else f"line {lines[0]} computes"
            beside += [f"{where} the loss: add", *loss_lines]
        if loop is not None and (len(models) > 1 or lines is not None):
            loss, batch = "loss", _by_name(loop, batch)
            if inputs.names and inputs.names != loop.names:
                batch = f"dict({', '.join(f'{name}={name}' for name in inputs.names)})"
        manual = ManualUpdate.of(self.tree, module)
        if not _optimizers(self.tree) and manual is None:
            beside.append(f"{trained} stands for what updates the parameters: no optimizer of torch.optim was seen")
        if len(optimizers) > 1:
            trained = f"[{trained}]"
        written = f"    return {', '.join([module, loss, trained, batch, *scheduler])}"
        beside += [
            f"{name} moves once an epoch, and is left out: gopt run --set lr=step:START:EVERY:FACTOR, or table:FILE, "
            "gives the rate of every step"
            for name in self._once_an_epoch()
        ]
        beside += map(str, self._notes())
        built = {**models, **optimizers, **{name: ast.unparse(call) for name, call in scheduler.items()}}
        tracked, script = {*self._parts(models), *built}, blocks(self.tree)
        pairs = ((wanted, block) for wanted in (list(optimizers)[:1], models) for block in script[1:])
        chosen = next((block for wanted, block in pairs if block.outermost and block.bound & set(wanted)), script[0])
        read = [*ast.walk(ast.parse(f"{loss}, {batch}")), *(node for part in inputs.front for node in ast.walk(part))]
        fresh = {name for part in inputs.front for name in bound(part)}
        parts = [*built, *(node.id for node in read if isinstance(node, ast.Name) and node.id not in fresh)]
        reached = {*_functions(self.tree), *script[0].bound, *chosen.bound, "loss"}
        added = [*statements_for(parts, built, tracked, script, reached), *inputs.front]
        lines_of = [f"    {line}" for statement in added for line in ast.unparse(statement).splitlines()]
        beside += self._behind(script, tracked, [*script[0].statements, *chosen.statements, *added])
        if chosen is not script[0]:
            changes = chosen.changes(tracked)
            copied = [part for part in chosen.statements if part in changes or bound(part) & set(parts)]
            last = max(part.end_lineno or 0 for part in copied)
            names = " and ".join(name for name in built if name in chosen.bound)
            return [
                f"copy the lines of {chosen.title} up to line {last}, which make {names}, into a function make, let it "
                f"end as follows, and export {self.path.name}:make",
                *lines_of,
                written,
                *self.advice,
                *beside,
            ]
        lines_of = ["def make():", *lines_of, written]
        count = {2: "two", 3: "three", 4: "four", 5: "five"}.get(len(lines_of), str(len(lines_of)))
        advice = f"add these {count} lines to {self.path.name}, and export {self.path.name}:make"
        return [
            advice,
            *lines_of,
            *self.advice,
            *beside,
            "gopt init writes a file with such a function and its comments",
        ]

    def _loss_of(self, loop: TrainingLoop, module: str) -> tuple[LoopInputs, list[str]]:
        """The inputs of a loop, and the lines of a loss function with the statements that compute its loss."""
        script, counts = blocks(self.tree), {count for _, count in turns(self.tree, _optimizers(self.tree))}
        chain, _ = ScriptBlock("", list(forward(loop.node.body, counts))).making([loop.end], ())
        manual = None if _optimizers(self.tree) else ManualUpdate.of(self.tree, module)
        tensors = manual.tensors if manual is not None else ()
        constants = {name for name, value in _assignments(self.tree) if isinstance(value, ast.Constant)}
        arrays = {name for block in script for name in block.bound} - constants
        inputs = LoopInputs.of(chain, loop, (module, *tensors), arrays)
        names = {node.id for part in inputs.behind for node in ast.walk(part) if isinstance(node, ast.Name)}
        read = [f"{name} = batch[{name!r}]" for name in inputs.names if name in names]
        read += [f"{name} = {module}[{name!r}]" for name in tensors]
        owner = next((block for block in script if block.function and loop.node in ast.walk(block.function)), script[0])
        defaults = {name: ast.unparse(value) for name, value in owner.defaults.items()}
        own = {name for part in inputs.behind for name in bound(part)}
        reached = {*_functions(self.tree), *script[0].bound, *own, *inputs.names, *tensors, module, *vars(builtins)}
        made = [*statements_for(sorted(names), defaults, (), script, reached), *inputs.behind]
        lines = [*read, *(line for part in made for line in ast.unparse(part).splitlines()), f"return {loop.end}"]
        return inputs, [f"def loss({module}, batch):", *(f"    {line}" for line in lines)]

    def _handed(self, calls: Iterable[ast.AST]) -> list[str]:
        """The first argument of each call of the script's functions, where the argument is a name."""
        arguments = [
            call.args[:1] for call in calls if isinstance(call, ast.Call) and called(call) in _makers(self.tree)
        ]
        return [argument.id for part in arguments for argument in part if isinstance(argument, ast.Name)]

    def _parts(self, models: Mapping[str, str]) -> set[str]:
        """Names with parameters in the expressions of the models."""
        owners = {_owner(node) for node in ast.walk(self.tree)}
        read = {node.id for text in models.values() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        return owners & read

    def _behind(self, script: Sequence[ScriptBlock], names: Collection[str], carried: Iterable[ast.stmt]) -> list[str]:
        return [
            f"line {statement.lineno} may change {name} before the training, and the exported step begins without it: "
            f"let the factory run {show(ast.unparse(statement).splitlines()[0])}"
            for statement, name in behind(script, names, carried, self.tree)
        ]

    def _scheduler(self, optimizer: str) -> dict[str, ast.expr]:
        """Each name that moves at every step, with the call making it of the optimizer."""
        moved = self._moved()
        return {name: call for name, call in self._made_of(optimizer).items() if moved.get(name)}

    def _once_an_epoch(self) -> list[str]:
        """Names made of an optimizer that move, and not at every step."""
        schedulers, moved = [self._made_of(name) for name in _optimizers(self.tree)], self._moved()
        return [name for calls in schedulers for name in calls if moved.get(name) is False]

    def _made_of(self, optimizer: str) -> dict[str, ast.Call]:
        calls = {name: call for name, call in _assignments(self.tree) if isinstance(call, ast.Call)}
        arguments = {name: [*call.args, *(word.value for word in call.keywords)] for name, call in calls.items()}
        return {name: call for name, call in calls.items() if optimizer in map(ast.unparse, arguments[name])}

    def _moved(self) -> dict[str, bool]:
        """Each name with a ``step()``, and whether a backward stands beside it, in the same loop or function."""
        at_once = {name for name, body in _functions(self.tree).items() if trains_in(body, set())}
        moved: dict[str, bool] = {}
        for place in (node for node in ast.walk(self.tree) if isinstance(node, (*LOOPS, ast.FunctionDef, ast.Module))):
            for name in (name for node in own_nodes(place, LOOPS) for name in stepped(node)):
                moved[name] = moved.get(name, False) or trains_in(place, at_once)
        return moved

    def names(self) -> tuple[dict[str, str], dict[str, str], str, str]:
        """Modules and optimizers with their expressions, loss and batch; stand-ins where nothing is found."""
        values: dict[str, ast.expr] = {}
        for name, value in _assignments(self.tree):
            values.setdefault(name, value)  # the outermost: a part of a class may have the name of the whole
        moved = self._moved()
        optimizing = _optimizers(self.tree)
        stepping = {name: call for name, call in optimizing.items() if name in moved} or dict(
            list(optimizing.items())[:1]
        )
        optimizers = {name: ast.unparse(call) for name, call in stepping.items()}
        places = stepping.values() or [self.tree]
        owners = [name for place in places for node in ast.walk(place) if (name := _owner(node))]
        owners = owners or self._handed(places) or ["model"]
        models = {name: ast.unparse(values[name]) if name in values else "Model()" for name in owners}
        if not optimizers:
            models = dict(list(models.items())[:1])
            model = next(iter(models))
            manual = ManualUpdate.of(self.tree, model)
            optimizers = {"optimizer": manual.optimizer if manual else f"torch.optim.AdamW({model}.parameters())"}
            if manual is not None and manual.tensors:
                tensors = ", ".join(f"{name}={name}" for name in manual.tensors)
                models = {model: f"torch.nn.ParameterDict(dict({tensors}))"}
        compared = _compared(values, self.tree)
        loss = next(
            (name for name in _LOSSES if name in _functions(self.tree) or (name in values and name not in compared)),
            "",
        )
        loop = TrainingLoop.of(self.tree)
        loss = "None" if loop is not None and loop.returns_loss else loss or next(iter(compared.values()), "loss")
        read = [name.id for name in ast.walk(loop.over) if isinstance(name, ast.Name)] if loop is not None else []
        loader = next((name for name in (*_LOADERS, *read) if name in values), None)
        outside = dict(_assignments(self.tree, (ast.FunctionDef, ast.ClassDef)))
        beside = [body for body in _functions(self.tree).values() if stepping.keys() & dict(_assignments(body)).keys()]
        reached = loader in outside or any(loader in dict(_assignments(body)) for body in beside)
        batch = next((name for name in _BATCHES if name in values), None) if not loader else None
        example = f"next(iter({loader if reached or not loader else ast.unparse(values[loader])}))"
        return (
            models,
            optimizers,
            loss,
            batch or ((example if loss == "None" else f"tuple({example})") if loader else "(x, y)"),
        )


class _WithoutSelf(ast.NodeTransformer):
    """Takes attributes of ``self``, as trainers have them, for names."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return ast.copy_location(ast.Name(node.attr, node.ctx), node)
        return self.generic_visit(node)


def _makes_optimizer(called: str) -> bool:
    *before, name = called.split(".")
    return "lr_scheduler" not in before and ("optim" in before or name in vars(torch.optim))


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {statement.name: statement for statement in tree.body if isinstance(statement, ast.FunctionDef)}


def _needs_nothing(function: ast.FunctionDef) -> bool:
    args = function.args
    return len(args.posonlyargs + args.args) == len(args.defaults) and all(args.kw_defaults)


def _returned(function: ast.FunctionDef) -> Iterator[ast.expr | None]:
    yield from (node.value for node in ast.walk(function) if isinstance(node, ast.Return))


def _is_recipe(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Tuple) and len(value.elts) in (4, 5)


def _assignments(tree: ast.AST, others: tuple[type[ast.AST], ...] = ()) -> Iterator[tuple[str, ast.expr]]:
    """Names with the assigned expressions, anywhere in the script but in the others, outermost first; without what is
    assigned to its own name."""
    for node in own_nodes(tree, others) if others else ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if not (isinstance(node.value, ast.Name) and node.value.id == name):
                yield name, node.value


def _compared(assignments: Mapping[str, ast.expr], tree: ast.AST) -> dict[str, str]:
    """Names a backward begins at, with the function giving each its value where the function takes two values: an
    output's and a target's."""
    ends = {called(node).removesuffix(".backward") for node in ast.walk(tree) if called(node).endswith(".backward")}
    values = {name: assignments[name] for name in assignments if name in ends}
    return {name: called(call) for name, call in values.items() if isinstance(call, ast.Call) and len(call.args) == 2}


def _optimizers(tree: ast.Module) -> dict[str, ast.expr]:
    """Names of optimizers with the calls making them, of PyTorch or of a function of the script."""
    makers = _makers(tree)
    return {
        name: value for name, value in dict(_assignments(tree)).items()
        if _makes_optimizer(called(value)) or called(value) in makers
    }  # fmt: skip


def _makers(tree: ast.Module) -> set[str]:
    """The script's functions with a call of an optimizer as their result."""
    results = {name: _returned(function) for name, function in _functions(tree).items()}
    return {
        name for name, values in results.items() if any(_makes_optimizer(called(value)) for value in values if value)
    }


def _by_name(loop: TrainingLoop, batch: str) -> str:
    """A dict of a loop's batch, in Python."""
    received = batch.removeprefix("tuple(").removesuffix(")") if batch.startswith("tuple(") else batch
    if not loop.names:
        return "batch"
    return f"{{{loop.names[0]!r}: {received}}}" if loop.whole else f"dict(zip({loop.names!r}, {received}))"


def _owner(node: ast.AST) -> str:
    """The NAME of ``NAME.parameters()``."""
    name, _, method = called(node).rpartition(".")
    return name if method == "parameters" and name.isidentifier() else ""


def _unique(values: Any) -> list[Any]:
    by_id: dict[int, Any] = {id(value): value for value in values}
    return list(by_id.values())


def _trained(named: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.nn.Module]:
    """Modules with all parameters of the optimizers, without parts of other modules."""
    wanted = {id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]}
    modules = {
        name: value
        for name, value in named.items()
        if isinstance(value, torch.nn.Module) and wanted and wanted <= set(map(id, value.parameters()))
    }
    inner = {id(part) for module in modules.values() for part in module.modules() if part is not module}
    return {name: value for name, value in modules.items() if id(value) not in inner}


def _is_loss(name: str, value: Any) -> bool:
    """Return whether a value is a loss: a loss of torch, or of one of these names."""
    if isinstance(value, torch.nn.Module):
        return type(value).__module__ == "torch.nn.modules.loss" or name in _LOSSES
    return name in _LOSSES and callable(value) and not isinstance(value, torch.Tensor)


def script_factory(path: Path, imported: Callable[[Path], ModuleType]) -> tuple[Callable[[], Any], str]:
    """The factory of a script naming none, and how it is called in messages: the only such function, or a factory made
    of its names. Raises OptionError for a script with training on import, and for a script with neither."""
    script = Script.read(path)
    script.refuse_training()
    functions = script.factories()
    if len(functions) > 1:
        raise OptionError(
            f"{path} has {len(functions)} functions that may be its factory",
            *(f"write {path}:{name}" for name in functions),
        )
    module = imported(path)
    if functions:
        factory: Callable[[], Any] = getattr(module, functions[0])
        return factory, f"{path}:{functions[0]}"
    return lambda: script.recipe(module), str(path)
