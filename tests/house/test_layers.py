"""Who may import whom: read from the sources, nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT

LAYERS = (
    {"gopt.errors", "gopt.limits"},
    {"gopt.collectives", "gopt.text"},
    {"gopt.options"},
    {"gopt.system"},
    {"gopt.documents"},
    {"gopt.records"},
    {"gopt.schedules"},
    {"gopt.operators"},
    {"gopt.ir"},
    {"gopt.analysis", "gopt.autodiff"},
    {"gopt.importers", "gopt.spmd"},
    {"gopt.tensor_parallel"},
    {"gopt.lower", "gopt.passes"},
    {"gopt.artifact"},
    {"gopt.parameter_server"},
    {"gopt.steps"},
    {"gopt.api"},
    {"gopt.offline"},
    {"gopt.runtime"},
    {"gopt.runtime.engines"},
    {"gopt.runtime.messages", "gopt.runtime.pytorch"},
    {"gopt.runtime.training"},
    {"gopt.runtime.parameter_server", "gopt.verification"},
    {"gopt.verification.replay"},
    {"gopt.frontends"},
    {"gopt.verbs", "gopt.torch"},
    {"gopt.cli"},
    {"gopt.__main__"},
)
"""Each may import those above it and its own."""
ONLY = {
    "rich": lambda module: module.startswith("gopt.cli.render"),
    "click": lambda module: module.startswith("gopt.cli."),
    "onnxruntime": lambda module: module == "gopt.runtime.session",
    "mpi4py": lambda module: module == "gopt.runtime.engines.mpi",
    "nccl": lambda module: module == "gopt.runtime.engines.nccl",
    "llvmlite": lambda module: module == "gopt.runtime.tuning.llvm_kernels",
    "jsonschema_rs": lambda module: module == "gopt.documents.schema",
    "onnx_ad": lambda module: module == "gopt.autodiff.differentiate",
    "torch": lambda module: module.startswith(("gopt.frontends.pytorch.", "gopt.runtime.pytorch.")),
    "onnxscript": lambda module: module == "gopt.frontends.pytorch.convert",
    "onnx_ir": lambda module: module == "gopt.frontends.pytorch.convert",
    "tensorboard": lambda module: module == "gopt.verbs.curves",
    "cuda": lambda module: module == "gopt.runtime.engines.cuda",
}
"""A package -> the modules that may import it."""


def sources() -> dict[str, str]:
    """Module -> its text."""
    found = {}
    for top, folder in (("gopt", ROOT / "gopt"), ("gopt.cli", ROOT / "cli")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([top, *parts]).removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return found


def imports(module: str, text: str, package: bool, modules: set[str]) -> Iterator[str]:
    """Every module that a text imports, type-checking imports left out."""
    for node in ast.walk(_without_typing(ast.parse(text))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".") if package else module.split(".")[:-1]
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            whole = [f"{base}.{name.name}" for name in node.names]
            yield from (name if name in modules else base for name in whole)


def _without_typing(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    return tree


def layer(module: str) -> int | None:
    """The number of a module's layer; None for the package itself, which loads its verbs lazily."""
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in (3, 2)]
    return next((number for name in names for number, layer in enumerate(LAYERS) if name in layer), None)


def room(module: str) -> str:
    """``gopt.passes.shard.plan`` -> ``shard``: what inside a folder of passes belongs together."""
    return module.split(".")[2] if module.count(".") >= 2 else ""


def faults(texts: dict[str, str], known: dict[str, str] | None = None) -> list[str]:
    """Imports of some modules that break a rule; ``known``: all modules there are."""
    known = known or texts
    packages = {module.rpartition(".")[0] for module in known} & set(known)
    found = []
    for module, text in texts.items():
        mine = layer(module)
        for name in imports(module, text, module in packages, set(known)):
            allowed = ONLY.get(name.split(".")[0])
            if allowed is not None and not allowed(module):
                found.append(f"{module} imports {name}")
            theirs = layer(name) if name.split(".")[0] == "gopt" else None
            if mine is not None and theirs is not None and theirs > mine:
                found.append(f"{module} imports {name}, which is above it")
            both = module.startswith("gopt.passes.") and name.startswith("gopt.passes.")
            if both and room(module) != room(name) and room(name) != "base":
                found.append(f"pass {module} imports pass {name}")
    return found


@pytest.mark.rest
def test_layers():
    assert faults(sources()) == []


def test_the_checker_of_certificates_shares_nothing_with_the_prover():
    """Nor with the passes: the checker reads graphs, the manifest and the records of operators."""
    texts, reached = sources(), set[str]()
    packages = {module.rpartition(".")[0] for module in texts} & set(texts)
    mine = [module for module in texts if module.startswith("gopt.verification.certificate")]
    for module in mine:
        reached |= set(imports(module, texts[module], module in packages, set(texts)))
    assert sum(texts[module].count("\n") for module in mine) <= 1850, "a sceptic reads all of it"
    below = {name for name in reached if name.startswith("gopt.")} - set(mine)
    rooms = {".".join(name.split(".")[:2]) for name in below}
    assert rooms <= {
        "gopt.analysis", "gopt.artifact", "gopt.collectives", "gopt.errors", "gopt.ir", "gopt.operators",
        "gopt.records", "gopt.runtime", "gopt.text",
    }, sorted(below)  # fmt: skip
    assert {name for name in below if name.startswith("gopt.runtime")} == {
        "gopt.runtime.capacity", "gopt.runtime.inlined_functions", "gopt.runtime.step_runs",  # two only refuse
    }  # fmt: skip
    assert {name for name in below if name.startswith("gopt.analysis")} == {"gopt.analysis.training"}


def test_every_module_has_a_layer():
    assert [module for module in sources() if layer(module) is None] == ["gopt"]


def test_planted_imports_are_caught():
    texts = sources()
    plants = {
        "gopt.analysis.update_subgraphs": "from gopt.passes import shard",
        "gopt.ir.types": "def late():\n    import gopt.runtime.session",
        "gopt.passes.prune": "from gopt.passes.shard.plan import make_plan",
        "gopt.passes.hoist_casts": "from . import prune",
        "gopt.passes.pipeline": "import rich.table",
        "gopt.api": "from click import echo",
        "gopt.verification.verify": "import onnxruntime as ort",
        "gopt.runtime.executor": "from gopt.runtime.engines.base import CollectiveRunner",
        "gopt.runtime.engines.mpi": "from gopt.runtime.training.trace import Trace",
        "gopt.runtime.messages.mpi": "from mpi4py import MPI",
        "gopt.runtime.engines.threads": "from gopt.runtime.messages.message import Kind",
        "gopt.cli.shard": "from rich.console import Console",
        "gopt.records.mesh": "from ..artifact.ranks import writer",
    }
    for module, line in plants.items():
        assert len(faults({module: f"{texts[module]}\n{line}\n"}, known=texts)) == 1, line


def test_lines_are_where_a_reader_looks():
    """Nothing but the two packages holds Python that is installed."""
    assert {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()} == {"gopt", "cli"}
    assert not (Path(ROOT) / "setup.py").exists()
