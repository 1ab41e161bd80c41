"""Which parameters are split, found by structure alone."""

from __future__ import annotations

import pytest
from helpers import source

from gopt.sharding.placements import Shard
from gopt.tensor_parallel.choose import choose
from gopt.tensor_parallel.sizes import Sizes


def chosen(name: str, members: int = 2) -> dict[str, tuple[str, Shard]]:
    return {
        parameter: (choice.why, choice.placement)
        for parameter, choice in choose(source(name).training, members, Sizes.BALANCED).items()
    }


def test_attention_and_mlp_of_a_transformer():
    found = chosen("gpt_adamw")
    for block in range(2):
        root = f"blocks.{block}"
        assert found[f"{root}.qkv.weight"] == ("column", Shard(0, (8, 8), 3))  # heads of queries, keys and values
        assert found[f"{root}.qkv.bias"] == ("column", Shard(0, (8, 8), 3))
        assert found[f"{root}.proj.weight"] == ("row", Shard(1, (8, 8)))
        assert found[f"{root}.up.weight"] == ("column", Shard(0, (32, 32)))
        assert found[f"{root}.down.weight"] == ("row", Shard(1, (32, 32)))
        assert f"{root}.proj.bias" not in found  # added behind the sum
        assert f"{root}.ln1.weight" not in found
    assert found["wte.weight"] == ("vocab", Shard(0, (32, 32)))  # table and classes are one parameter
    assert "wpe.weight" not in found  # the step reads all its rows


def test_more_members_than_heads_leave_the_attention_whole():
    found = chosen("gpt_adamw", 4)
    assert "blocks.0.qkv.weight" not in found and "blocks.0.proj.weight" not in found
    assert found["blocks.0.up.weight"] == ("column", Shard(0, (16,) * 4))


@pytest.mark.parametrize("members", [2, 3, 5])
def test_a_pair_of_layers(members):
    found = chosen("mlp_adamw", members)
    assert found["fc1.weight"][0] == found["fc1.bias"][0] == "column"
    assert found["fc2.weight"][0] == "row"
    assert sum(found["fc1.weight"][1].sizes) == 64
    assert "fc2.bias" not in found


def test_names_do_not_decide(tmp_path):
    import onnx

    import gopt

    model = onnx.load("fixtures/gpt_adamw.onnx")
    names: dict[str, str] = {}

    def scramble(name: str) -> str:
        return names.setdefault(name, f"v{len(names)}") if name else ""

    for node in model.graph.node:
        node.input[:], node.output[:] = list(map(scramble, node.input)), list(map(scramble, node.output))
    for each in (*model.graph.input, *model.graph.output, *model.graph.initializer, *model.graph.value_info):
        each.name = scramble(each.name)
    path = tmp_path / "scrambled.onnx"
    onnx.save(model, path)
    found = choose(gopt.load(path).training, 2, Sizes.BALANCED)
    assert {name: each.placement for name, each in found.items()} == {
        names[name]: placement for name, (_, placement) in chosen("gpt_adamw").items()
    }
