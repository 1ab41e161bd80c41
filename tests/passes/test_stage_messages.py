"""A value crosses a cut only where another stage cannot make it of what it has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import FIXTURES
from onnx import save
from onnx.numpy_helper import from_array
from onnx.parser import parse_model
from products import part

import gopt
from gopt.analysis.training import Phase
from gopt.ir.graph import Node
from gopt.passes.stage_transfers import place
from gopt.spmd.program import SpmdProgram
from gopt.spmd.stage_plan import transfers

STEPS = sorted(
    file
    for folder in ("", "families", "real", "optim")
    for file in (FIXTURES / folder).glob("*.onnx")
    if not file.name.startswith(("asgd", "muon", "mlp_adamw_accum"))  # refused, or too few parameters
)
CASES = [(file, stages) for file in STEPS for stages in (2, 3)]


@pytest.mark.parametrize(("step", "stages"), part(CASES, 16), ids=lambda item: getattr(item, "stem", str(item)))
def test_no_message_of_a_micro_batch_is_superfluous(step, stages):
    assert superfluous(gopt.shard(step, f"pp={stages}", accumulate=2, prove=False).program) == []


@pytest.mark.slow
@pytest.mark.parametrize(("step", "stages"), CASES, ids=lambda item: getattr(item, "stem", str(item)))
def test_no_message_of_any_step_is_superfluous(step: Path, stages: int):
    test_no_message_of_a_micro_batch_is_superfluous(step, stages)


@pytest.mark.parametrize(("fixture", "messages"), [("gpt_adamw", 2), ("mlp_adamw", 2), ("families/vit_mom", 2)])
def test_the_gradient_of_a_bias_costs_no_message(fixture, messages):
    """An activation goes on, and its gradient comes back: the loss is sent to all stages beside these."""
    program = gopt.shard(FIXTURES / f"{fixture}.onnx", "pp=2", accumulate=2, prove=False).program
    assert len(sent(program)) == messages


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_parameter_of_every_layer_is_no_message_of_a_micro_batch(stages, tmp_path):
    """Each stage reads a copy and sums its terms of the gradient; the update sends one sum from each, and the value."""
    step = shared_layers([0] * 8, tmp_path)
    result = gopt.shard(step, f"pp={stages}", accumulate=4, schedule="1f1b")
    assert superfluous(result.program) == []
    assert len(sent(result.program)) == 2 * (stages - 1), "activations go on, and their gradients come back"
    late = [node for node in result.program.graph.nodes if transfers(node) and node.phase is Phase.UPDATE]
    whole = [node for node in late if result.program.graph.type_of(node.inputs[0]).dims == (16, 16)]
    assert len(whole) == 2 * (stages - 1), "a sum from each other stage, the new value to each"
    result.write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks", steps=2, confirm=False).equal


WAYS = [
    ("pp=2", "interleaved:2"), ("pp=2", "interleaved:3"), ("pp=3", "interleaved:2"), ("pp=3", "zb-v"),
    ("pp=4", "zb-h1"), ("pp=2,tp=2", "interleaved:2"), ("pp=2,dp=2", "zb-v"), ("pp=2,shard=2", "1f1b"),
]  # fmt: skip


@pytest.mark.parametrize("seed", part(range(4), 2))
def test_parameters_of_several_layers_are_trained_as_in_the_source(seed, tmp_path):
    """Layers read any of three matrices; several stages of an interleaved schedule are on one member."""
    draw = np.random.default_rng(seed)
    step = shared_layers(draw.integers(0, 3, 7).tolist(), tmp_path)
    for mesh, schedule in [WAYS[at] for at in draw.permutation(len(WAYS))[:3]]:
        stage = int(draw.integers(1, 4)) if "shard" in mesh else 0
        result = gopt.shard(step, mesh, stage=stage, accumulate=4, schedule=schedule)
        result.write(tmp_path / "ranks", force=True)
        assert gopt.verify(tmp_path / "ranks", steps=2, confirm=False).equal, (mesh, schedule, stage)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_parameters_of_several_layers_in_many_ways(seed, tmp_path):
    test_parameters_of_several_layers_are_trained_as_in_the_source(seed, tmp_path)


def shared_layers(pattern: list[int], folder: Path) -> Path:
    """A step of AdamW. Each layer reads a matrix of its own, and the one that the pattern says."""
    draw = np.random.default_rng(0).standard_normal
    names = [*(f"w{number}" for number in sorted({*pattern})), *(f"u{number}" for number in range(len(pattern)))]
    weights = [from_array(0.3 * draw((16, 16)).astype(np.float32), name) for name in names]
    lines, value = "", "x"
    for number, which in enumerate(pattern):
        lines += f"a{number} = MatMul({value}, w{which})\nb{number} = Tanh(a{number})\n"
        lines += f"c{number} = MatMul(b{number}, u{number})\nd{number} = Tanh(c{number})\n"
        value = f"d{number}"
    model = parse_model(f"""<ir_version: 9, opset_import: ["" : 17]>
    g (float[8,16] x, float[8,16] t) => (float loss) {{
        {lines}
        e = Sub({value}, t)
        s = Mul(e, e)
        loss = ReduceMean<keepdims = 0>(s)
    }}""")
    model.graph.initializer.extend(weights)
    save(model, folder / "forward.onnx")
    gopt.derive(folder / "forward.onnx", folder / "step.onnx", gopt.DeriveOptions(loss="loss", optimizer="adamw"))
    return folder / "step.onnx"


def test_the_law_finds_a_message_too_many(monkeypatch):
    monkeypatch.setattr("gopt.passes.stage_transfers.follow", lambda placement: None)
    program = gopt.shard(FIXTURES / "mlp_adamw.onnx", "pp=2", accumulate=2, prove=False).program
    assert superfluous(program) == ["sum_5"]


def sent(program: SpmdProgram) -> list[Node]:
    """The messages of a micro-batch between two stages."""
    return [
        node for node in program.graph.nodes
        if transfers(node) and not transfers(node, to_all=True) and node.phase is not Phase.UPDATE
    ]  # fmt: skip


def superfluous(program: SpmdProgram) -> list[str]:
    """The values sent in a micro-batch that no other node of their stage reads, and that the other stage can make."""
    users, makers = program.graph.users(), program.graph.producers()
    homes = program.value_stages
    origins = {out: node.inputs[0] for node in sent(program) for out in node.outputs}

    def has(name: str, stage: int) -> bool:
        value = origins.get(name, name)
        return value not in homes or homes[value] == stage or f"{place.PREFIX}.{value}.stage{stage}" in makers

    def can_make(name: str, stage: int) -> bool:
        maker = makers.get(name)
        if maker is None or transfers(maker) or len(users[name]) > 1:
            return False
        return all(has(read, stage) or can_make(read, stage) for read in maker.reads)

    return [
        node.inputs[0] for node in sent(program)
        if can_make(node.inputs[0], int(node.attributes["stages"][1]))
    ]  # fmt: skip
