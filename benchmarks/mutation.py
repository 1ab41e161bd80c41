"""The mutation score of the rules of operators: the share of planted errors that the tests notice.

``python benchmarks/mutation.py --count 60 --seed 1`` draws errors over the records of ``gopt/operators`` and the rules
of ``gopt/spmd``, evenly over their modules, runs the tests of each module against each error, and prints the score by
module and the errors that no test noticed. An error is put in place of the module as it is imported: no file changes.
``--module PATH`` takes the errors of one module, ``--list`` prints the errors and runs nothing.
"""

from __future__ import annotations

import argparse
import ast
import copy
import random
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[1]
RECORDS = ("tests/operators/test_operators.py", "tests/operators/test_kinds.py", "tests/spmd/test_rule_tables.py",
           "tests/analysis/test_linearity.py", "tests/ir/test_constant_folding.py")  # fmt: skip
DIMS = ("tests/spmd/test_links.py", "tests/spmd/test_halo.py")
VERIFIED = ("tests/spmd/test_verifier.py", "tests/spmd/test_placed_nodes.py")
RULES = {
    "rules": ("tests/spmd/test_rules.py", "tests/spmd/test_rule_tables.py", *VERIFIED),
    "conversions": ("tests/spmd/test_conversions.py", *VERIFIED),
    "calls": ("tests/spmd/test_calls.py", *VERIFIED),
    "layouts": ("tests/spmd/test_layouts.py", *VERIFIED),
    "halo": ("tests/spmd/test_halo.py", "tests/tensor_parallel/test_window_nodes.py"),
    "shardings": (*VERIFIED, "tests/spmd/test_conversions.py"),
    "verifier": VERIFIED,
    "links/windows": DIMS,
}
"""Module of ``gopt/spmd`` that holds rules -> its tests, the quickest to fail first."""
_TORCH = ("gopt/operators/executed.py", "gopt/operators/torch_call.py")
"""Records of PyTorch's calls alone."""
CPU_SECONDS = 150
"""The processor seconds that a run of tests may take: an error may make a loop endless."""
MEMORY = 6 << 30
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One error: the ``number``-th of the module at ``path``, relative to the repository."""

    path: str
    number: int
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """Every error that one node of a syntax tree may become."""
    twin = copy.deepcopy(node)
    if isinstance(twin, ast.Compare) and len(twin.ops) == 1 and type(twin.ops[0]) in _SWAPPED:
        twin.ops = [_SWAPPED[type(twin.ops[0])]()]  # type: ignore[list-item]
        yield twin
    elif isinstance(twin, (ast.BinOp, ast.BoolOp)) and type(twin.op) in _SWAPPED:
        twin.op = _SWAPPED[type(twin.op)]()  # type: ignore[assignment]
        yield twin
    elif isinstance(twin, ast.UnaryOp) and isinstance(twin.op, ast.Not):
        yield twin.operand
    elif isinstance(twin, ast.Constant) and isinstance(twin.value, bool):
        yield ast.Constant(not twin.value)
    elif isinstance(twin, ast.Constant) and isinstance(twin.value, int):
        yield ast.Constant(twin.value + 1)
    elif isinstance(twin, (ast.If, ast.IfExp)):
        twin.test = ast.Constant(False)
        yield twin
    elif isinstance(twin, ast.Call):
        for index in (at for at, keyword in enumerate(twin.keywords) if keyword.arg != "torch"):
            less = copy.deepcopy(twin)
            del less.keywords[index]
            yield less


def _is_code(node: ast.AST) -> bool:
    """Return whether errors are planted in a node: not in annotations, messages, imports and calls of PyTorch, whose
    tests need PyTorch."""
    if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.arg, ast.JoinedStr)):
        return False
    if isinstance(node, ast.keyword) and node.arg == "torch":
        return False
    if isinstance(node, ast.FunctionDef) and any(argument.arg == "torch" for argument in node.args.args):
        return False
    return not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dataclass")


def _places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """The nodes below a node in order, each with its parent, and the field and index at which it stands."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and _is_code(child):
                yield node, name, index, child
                yield from _places(child)


def mutants(path: str) -> list[Mutant]:
    """Every error of a module."""
    pairs = ((child, twin) for *_, child in _places(_tree(path)) for twin in changed(child))
    return [Mutant(path, number, child.lineno, *_short(child, twin)) for number, (child, twin) in enumerate(pairs)]  # type: ignore[attr-defined]


