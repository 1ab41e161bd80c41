"""How simple the sources are, in figures that may only fall. Run as a script, it prints them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[2]
EVERYDAY = frozenset({
    "alone", "asked", "both", "each", "first", "found", "given", "held", "here", "kept", "known", "left", "made",
    "other", "others", "own", "place", "places", "said", "same", "seen", "such", "taken", "there", "told",
})  # fmt: skip
RELATIVE = frozenset({
    "it", "its", "none", "one", "ones", "that", "their", "them", "these", "they", "those", "what", "which", "whom",
    "whose",
})  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """``tables``: literals with the names of several operators, outside of ``gopt/operators``; ``branches``:
    comparisons of an operator with a name; ``everyday`` and ``relative``: such words in ten thousand stored names and
    words of docstrings; ``owners``: names of public classes that stand in several modules; ``arrows``: packages that a
    package imports, summed up; ``circles``: pairs that import each other; ``schemas``: lines of JSON Schema
    that no record gives (tests/docs/test_document_schemas.py makes the rest again)."""

    lines: int
    tables: int
    branches: int
    everyday: int
    relative: int
    owners: int
    arrows: int
    circles: int
    schemas: int


@cache
def operators() -> frozenset[str]:
    """The names of the standard operators; those of control flow are words of Python, too."""
    import onnx

    schemas = onnx.defs.get_all_schemas()
    return frozenset(each.name for each in schemas if each.domain in ("", "ai.onnx.preview.training")) - {
        "If", "Loop", "Scan",
    }  # fmt: skip


def _texts(nodes: list[ast.expr | None]) -> list[str]:
    return [each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def _is_table(node: ast.AST) -> bool:
    literal = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    return isinstance(node, (ast.Dict, ast.Set, ast.List, ast.Tuple)) and (
        sum(text in operators() for text in _texts(list(literal))) > 1
    )


def _is_branch(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return any(text in operators() for text in _texts([node.left, *node.comparators]))
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "is_a"


def _stored(node: ast.AST) -> str:
    if isinstance(node, ast.arg):
        return node.arg
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""


def _words(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield from re.findall(r"[A-Za-z']+", (ast.get_docstring(node) or "").lower())


def _package(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "cli" if parts[0] == "cli" else parts[1] if len(parts) > 2 else path.stem


def _schemas() -> Iterator[str]:
    return (path.read_text() for path in (ROOT / "gopt/schemas").glob("*.json"))


@cache
def figures() -> Figures:
    """Measure gopt/ and cli/."""
    count: dict[str, int] = defaultdict(int)
    owners: dict[str, set[Path]] = defaultdict(set)
    imports: dict[str, set[str]] = defaultdict(set)
    for path in (path for folder in ("gopt", "cli") for path in (ROOT / folder).rglob("*.py")):
        text, package = path.read_text(), _package(path)
        count["lines"] += text.count("\n")
        inside = path.is_relative_to(ROOT / "gopt/operators")
        for node in ast.walk(ast.parse(text)):
            count["tables"] += not inside and _is_table(node)
            count["branches"] += not inside and _is_branch(node)
            name = _stored(node)
            if name not in ("", "self", "cls", "_"):
                count["names"] += 1
                count["everyday"] += name.strip("_") in EVERYDAY
            for word in _words(node):
                count["words"] += 1
                count["relative"] += word in RELATIVE
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].add(path)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gopt.") and package != "cli":
                imports[package] |= {node.module.split(".")[1]} - {package}  # type: ignore[union-attr]
    return Figures(
        lines=count["lines"],
        tables=count["tables"],
        branches=count["branches"],
        everyday=10_000 * count["everyday"] // count["names"],
        relative=10_000 * count["relative"] // count["words"],
        owners=sum(len(paths) > 1 for paths in owners.values()),
        arrows=sum(map(len, imports.values())),
        circles=sum(a in imports[b] and b in imports[a] for a, b in combinations(list(imports), 2)),
        schemas=sum(text.count("\n") for text in _schemas() if '"$comment": "python docs/schemas.py' not in text),
    )


if __name__ == "__main__":
    for name, value in asdict(figures()).items():
        print(f"{name:10} {value}")
