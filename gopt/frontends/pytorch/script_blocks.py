"""Blocks of a script in Python's grammar: statements in the making of names, and in their change before training."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gopt.frontends.pytorch.training_loops import LOOPS, called, functions_with, own_nodes, trains, trains_in

GUARD = 'if __name__ == "__main__":'
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom)
_READING = frozenset({"print", "sum", "len", "train", "eval", "zero_grad", "save"})
"""Calls without an effect on the values of a module: of Python, of torch, and methods of a module."""


@dataclass(frozen=True, slots=True)
class ScriptBlock:
    """Statements run in turn, without definitions, up to the first with a training in it. ``title``: as a message calls
    the block; '' for a script's import. ``outermost``: an import, a script's start or a function of no class.
    ``function``: the block is its body. ``trained``: a training follows."""

    title: str
    statements: Sequence[ast.stmt]
    trained: bool = False
    outermost: bool = True
    function: ast.FunctionDef | ast.AsyncFunctionDef | None = None

    @property
    def bound(self) -> set[str]:
        return {name for statement in self.statements for name in bound(statement)}

    @property
    def defaults(self) -> dict[str, ast.expr]:
        """Arguments of the function with a default."""
        if self.function is None:
            return {}
        spec = self.function.args
        named = [argument.arg for argument in (*spec.posonlyargs, *spec.args)]
        words = [(word.arg, value) for word, value in zip(spec.kwonlyargs, spec.kw_defaults) if value is not None]
        return dict([*zip(reversed(named), reversed(spec.defaults)), *words])

    def received(self, names: Collection[str], tree: ast.AST) -> set[str]:
        """The names, and arguments with the value of a name in a call of the script."""
        if self.function is None:
            return set(names)
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and called(node) == self.function.name)
        pairs = (pair for call in calls for pair in zip(self.function.args.args, call.args))
        return {*names, *(argument.arg for argument, value in pairs if getattr(value, "id", "") in names)}

    def changes(self, names: Collection[str]) -> list[ast.stmt]:
        """Statements with a use of the names, or of an alias."""
        tracked, changing = set(names), list[ast.stmt]()
        for statement in self.statements:
            if tracked & set(used(statement)):
                changing.append(statement)
                tracked |= bound(statement)
        return changing

    def making(self, names: Collection[str], tracked: Collection[str]) -> tuple[list[ast.stmt], set[str]]:
        """Statements to bind the names, to seed random numbers or with a tracked name, after the statements they need;
        and the unbound names in these statements."""
        needed, chain, changes = set(names), list[ast.stmt](), self.changes(tracked)
        for statement in reversed(self.statements):
            is_kept = bound(statement) & needed or _method_of(statement) in needed
            if is_kept or (tracked and (statement in changes or _seeds(statement))):
                chain.insert(0, statement)
                needed |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        return chain, needed - {name for statement in chain for name in bound(statement)} - set(vars(builtins))


def bound(statement: ast.AST) -> set[str]:
    """The names bound by a statement."""
    nodes = (node for node in own_nodes(statement) if isinstance(node, ast.Name))
    return {node.id for node in nodes if isinstance(node.ctx, ast.Store)}


def used(node: ast.AST) -> Iterator[str]:
    """The names in a statement, outside of reading calls."""
    if called(node).rpartition(".")[2] in _READING:
        return
    if isinstance(node, ast.Name):
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from used(child)


def is_guard(test: ast.expr) -> bool:
    """Return whether a test asks for the start of a script."""
    parts = [test.left, *test.comparators] if isinstance(test, ast.Compare) else []
    return any(isinstance(part, ast.Name) and part.id == "__name__" for part in parts)


def imported(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements run by an import: without functions and a script's start."""
    for statement in body:
        if isinstance(statement, ast.If) and is_guard(statement.test):
            yield from imported(statement.orelse)
        elif not isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            yield statement


