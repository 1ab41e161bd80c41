"""A run that is resumed sees the samples that the run would have seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import FIXTURES

import gopt
from gopt.artifact.checkpoint_index import open_index
from gopt.errors import OptionError


@pytest.fixture
def job(tmp_path: Path) -> dict[str, object]:
    random = np.random.default_rng(0)
    x, y = random.standard_normal((50, 32), dtype=np.float32), random.integers(0, 10, 50)
    np.savez(tmp_path / "d.npz", x=x, y=y)
    gopt.shard(FIXTURES / "mlp_sgd.onnx", 2).write(tmp_path / "r")
    return {"folder": tmp_path / "r", "data": tmp_path / "d.npz", "settings": {"lr": 0.1}}


@pytest.mark.parametrize("order", [{"shuffle": 3}, {"shuffle": 3, "last": "drop"}, {"last": "pad"}, {}])
def test_the_order_is_kept(order, job, tmp_path):
    whole = gopt.run(**job, steps=8, **order).losses
    first = gopt.run(**job, steps=5, **order, checkpoint=tmp_path / "c")
    index = open_index(first.path)
    assert (index.shuffle, index.last) == (order.get("shuffle"), order.get("last", "carry"))
    rest = gopt.run(**job, steps=8, checkpoint=tmp_path / "c", resume=True)
    assert first.losses + rest.losses == whole
    assert open_index(rest.path).shuffle == order.get("shuffle")


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ({"shuffle": 4}, "shuffle=4: the run that is continued has shuffle=3"),
        ({"last": "pad"}, 'last="pad": the run that is continued has last'),
    ],
)
def test_another_order_is_refused(order, said, job, tmp_path):
    gopt.run(**job, steps=2, shuffle=3, checkpoint=tmp_path / "c")
    with pytest.raises(OptionError, match=said) as caught:
        gopt.run(**job, steps=4, checkpoint=tmp_path / "c", resume=True, **order)
    assert "leave" in caught.value.hints[0]
    assert gopt.run(**job, steps=4, shuffle=3, last="carry", checkpoint=tmp_path / "c", resume=True).path.is_dir()
