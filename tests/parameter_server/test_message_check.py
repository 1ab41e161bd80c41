"""Messages of trainers with other elements than their keys have: each is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers import FIXTURES

import gopt
from gopt.artifact.server_entries import PullAt
from gopt.errors import InvariantError
from gopt.ir.graph import Node
from gopt.parameter_server import split as module
from gopt.parameter_server.options import SplitOptions
from gopt.spmd.program import SpmdProgram

Plant = Callable[[SpmdProgram], object]


def of(step: SpmdProgram, op_type: str) -> list[Node]:
    return [node for node in step.graph.nodes if node.op_type == op_type]


def exchange(names: list[str], one: int, other: int) -> list[str]:
    names = list(names)
    names[one], names[other] = names[other], names[one]
    return names


def alike(step: SpmdProgram, names: list[str]) -> tuple[int, int]:
    types = step.graph.types
    return next((a, b) for b in range(len(names)) for a in range(b) if types[names[a]] == types[names[b]])


def two_operands(step: SpmdProgram) -> None:
    push = next(node for node in of(step, "Push") if len(node.inputs) > 3)
    one, other = alike(step, push.inputs[2:])
    push.inputs = exchange(push.inputs, one + 2, other + 2)


def two_results(step: SpmdProgram) -> None:
    pull = next(node for node in of(step, "Pull") if len(node.outputs) > 1)
    pull.outputs = exchange(pull.outputs, *alike(step, pull.outputs))


def rows_of_another_piece(step: SpmdProgram) -> None:
    one, other = [node for node in of(step, "Slice") if node.outputs[0].startswith("gopt.ps.")][:2]
    one.inputs, other.inputs = [one.inputs[0], *other.inputs[1:]], [other.inputs[0], *one.inputs[1:]]


def pieces_in_another_order(step: SpmdProgram) -> None:
    joined = next(node for node in of(step, "Concat") if node.inputs[0].startswith("gopt.ps."))
    joined.inputs = joined.inputs[::-1]


def another_gradient(step: SpmdProgram) -> None:
    """A piece of one gradient is cut out of another of the same shape."""
    cut = [node for node in of(step, "Slice") if node.outputs[0].startswith("gopt.ps.")]
    types = step.graph.types
    one, other = next(
        (later, cut[k]) for place, later in enumerate(cut) for k in range(place)
        if cut[k].inputs[0] != later.inputs[0] and types[cut[k].inputs[0]] == types[later.inputs[0]]
    )  # fmt: skip
    one.inputs = [other.inputs[0], *one.inputs[1:]]


def planted(monkeypatch: pytest.MonkeyPatch, plant: Plant, model: str = "gpt_adamw", **given: object) -> None:
    write = module.trainer_program

    def program(*asked: object) -> SpmdProgram:
        made = write(*asked)  # type: ignore[arg-type]
        plant(made)
        return made

    monkeypatch.setattr(module, "trainer_program", program)
    options = {"trainers": 2, "servers": 2, "minimum": 16, "tables_off": True, **given}
    gopt.split(gopt.load(FIXTURES / f"{model}.onnx"), SplitOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plant", "what"),
    [
        (two_operands, "its key has elements"), (two_results, "its pieces are"),
        (rows_of_another_piece, "its key has elements"), (pieces_in_another_order, "its pieces are"),
        (another_gradient, "its key has elements"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("given", [{}, {"pull": PullAt.END}, {"accumulate": 2}, {"wire": "float16"}], ids=str)
def test_it_is_named(plant, what, given, monkeypatch):
    with pytest.raises(InvariantError) as caught:
        planted(monkeypatch, plant, **given)
    assert what in caught.value.hints[0], caught.value


@pytest.mark.parametrize("given", [{}, {"pull": PullAt.END}, {"accumulate": 2}, {"wire": "float16"}], ids=str)
@pytest.mark.parametrize("model", ["gpt_adamw", "mlp_muon", "mlp_lamb", "mlp_adamw_fp16_scaler", "cnn_mom_fp16"])
def test_what_is_written_passes(model, given, monkeypatch):
    planted(monkeypatch, lambda step: None, model, **given)