def blocks(tree: ast.Module) -> list[ScriptBlock]:
    """The blocks of a script: its import, functions and methods, its start, and bodies of contexts and of loops around
    a training loop; outermost first."""
    nodes = list(ast.walk(tree))
    training = functions_with({node.name: node for node in nodes if isinstance(node, (*_FUNCTIONS, ast.ClassDef))})
    script = [_block("", imported(tree.body), training)]
    for node in nodes:
        if isinstance(node, _FUNCTIONS):
            title = f"{node.name}({ast.unparse(node.args)})"
            script.append(replace(_block(title, node.body, training), outermost=node in tree.body, function=node))
        elif isinstance(node, ast.If) and is_guard(node.test):
            script.append(_block(GUARD, node.body, training))
        elif isinstance(node, ast.With) or (isinstance(node, LOOPS) and not trains_in(node)):
            script.append(replace(_block(f"line {node.lineno}", node.body, training), outermost=False))
    return script


def _block(title: str, body: Iterable[ast.stmt], training: Collection[str]) -> ScriptBlock:
    statements, trained = list[ast.stmt](), False
    for statement in body:
        if any(trains(node, training) for node in own_nodes(statement)):
            trained = True
            break
        if not isinstance(statement, _DEFINITIONS) and not _assigns_itself(statement):
            statements.append(statement)
    return ScriptBlock(title, statements, trained)


def _assigns_itself(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and any(
        ast.unparse(target) == ast.unparse(statement.value) for target in statement.targets
    )


def statements_for(
    names: Iterable[str],
    built: Mapping[str, str],
    tracked: Collection[str],
    script: Sequence[ScriptBlock],
    reached: set[str],
) -> Iterator[ast.stmt]:
    """The statements of a script to make the names beyond the reached names, in an order for a run. ``built``: names
    with expressions, for names no statement binds; ``tracked``: names with their changes."""
    for name in names:
        if name in reached:
            continue
        reached.add(name)
        block = next((block for block in script if name in block.bound), None)
        if block is not None:
            making, needed = block.making([name], tracked)
            reached |= {bound_name for statement in making for bound_name in bound(statement)}
            defaults = {word: ast.unparse(value) for word, value in block.defaults.items() if word in needed}
            yield from statements_for(sorted(needed), {**built, **defaults}, tracked, script, reached)
            yield from making
        elif name in built:
            making = ast.parse(f"{name} = {built[name]}").body
            yield from statements_for(used(making[0]), built, tracked, script, reached)
            yield from making


def behind(
    script: Iterable[ScriptBlock], names: Collection[str], carried: Iterable[ast.stmt], tree: ast.AST
) -> Iterator[tuple[ast.stmt, str]]:
    """Statements for a change of the names in front of a training, beyond the carried statements; with the name."""
    texts = {ast.unparse(node) for statement in carried for node in ast.walk(statement) if isinstance(node, ast.stmt)}
    for block in script:
        runs = block.trained and (block.outermost or block.function)
        wanted = block.received(names, tree) if runs else set()
        changes = block.changes(wanted)
        for statement in block.statements if runs else ():
            owners = [name for name in used(statement) if name in wanted and statement in changes]
            owners += ["random numbers"] if _seeds(statement) else []
            if owners and not _makes_another(statement, wanted) and ast.unparse(statement) not in texts:
                yield statement, owners[0]


def _method_of(statement: ast.stmt) -> str:
    """The name a statement calls a method of, as to fill it in place."""
    owner = called(statement.value) if isinstance(statement, ast.Expr) and any(used(statement)) else ""
    return owner.partition(".")[0].partition("[")[0] if "." in owner else ""


def _seeds(statement: ast.stmt) -> bool:
    return any(called(node).endswith("manual_seed") for node in ast.walk(statement))


def _makes_another(statement: ast.stmt, names: Collection[str]) -> bool:
    """Return whether a statement only binds a new name, by no method of the names."""
    if not isinstance(statement, ast.Assign) or not all(isinstance(target, ast.Name) for target in statement.targets):
        return False
    owner = called(statement.value).rpartition(".")[0].partition(".")[0]
    return not bound(statement) & set(names) and owner not in names
