"""Every command once, with arguments with which it comes to its end in a small folder.

The commands are those that click knows: one that this table lacks is an error (``missing``).
"""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import onnx
from gopt.cli.main import group, main
from recipes import Recipe, build
from recordings import FOLDERS

import gopt

STEP = Recipe(widths=(3, 4, 2), direction=("momentum",), frozen=0, lr_input=True)
_RUN = "run {} --data data.npz --set lr=0.01 --steps 1"
TABLE = {
    "export": "export model.py:make -o exported.onnx --force",
    "import": "import ort -o imported.onnx --force",
    "derive": "derive forward.onnx --loss mse --optimizer sgd -o derived.onnx --force",
    "shard": "shard step.onnx --ranks 2 -o out --force",
    "split": "split step.onnx --trainers 2 --servers 1 -o split --force",
    "prove": "prove in.ranks",
    "verify": "verify in.ranks --steps 1",
    "run": _RUN.format("in.ranks"),
    "plan": "plan step.onnx --ranks 2",
    "inspect": "inspect in.ranks",
    "explain": "explain in.ranks b0",
    "report": "report in.ranks --html page.html --force",
    "diff": "diff step.onnx other.onnx",
    "golden update": "golden update goldens",
    "golden check": "golden check goldens",
    "merge": "merge in.ranks -o merged.onnx --force",
    "load-state": "load-state step.onnx values.npz -o loaded.onnx --force",
    "seal": "seal in.ranks",
    "reshard": "reshard in.ranks --ranks 3 -o resharded --force",
    "reproduce": "reproduce failure.zip",
    "reduce": "reduce step.onnx -o reduced.onnx --force --tries 2 -- false {}",
    "passes": "passes",
    "demo": "demo sample --force",
    "init": "init made.py --force",
    "doctor": "doctor",
    "help": "help shard",
}
"""Name of a command -> its words."""
MORE = {
    "run-split": _RUN.format("in.split"),
    "run-async": _RUN.format("in.async"),
    "run-stages": _RUN.format("in.stages"),
    "run-keeps": _RUN.format("in.ranks") + " --checkpoint kept --resume",
    "inspect-model": "inspect step.onnx",
    "inspect-text": "inspect step.onnx --text",
    "explain-state": "explain in.ranks w0",
    "shard-dry": "shard step.onnx --ranks 2 --dry-run --print-after all",
    "usage": "shard step.onnx --ranks none",
    "refused": "shard step.onnx --mesh dp=2,ep=4",
}
"""Other ways to print."""
LAUNCHED = {
    "launch": _RUN.format("in.ranks") + " --launch 2",
    "launch-stages": _RUN.format("in.stages") + " --launch 2",
    "launch-split": _RUN.format("in.split") + " --launch 3",
    "verify-mpi": "verify in.ranks --steps 1 --engine mpi",
}
"""Commands that start processes."""


def leaves(found: click.Command = group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command that click knows, by its words."""
    if not isinstance(found, click.Group):
        yield " ".join(path), found
        return
    context = click.Context(found)
    for name in found.list_commands(context):
        inner = found.get_command(context, name)
        assert inner is not None
        yield from leaves(inner, (*path, name))


def missing() -> set[str]:
    """Commands that click knows and the table lacks, or the other way round."""
    return {name for name, _ in leaves()} ^ TABLE.keys()


def forms() -> Iterator[list[str]]:
    """Every command in every form of its output: as it is, --json, --text, --explain, --verbose and --help."""
    for name, command in leaves():
        words = TABLE[name].split()
        known = {option for param in command.params for option in param.opts}
        yield words
        for flag in sorted(known & {"--json", "--text"}):
            yield [*name.split(), flag, *words[len(name.split()) :]]
        yield [*name.split(), "--verbose", *words[len(name.split()) :]]
        yield [*name.split(), "--help"]
    yield from ([], ["--help"], ["--version"], ["help"])
    yield from (text.split() for text in MORE.values())


def one_form_each() -> list[list[str]]:
    """One of the forms of each command, which go round."""
    groups: dict[str, list[list[str]]] = {}
    for words in forms():
        groups.setdefault(" ".join(words[: 2 if words[:1] == ["golden"] else 1]), []).append(words)
    return [each[turn % len(each)] for turn, each in enumerate(groups.values())]


def _do(*command: str, code: int = 0) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        if (found := main(list(command))) != code:
            raise RuntimeError(f"{command}: {found}: {said.getvalue()}")


def prepare(home: Path, step: onnx.ModelProto | None = None) -> None:
    """Put what the commands read into an empty folder, which becomes the one to run in."""
    made = step or build(STEP)
    (home / "step.onnx").write_bytes(made.SerializeToString(deterministic=True))
    (home / "other.onnx").write_bytes(build(Recipe(widths=(3, 4, 2), direction=("adam",))).SerializeToString())
    with contextlib.chdir(home):
        states = {each.tensor for each in gopt.load("step.onnx").training.states}
        held = {each.name: onnx.numpy_helper.to_array(each) for each in made.graph.initializer if each.name in states}
        np.savez("values.npz", **{name: value * 2 for name, value in held.items()})
        generator = np.random.default_rng(0)
        x, y = generator.standard_normal((64, 3)), generator.standard_normal((64, 2))
        data = dict(zip((each.name for each in made.graph.input), (x.astype("f4"), y.astype("f4")), strict=False))
        np.savez("data.npz", **data)
        _do("shard", "step.onnx", "--ranks", "2", "-o", "in.ranks")
        _do("shard", "step.onnx", "--mesh", "pp=2", "--micro-batches", "2", "-o", "in.stages")
        _do("split", "step.onnx", "--trainers", "2", "--servers", "1", "-o", "in.split")
        _do("split", "step.onnx", "--trainers", "2", "--servers", "1", "--mode", "async", "-o", "in.async")
        _do("shard", "step.onnx", "--mesh", "dp=2,ep=4", "--reproducer", "failure.zip", code=4)
        shutil.copytree(FOLDERS / "mlp_sgd", "ort")
        Path("goldens").mkdir()
        shutil.copy("step.onnx", "goldens/step.onnx")
        Path("goldens/gopt-golden.toml").write_text('[case.a]\nmodel = "step.onnx"\noptions = ["--ranks", "2"]\n')
        _do("golden", "update", "goldens")
        Path("model.py").write_text(MODEL)
        onnx.save(_forward(), "forward.onnx")


def _forward() -> onnx.ModelProto:
    """One linear layer."""
    weight = onnx.numpy_helper.from_array(np.ones((3, 2), "f4"), "w")
    described = [onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", (4, 3)), ("out", (4, 2)))]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["out"])], "f", described[:1], described[1:], [weight]
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)


MODEL = """\
import torch

def make():
    module = torch.nn.Linear(3, 2)
    batch = (torch.zeros(4, 3), torch.zeros(4, 2))
    return module, torch.nn.functional.mse_loss, torch.optim.SGD(module.parameters(), lr=0.1), batch
"""
"""What ``export`` exports, where PyTorch is installed."""
