"""Where the tokens of a batch stand in a value."""

from __future__ import annotations

from helpers import source

from gopt.ir.types import TensorType
from gopt.sharding.placements import Shard
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
