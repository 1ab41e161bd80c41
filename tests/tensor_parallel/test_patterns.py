"""What a user says of parameters by name."""

from __future__ import annotations

import pytest
from helpers import source

from gopt.errors import OptionError
from gopt.records.placements import Shard
from gopt.tensor_parallel.choose import choose
from gopt.tensor_parallel.patterns import Pattern, apply
from gopt.tensor_parallel.sizes import Sizes


def applied(text: str, name: str = "gpt_adamw", members: int = 2, *, auto: bool = True):
    training = source(name).training
    found = choose(training, members, Sizes.BALANCED) if auto else {}
    return apply(training, members, Sizes.BALANCED, Pattern.parse(text), found)


@pytest.mark.parametrize(
    ("text", "parameter", "placement"),
    [
        ("*.up.weight:column", "blocks.0.up.weight", Shard(0, (32, 32))),
        ("*.up.weight:row", "blocks.0.up.weight", Shard(1, (8, 8))),
        ("*.down.weight:column", "blocks.1.down.weight", Shard(0, (8, 8))),
        ("*.up.bias:column", "blocks.0.up.bias", Shard(0, (32, 32))),
        ("wpe*:vocab", "wpe.weight", Shard(0, (4, 4))),
        ("wpe*:dim1", "wpe.weight", Shard(1, (8, 8))),
        ("*.qkv.weight:dim0/3", "blocks.0.qkv.weight", Shard(0, (8, 8), 3)),
        ("*.down.weight:expert", "blocks.0.down.weight", Shard(0, (8, 8))),
    ],
)
def test_a_word_names_a_dimension(text, parameter, placement):
    found = applied(text, auto=False)
    assert found[parameter].placement == placement
    assert found[parameter].why == f"asked for as {text.partition(':')[2]}"


def test_what_is_said_goes_before_what_is_found():
    found = applied("blocks.0.up.*:replicate;blocks.0.*:column")
    assert "blocks.0.up.weight" not in found and "blocks.0.up.bias" not in found  # the first that fits counts
    assert found["blocks.0.down.weight"].placement.dim == 0
    assert found["blocks.1.up.weight"].why == "column"


def test_what_is_found_knows_heads():
    assert applied("*.qkv.weight:column")["blocks.0.qkv.weight"].placement == Shard(0, (8, 8), 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blocks", "cannot read 'blocks'"),
        ("blocks.*:sideways", "cannot read"),
        ("block.9:column", "matches no parameter"),
        ("wte*:dim2", "does not fit 'wte.weight'"),
        ("wte*:dim0/7", "does not fit 'wte.weight'"),
        ("*ln1.weight:dim1", "does not fit"),
        ("wpe*:column", "no product reads it so"),
    ],
)
def test_what_cannot_be_is_refused(text, message):
    with pytest.raises(OptionError, match=message):
        applied(text)


def test_sizes_that_are_given():
    found = applied("blocks.0.up.weight:dim0=24+40;*.qkv.weight:dim0/3=6+10", auto=False)
    assert found["blocks.0.up.weight"].placement == Shard(0, (24, 40))
    assert found["blocks.1.qkv.weight"].placement == Shard(0, (6, 10), 3)
    for wrong in ("up*:dim0=24+41", "up*:dim0=64", "up*:dim0=20+20+24"):
        with pytest.raises(OptionError, match="2 parts make 64 together"):
            applied(f"blocks.0.{wrong}", auto=False)
