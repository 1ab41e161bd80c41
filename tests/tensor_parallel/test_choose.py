"""Which parameters are split, found by structure alone."""

from __future__ import annotations

import pytest
from helpers import source

from gopt.records.placements import Shard
from gopt.tensor_parallel.choose import choose, experts
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


def families(name: str, members: int) -> dict[str, str]:
    """Matrices and tables of a family -> why they are split, '' where they stay whole."""
    training = source(f"families/{name}").training
    found, types = choose(training, members, Sizes.BALANCED), training.graph.types
    names = [state.tensor for state in training.parameters if len(types[state.tensor].dims) > 1]
    return {each: found[each].why if each in found else "" for each in names}


LLAMA = {
    "q": "column", "k": "column", "v": "column", "o": "row", "gate": "column", "up": "column", "down": "row",
}  # fmt: skip


@pytest.mark.parametrize("members", [2, 3, 4])
def test_heads_of_queries_over_fewer_heads_of_keys(members):
    """Four over two. With more members than heads of keys, these stay whole: each member takes what its queries read,
    and never the residual stream in parts, whose norm is written as several operators."""
    whole = dict.fromkeys("kv", "") if members > 2 else {}
    blocks = {f"blocks.{b}.{name}.weight": why for b in range(2) for name, why in (LLAMA | whole).items()}
    found = families("llama_adamw_clip", members)
    assert found == {"table.weight": "vocab", "head.weight": "vocab", **blocks}
    choices = choose(source("families/llama_adamw_clip").training, members, Sizes.BALANCED)
    heads = {2: (16, 16), 3: (16, 8, 8), 4: (8, 8, 8, 8)}[members]
    assert choices["blocks.0.q.weight"].placement == Shard(0, heads)
    assert choices["blocks.0.o.weight"].placement == Shard(1, heads)


def test_fewer_heads_of_queries_than_members_stay_whole():
    notes: list[str] = []
    found = choose(source("families/llama_adamw_clip").training, 5, Sizes.BALANCED, notes.append)
    assert not {f"blocks.0.{name}.weight" for name in "qkvo"} & set(found)
    assert notes == ["a product over 4 heads of 8 stays whole: they are fewer than 5 members"] * 2


@pytest.mark.parametrize("members", [2, 3, 4])
def test_thirds_of_a_fused_weight_and_draws_of_dropout(members):
    found = families("vit_mom", members)
    assert [name for name, why in found.items() if not why] == ["first", "position", "patch.weight"]
    fused = choose(source("families/vit_mom").training, members, Sizes.BALANCED)["blocks.1.qkv.weight"]
    assert (fused.why, fused.placement.dim, fused.placement.runs) == ("column", 0, 3)


@pytest.mark.parametrize("members", [2, 3, 4])
def test_cross_attention_and_biases_by_head(members):
    found = families("t5_adamw", members)
    assert "" not in found.values()
    assert {found[f"{place}.bias.weight"] for place in ("encoder", "decoder")} == {"column"}
    choices = choose(source("families/t5_adamw").training, members, Sizes.BALANCED)
    assert choices["encoder.bias.weight"].placement.dim == 1
    assert sum(choices["decoder.cross.k.weight"].placement.sizes) == 24


@pytest.mark.parametrize("members", [2, 3, 4])
def test_experts_are_shared_out(members):
    """As long as there are enough; else, or beside an axis of their own, each of them is split as an MLP."""
    training = source("families/moe_adamw").training
    found = choose(training, members, Sizes.BALANCED)
    assert {found[f"experts.{name}"].why for name in ("up", "down")} == {"expert"}
    assert found["experts.up"].placement == found["experts.down"].placement == experts(
        training, members, Sizes.BALANCED
    )["experts.up"].placement  # fmt: skip
    assert found["experts.up"].placement.dim == 0 and "experts.router.weight" not in found
    for each in (choose(training, members, Sizes.BALANCED, apart=False), choose(training, 5, Sizes.BALANCED)):
        assert [(each[f"experts.{name}"].why, each[f"experts.{name}"].placement.dim) for name in ("up", "down")] == [
            ("column", 2), ("row", 1),
        ]  # fmt: skip


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
