"""The expression of every rank value has the numbers that the ranks compute: no law of the proof may change them."""

from __future__ import annotations

import pytest
from option_gen.make import STREAM, Setting
from products import part
from rank_values import RankValues

import gopt
from gopt.errors import OptionError, UnsupportedError

FOUND = [
    # Some terms of a sum, in front of a factor that is made of the sum.
    Setting(f"{STREAM}65481", "sp=4", 2, 1, None, {}),
    # Rows that are looked up at some positions, and zeros at the others.
    Setting(f"{STREAM}13037", "tp=2", 2, 1, None, {}),
]


def drawn(seed: int) -> Setting:
    """A setting of one file a rank, in float32. RAdam's rectification loses the digits of stored constants."""
    setting = Setting.draw(seed)
    fits = setting.accumulate == 1 and "pp=" not in setting.mesh
    fits &= not any(word in setting.step.split(" ")[0] for word in ("16", "radam"))
    return setting if fits else drawn(seed + 1_000_003)


@pytest.mark.parametrize("setting", FOUND, ids=Setting.told)
def test_what_was_found_stays_right(setting, tmp_path):
    compare(setting, tmp_path)


@pytest.mark.parametrize("seed", part(range(240), 12))
def test_expressions_are_what_ranks_compute(seed, tmp_path):
    compare(drawn(seed), tmp_path)


def compare(setting: Setting, folder) -> None:
    try:
        made = gopt.shard(setting.file(folder), setting.mesh, prove=False, **setting.options)
    except (OptionError, UnsupportedError):
        pytest.skip("refused")
    made.write(folder / "ranks")
    ranks = RankValues(folder / "ranks")
    for rank, node, name in ranks.differences():
        pytest.fail(f"{setting.told()}: {name!r} of rank {rank}, by {node.op_type}")
    assert ranks.compared > 20
