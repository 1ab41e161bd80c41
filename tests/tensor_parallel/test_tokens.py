"""Where the tokens of a batch stand in a value."""

from __future__ import annotations

import pytest
from helpers import source

from gopt.ir.types import TensorType
from gopt.records.placements import Partial, Shard
from gopt.tensor_parallel.forward import Forward
from gopt.tensor_parallel.sizes import Sizes
from gopt.tensor_parallel.tokens import Tokens


def test_tokens_of_a_batch():
    found = Tokens.of(source("gpt_adamw").training, 3, Sizes.BALANCED)
    assert found == Tokens(4, 8, (3, 3, 2))
    assert Tokens.of(source("gpt_adamw").training, 9, Sizes.BALANCED) is None


def test_a_value_has_them_in_a_dimension_or_in_its_rows():
    tokens = Tokens(4, 8, (5, 3))
    assert tokens.shard(TensorType("float32", (4, 8, 16))) == Shard(1, (5, 3))
    assert tokens.shard(TensorType("float32", (32, 16))) == Shard(0, (5, 3), 4)
    assert tokens.shard(TensorType("float32", (16, 16))) is None
    assert tokens.shard(TensorType("float32", (32,))) is None
    assert tokens.shard(TensorType("float32", (32, 1))) is None  # not worth two calls
    assert tokens.shard(TensorType("float32", None)) is None


@pytest.mark.parametrize(
    ("name", "streams"),
    [("t5_adamw", [(3, 7), (3, 6)]), ("vit_mom", [(3, 17)]), ("llama_adamw_clip", [(3, 8)]), ("moe_adamw", [(2, 16)])],
)
def test_every_stream_of_a_step_has_its_tokens(name, streams):
    """Those of a decoder beside an encoder's; of an image the patches, of which no input of the batch speaks."""
    found = Tokens.streams(Forward(source(f"families/{name}").training), 3, Sizes.BALANCED)
    assert found is not None
    assert [(each.samples, each.length) for each in (found, *found.more)] == streams
    for samples, length in streams:
        shard = found.shard(TensorType("float32", (samples, length, 5)))
        assert shard is not None and (shard.dim, sum(shard.sizes)) == (1, length)


def test_streams_with_too_few_tokens_stay_whole():
    forward = Forward(source("families/t5_adamw").training)
    found = Tokens.streams(forward, 7, Sizes.BALANCED)
    assert found is not None and found.length == 7 and not found.more
    assert Tokens.streams(forward, 8, Sizes.BALANCED) is None


def test_samples_in_place_of_tokens():
    tokens = Tokens(4, 8, (2, 2), dim=0, fed=True)
    assert tokens.batch(TensorType("int64", (4, 8))) == Shard(0, (2, 2))
    assert tokens.shard(TensorType("float32", (4, 8, 16))) == Shard(0, (2, 2))
    assert tokens.shard(TensorType("float32", (32, 16))) == Shard(0, (16, 16))
    assert tokens.batch(TensorType("int64", (8, 8))) is None


def test_terms_may_be_scattered_over_any_dimension_of_that_length_where_the_batch_is_fed_so():
    type = TensorType("float32", (3, 4, 2, 8, 5))
    assert Tokens(4, 8, (5, 3), fed=True).shards(type, Partial("sum"), ()) == [Shard(3, (5, 3))]
    assert Tokens(4, 8, (5, 3)).shards(type, Partial("sum"), ()) == []
    assert Tokens(4, 8, (5, 3), fed=True).shards(type, Partial("max"), ()) == []
    assert Tokens(4, 8, (5, 3), fed=True).shards(type, Shard(0, (2, 1)), ()) == []


def test_heads_inside_the_parts_of_other_axes():
    tokens = Tokens(4, 8, (4, 4), fed=True, heads=True)
    by_tokens = Shard(2, (4, 4))
    assert tokens.shards(TensorType("float32", (4, 6, 8, 16)), by_tokens, ()) == [Shard(1, (3, 3))]
    inside = tokens.shards(TensorType("float32", (4, 12, 8, 16)), by_tokens, (Shard(1, (4, 4, 4)),))
    assert inside == [Shard(1, (2, 2), runs=3)]
    assert tokens.shards(TensorType("float32", (24, 8, 16)), by_tokens, ()) == [Shard(0, (3, 3), runs=4)]
    assert tokens.shards(TensorType("float32", (4, 3, 8, 16)), by_tokens, ()) == [], "three heads for two members"
