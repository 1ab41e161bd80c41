"""The work of a training loop beside forward, backward and step: each with its line, and an option in its stead."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gopt.frontends.pytorch.manual_updates import ManualUpdate
from gopt.frontends.pytorch.options import ExportOptions
from gopt.frontends.pytorch.script_blocks import ScriptBlock, bound, used
from gopt.frontends.pytorch.training_loops import (
    LOOPS,
    assigned,
    called,
    functions_with,
    stepped,
    trains,
    trains_in,
    turns,
)
from gopt.text.sanitize import show

_CLIPS = {"clip_grad_norm_": ("--clip-norm", "max_norm"), "clip_grad_value_": ("--clip-value", "clip_value")}
"""Function of torch -> the option of gopt export, and the name of the function's bound."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True)
class LoopNote:
    """Work beyond a step without an option. ``option``: of gopt export; ''."""

    node: ast.AST
    text: str
    option: str = ""

    def __str__(self) -> str:
        return f"line {getattr(self.node, 'lineno', 0)} {self.text}"


def loop_notes(
    tree: ast.Module, blocks: Sequence[ScriptBlock], models: Collection[str], optimizers: Collection[str]
) -> list[LoopNote]:
    """The notes of a script, by line."""
    numbers = _numbers(tree, blocks)
    notes = [*_clips(tree, numbers), *_casts(tree), *_scalers(tree), *averages(tree)]
    for node, text in turns(tree, optimizers):
        count = numbers.get(text, text)
        work = (
            f"steps once in {count or 'several'} backwards, and ranks do so by gopt shard --accumulate {count or 'K'}"
        )
        notes.append(LoopNote(node, f"{work}, which takes their mean"))
    notes += _unequal(tree, optimizers)
    notes += _beside(tree, blocks, models, optimizers, notes)
    return sorted(notes, key=lambda note: getattr(note.node, "lineno", 0))


def lacking(notes: Collection[LoopNote], options: ExportOptions) -> list[str]:
    """The notes without a use of their option."""
    clips = options.clip_norm is not None or options.clip_value is not None
    chosen = {
        "--clip-norm": clips, "--clip-value": clips, "--autocast": options.autocast is not None,
        "--loss-scale": options.loss_scale is not None, "--ema": options.ema is not None,
    }  # fmt: skip
    return [str(note) for note in notes if not chosen.get(note.option)]


def _unequal(tree: ast.AST, optimizers: Collection[str]) -> Iterator[LoopNote]:
    """Branches and inner loops with the steps of some optimizers among several."""
    for node in ast.walk(tree) if len(optimizers) > 1 else ():
        inner = isinstance(node, LOOPS) and any(part is not node and node in ast.walk(part) for part in _training(tree))
        names = {name for part in ast.walk(node) for name in stepped(part)} & set(optimizers)
        if names and names != set(optimizers) and (inner or isinstance(node, ast.If)):
            shown = " and ".join(sorted(names))
            yield LoopNote(
                node, f"moves {shown} at other times than the other optimizers, and a step moves all at once"
            )


def _training(tree: ast.AST) -> list[ast.For | ast.While]:
    return [node for node in ast.walk(tree) if isinstance(node, LOOPS) and trains_in(node)]


def _argument(call: ast.Call, index: int, word: str) -> ast.expr | None:
    named = [keyword.value for keyword in call.keywords if keyword.arg == word]
    return next(iter([*call.args[index : index + 1], *named]), None)