def _tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def _short(node: ast.AST, twin: ast.AST) -> tuple[str, str]:
    """What an error changes, as code: of a branch the condition alone, of a call the lost keyword."""
    if isinstance(node, ast.If) and isinstance(twin, ast.If):
        node, twin = node.test, twin.test
    elif isinstance(node, ast.Call) and isinstance(twin, ast.Call):
        names = [keyword.arg for keyword in twin.keywords]
        lost = next(keyword for keyword in node.keywords if keyword.arg not in names)
        head = ast.unparse(node.args[0]) if node.args else ""
        return f"{ast.unparse(node.func)}({head[:40]}, ..., {ast.unparse(lost)[:60]})", f"without {lost.arg}"
    before, after = (text if len(text := ast.unparse(each)) < 90 else text[:86] + " ..." for each in (node, twin))
    return before, after


def code(path: str, number: int) -> CodeType:
    """A module with its ``number``-th error, compiled."""
    tree = _tree(path)
    pairs = ((place, twin) for place in _places(tree) for twin in changed(place[-1]))
    (parent, name, index, child), twin = next(pair for at, pair in enumerate(pairs) if at == number)
    ast.copy_location(twin, child)
    if index is None:
        setattr(parent, name, twin)
    else:
        getattr(parent, name)[index] = twin
    return compile(ast.fix_missing_locations(tree), str(ROOT / path), "exec")


class Planted(SourceFileLoader):
    """Imports one module with an error, where every other module is imported as ever."""

    def __init__(self, path: str, number: int) -> None:
        super().__init__(path.removesuffix(".py").replace("/", "."), str(ROOT / path))
        self._code = code(path, number)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return spec_from_file_location(self.name, self.path, loader=self) if fullname == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        return self._code


def tests_of(path: str) -> tuple[str, ...]:
    """The tests of a module, the quickest to fail first."""
    if path.startswith("gopt/spmd"):
        return RULES[path.removeprefix("gopt/spmd/").removesuffix(".py")]
    return DIMS if "/dims/" in path else RECORDS


def noticed(path: str, number: int) -> bool:
    """Return whether a test of a module fails, or ends no more, because of an error; number -1 plants none."""
    command = [sys.executable, __file__, "--plant", str(number), "--module", path]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode != 0


def _plant(path: str, number: int) -> int:
    """Run the tests of a module that has an error, in this process; the exit code of pytest."""
    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    if number >= 0:
        sys.meta_path.insert(0, Planted(path, number))
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    return next((int(code) for test in tests_of(path) if (code := pytest.main([*options, test]))), 0)


def modules() -> list[str]:
    """The modules that hold the rules; those of PyTorch apart."""
    folders = (ROOT / "gopt/operators", ROOT / "gopt/operators/dims")
    records = [str(path.relative_to(ROOT)) for folder in folders for path in sorted(folder.glob("*.py"))]
    rules = [f"gopt/spmd/{name}.py" for name in RULES]
    return [path for path in (*records, *rules) if mutants(path) and path not in _TORCH]


def drawn(paths: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """``count`` errors, drawn evenly over modules."""
    generator = random.Random(seed)
    left = {path: generator.sample(every, len(every)) for path in paths if (every := mutants(path))}
    chosen: list[Mutant] = []
    while left and len(chosen) < count:
        for path in [*left][: count - len(chosen)]:
            chosen.append(left[path].pop())
            if not left[path]:
                del left[path]
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--module", metavar="PATH")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--plant", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plant is not None:
        return _plant(args.module, args.plant)
    paths = [args.module] if args.module else modules()
    for path in {tests_of(path): path for path in paths}.values():
        if not args.list and noticed(path, -1):
            raise SystemExit(f"{' '.join(tests_of(path))} fail without an error")
    score: dict[str, list[bool]] = {}
    for mutant in drawn(paths, args.count, args.seed):
        if args.list:
            print(mutant)
            continue
        killed = noticed(mutant.path, mutant.number)
        score.setdefault(mutant.path, []).append(killed)
        print(f"{'killed  ' if killed else 'SURVIVED'} {mutant}", flush=True)
    score["together"] = [killed for results in score.values() for killed in results]
    for name, results in score.items():
        print(f"| {name} | {sum(results)} | {len(results) - sum(results)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
