"""A law: what ``gopt prove`` calls proven after a random edit of rank files, ``gopt verify`` finds equal."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import calls, edit_file
from onnx import ModelProto, NodeProto, helper, numpy_helper
from products import part

import gopt
from corpus import plants
from corpus.plants import Recipe, in_order, scale
from gopt.ir.load import load
from gopt.ir.types import TensorType

RECIPES = (
    plants.COPIES, plants.SHARDS, plants.SHARDED, plants.GRID, plants.BUCKETS, plants.MICRO, plants.MICRO_SHARDS,
    plants.MICRO_SCATTERED, plants.CLIP, plants.CLIP_SHARDS, plants.CLIP_GRID, plants.SCALER, plants.TRUST,
    plants.STATISTICS, Recipe("mlp_muon", "shard=2"), Recipe("emb_adamw", "shard=2"), Recipe("mlp_adagrad", "shard=2"),
)  # fmt: skip
SERVED = (
    plants.SERVED, plants.SERVED_CLIP, plants.SERVED_MICRO,
    Recipe("cnn_sgd", "trainers=3,servers=2", {"minimum": 1}),
    Recipe("mlp_adamw_fp16_scaler", "trainers=2,servers=3"),
    Recipe("mlp_muon", "trainers=2,servers=2"),
    Recipe("sparse/dlrm_adam", "trainers=2,servers=2"),
    Recipe("gpt_adamw_clip_sched_fp16", "trainers=2,servers=1"),
)  # fmt: skip
SPLIT = (
    plants.SPLIT_MLP, plants.SPLIT_GRID, plants.SPLIT_CLIP, plants.SPLIT_GPT, plants.SEQUENCES, plants.SPLIT_EXPERTS,
    plants.EXPERT_SEQUENCES, plants.HEADS, Recipe("mlp_adamw", "tp=3"), Recipe("cnn_sgd", "tp=2"),
    Recipe("families/t5_adamw", "sp=2"), Recipe("real/mlp_adafactor", "tp=2"),
    Recipe("mlp_adamw_fp16_scaler", "shard=2,tp=2"), Recipe("optim/clip_global", "tp=2"),
    Recipe("real/bert_tiny", "tp=2"), Recipe("cases/losses/c18_aux", "ep=2"), Recipe("cases/losses/gan_out_d", "tp=3"),
    Recipe("cases/roles/centre_loss", "tp=3"), Recipe("gpt_adamw", "tp=2,cp=2"),
    Recipe("families/t5_adamw", "tp=2,sp=2"), Recipe("families/moe_adamw", "ep=2,cp=2"),
)  # fmt: skip
OTHER_REDUCTION = {b"mean": b"sum", b"sum": b"mean", b"max": b"min"}


def other_values(model: ModelProto, node: NodeProto, types: Mapping[str, TensorType]) -> Iterator[tuple[int, str]]:
    """The operands of a node, each with a value of its type that could stand there."""
    before = [*(each.name for each in (*model.graph.input, *model.graph.initializer))]
    for each in model.graph.node:
        if each == node:
            break
        before += each.output
    for place, name in enumerate(node.input):
        same = (other for other in dict.fromkeys(before) if name in types and types.get(other) == types[name])
        yield from ((place, other) for other in same if other != name)


def edit(model: ModelProto, types: Mapping[str, TensorType], draw: random.Random) -> str:
    """Do one thing that may be wrong; what was done, '' for nothing."""
    node = draw.choice(model.graph.node)
    kind = draw.choice(["operand", "operand", "scale", "reduction", "constant", "bypass"])
    result = types.get(node.output[0])
    if kind == "operand" and (others := [*other_values(model, node, types)]):
        place, node.input[place] = draw.choice(others)
    elif kind == "scale" and not node.domain and result is not None and result.dtype == "float32":
        scale(node.output[0], draw.choice([2.0, 0.5, -1.0]))(model)
    elif kind == "reduction":
        call = draw.choice(calls(model) or [node])
        for attribute in call.attribute:
            attribute.s = OTHER_REDUCTION.get(attribute.s, attribute.s)
    elif kind == "constant":
        scalars = [each for each in model.graph.initializer if not each.dims and not each.external_data]
        for constant in draw.sample(scalars, min(len(scalars), 1)):
            constant.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(constant) * 2, constant.name))
    elif kind == "bypass" and not node.domain and len(node.output) == 1:
        same = [name for name in node.input if name in types and types[name] == result]
        if same:
            node.CopyFrom(helper.make_node("Identity", [same[0]], list(node.output)))
    in_order(model)
    return kind


@pytest.mark.parametrize("seed", part(range(400), 16))
def test_what_is_proven_is_equal(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    recipe = draw.choice(RECIPES)
    recipe.write(tmp_path / "ranks")
    files = sorted((tmp_path / "ranks").glob("rank_*.onnx"))
    ending = draw.choice(sorted({path.name[len("rank_0000") :] for path in files}))
    check([path for path in files if path.name[len("rank_0000") :] == ending], draw, f"{recipe}: seed {seed}")


@pytest.mark.parametrize("seed", part(range(400), 12))
def test_what_is_proven_of_a_split_computation_is_equal(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    recipe = draw.choice(SPLIT)
    recipe.write(tmp_path / "ranks")
    files = sorted((tmp_path / "ranks").glob("rank_*.onnx"))
    check(files, draw, f"{recipe}: seed {seed}")


@pytest.mark.parametrize("seed", part(range(400), 16))
def test_what_is_proven_of_trainers_and_servers_is_equal(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    recipe = draw.choice(SERVED)
    recipe.write(tmp_path / "split")
    kind = draw.choice(["trainer", "server"])
    files = sorted((tmp_path / "split").glob(f"{kind}*.onnx"))
    check([draw.choice(files)] if kind == "trainer" else files, draw, f"{recipe}: seed {seed}")


def check(files: list[Path], draw: random.Random, name: str) -> None:
    """Edit a file, or all alike, and compare what is said of the folder."""
    types = load(files[0], own=True).types
    everywhere = draw.random() < 0.6
    numbers = draw.random()
    for path in files if everywhere else [draw.choice(files)]:
        edit_file(path, lambda model: edit(model, types, random.Random(numbers)))
    with suppress(gopt.GoptError):  # files that no longer fit are refused
        if gopt.prove(files[0].parent).proven:
            assert gopt.verify(files[0].parent, steps=2, confirm=False).equal, name