def _numbers(tree: ast.AST, blocks: Sequence[ScriptBlock]) -> dict[str, str]:
    """Names with a single constant in a script: assigned, as a default, by a keyword of a call, or by an option."""
    pairs = [(name, value) for block in blocks for name, value in block.defaults.items()]
    pairs += [*assigned(tree), *_options(tree)]
    pairs += [(node.arg, node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg]
    values: dict[str, set[str]] = {}
    for name, value in pairs:
        values.setdefault(name, set()).add(ast.unparse(value))
    return {name: min(texts) for name, texts in values.items() if len(texts) == 1 and min(texts)[:1].isdigit()}


def _options(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The options of argparse with their defaults, as a script reads them."""
    read = [name for name, value in assigned(tree) if called(value).endswith(".parse_args")]
    for node in ast.walk(tree):
        if called(node).endswith(".add_argument") and isinstance(node, ast.Call) and node.args:
            words = {keyword.arg: keyword.value for keyword in node.keywords}
            option = ast.unparse(words.get("dest", node.args[-1])).strip("'\"-").replace("-", "_")
            yield from ((f"{name}.{option}", words["default"]) for name in read if "default" in words)


def _clips(tree: ast.AST, numbers: Mapping[str, str]) -> Iterator[LoopNote]:
    for node in ast.walk(tree):
        *before, name = called(node).split(".")
        option, word = _CLIPS.get(name, ("", ""))
        if name == "clamp_" and "grad" in before:
            option, word = "--clip-value", "max"
        if option and isinstance(node, ast.Call):
            bound = _argument(node, 1, word)
            shown = ast.unparse(bound) if bound is not None else "X"
            work = f"clips gradients, and a step does so by gopt export {option} {numbers.get(shown, shown)}"
            yield LoopNote(node, work, option)


def _casts(tree: ast.AST) -> Iterator[LoopNote]:
    """Autocasts of a loop or an import; an autocast in a function without a backward is a part of the forward."""
    training = functions_with({node.name: node for node in ast.walk(tree) if isinstance(node, _DEFINITIONS)})
    for node in _outside(tree, training):
        if is_autocast(node) and isinstance(node, ast.Call):
            dtype, device = _argument(node, 1, "dtype"), _argument(node, 0, "device_type")
            kind = ast.unparse(dtype) if dtype is not None else ast.unparse(device) if device is not None else ""
            wide = "bfloat16" in kind or (dtype is None and kind == "'cpu'")
            name = "bf16" if wide else "fp16" if dtype is None or kind.endswith(("float16", "half")) else "bf16 or fp16"
            text = f"runs the forward under autocast, and a step does so by gopt export --autocast {name}"
            yield LoopNote(node, text, "--autocast")


def is_autocast(node: ast.AST) -> bool:
    """Return whether a node makes an enabled autocast."""
    off = isinstance(node, ast.Call) and any(ast.unparse(word.value) == "False" for word in node.keywords)
    return called(node).rpartition(".")[2] == "autocast" and not off


def _outside(node: ast.AST, training: Collection[str]) -> Iterator[ast.AST]:
    """The nodes outside of functions without a training."""
    yield node
    for child in ast.iter_child_nodes(node):
        function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        if not function or getattr(child, "name", "") in training or getattr(child, "name", "") == "__init__":
            yield from _outside(child, training)


def _scalers(tree: ast.AST) -> Iterator[LoopNote]:
    for node in ast.walk(tree):
        if called(node).rpartition(".")[2] == "GradScaler":
            text = "scales the loss, and a step does so by gopt export --loss-scale dynamic"
            yield LoopNote(node, text, "--loss-scale")


def averages(tree: ast.AST) -> Iterator[LoopNote]:
    """In-place moving averages: of a value with itself, by two factors with a sum of 1. The averages of optimizers and
    modules are states of a step."""
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    inner = {
        id(node) for owner in classes
        if any(ast.unparse(base).endswith(("Module", "Optimizer")) for base in owner.bases) for node in ast.walk(owner)
    }  # fmt: skip
    lines = set[int]()
    for node in ast.walk(tree):
        if id(node) in inner or not isinstance(node, (ast.For, ast.Expr, ast.Assign)):
            continue
        decay, text = _decay(node), ast.unparse(node)
        spanned = set(range(node.lineno, (node.end_lineno or 0) + 1))
        if decay and ".grad" not in text and not spanned & lines and not any(map(trains, ast.walk(node))):
            lines |= spanned
            yield LoopNote(
                node,
                f"averages over steps, and a step keeps such averages of its parameters by gopt export --ema DECAY, "
                f"here {decay}; where the loss reads them, let the loss function write them",
                "--ema",
            )


def _decay(statement: ast.AST) -> str:
    """The factor of the old value in a moving average, or ''."""
    calls = {called(node).rpartition(".")[2]: node for node in ast.walk(statement) if isinstance(node, ast.Call)}
    if "AveragedModel" in calls:
        return "the factor of its multi_avg_fn"
    if "lerp_" in calls and len(calls["lerp_"].args) == 2:
        return _rest(calls["lerp_"].args[1])
    if "mul_" in calls and "add_" in calls and calls["mul_"].args:
        factor, weight = calls["mul_"].args[0], _argument(calls["add_"], 1, "alpha")
        share = weight if weight is not None else next(iter(_factors(calls["add_"].args[0])), None)
        return ast.unparse(factor) if share is not None and _rest(share) == ast.unparse(factor) else ""
    if isinstance(statement, ast.Assign):
        target, value = statement.targets[0], statement.value
    elif "copy_" in calls and isinstance(calls["copy_"].func, ast.Attribute) and calls["copy_"].args:
        target, value = calls["copy_"].func.value, calls["copy_"].args[0]
    else:
        return ""
    if isinstance(target, ast.Name) and isinstance(statement, ast.Assign):
        return ""  # of a number that is shown, or a mixture of samples
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return ""
    parts = [_factors(value.left), _factors(value.right)]
    for kept_part, added in (parts, parts[::-1]):
        decays = [part for part in kept_part if _plain(part) != _plain(target)]
        if len(decays) == 1 and len(kept_part) == 2 and any(_rest(share) == ast.unparse(decays[0]) for share in added):
            return ast.unparse(decays[0])
    return ""


def _factors(node: ast.expr) -> list[ast.expr]:
    product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
    return [node.left, node.right] if product else []  # type: ignore[attr-defined]


def _rest(share: ast.expr) -> str:
    """One less a factor, as text."""
    if isinstance(share, ast.BinOp) and isinstance(share.op, ast.Sub) and ast.unparse(share.left) in ("1", "1.0"):
        return ast.unparse(share.right)
    if isinstance(share, ast.Constant) and isinstance(share.value, float):
        return repr(round(1 - share.value, 12))
    return f"1 - {ast.unparse(share)}"


def _plain(node: ast.expr) -> str:
    return ast.unparse(node).removesuffix(".detach()").removesuffix(".data")


def _beside(
    tree: ast.Module,
    blocks: Sequence[ScriptBlock],
    models: Collection[str],
    optimizers: Collection[str],
    notes: Sequence[LoopNote],
) -> Iterator[LoopNote]:
    """Statements of a training loop with a use of a model, or of an alias, beyond forward and noted work."""
    noted = {id(note.node) for note in notes}
    functions = (node for node in ast.walk(tree) if isinstance(node, _DEFINITIONS))
    helpers = {node.name for node in functions if any(id(part) in noted for part in ast.walk(node))}
    changes = [statement for block in blocks for statement in block.changes(models)]
    names = {*models, *(name for part in changes if isinstance(part, ast.Assign) for name in bound(part))}
    names -= {name for part in changes for name in bound(part) if bound(part) & set(optimizers)}
    for loop in _training(tree):
        for statement in _leaves(loop.body):
            owners, parts = [name for name in used(statement) if name in names], list(ast.walk(statement))
            known_part = any(id(part) in noted or called(part).rpartition(".")[2] in helpers for part in parts)
            steps = any(trains(part) or stepped(part) for part in parts)
            empty = all(map(_zeroes, _leaves([statement], inside=True)))
            known_part |= not optimizers and ManualUpdate.of(ast.Module([statement], []), "") is not None
            if owners and not (known_part or steps or empty or _binds(statement)):
                shown = show(ast.unparse(statement).splitlines()[0])
                yield LoopNote(
                    statement, f"may change {owners[0]} or its gradients beside the step, which lacks it: {shown}"
                )


def _leaves(body: Sequence[ast.stmt], inside: bool = False) -> Iterator[ast.stmt]:
    """The statements in branches and contexts, and, if ``inside``, in loops."""
    kinds = (ast.If, ast.With, ast.Try, *(LOOPS if inside else ()))
    for statement in body:
        if isinstance(statement, kinds):
            yield from _leaves([*statement.body, *getattr(statement, "orelse", ())], inside)
        else:
            yield statement


def _binds(statement: ast.stmt) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = (part for target in targets for part in (getattr(target, "elts", None) or [target]))
    return bool(targets) and all(isinstance(name, ast.Name) for name in names)


def _zeroes(statement: ast.stmt) -> bool:
    """Return whether a statement only empties gradients."""
    if isinstance(statement, ast.Assign):
        return ast.unparse(statement.targets[0]).endswith(".grad") and ast.unparse(statement.value) == "None"
    function = called(statement.value) if isinstance(statement, ast.Expr) else ""
    return "grad" in function.split(".") and function.endswith((".zero_", ".detach_"))
