"""Steps written as text, in ways that no generator draws: ranks on batches of their own, or a refusal that helps."""

from __future__ import annotations

import pytest
from gopt.cli.main import main
from products import fewer, spread
from wild_gen.ways import WAYS
from written_steps import hold_ranks, saved

RIGHT = [name for name, way in WAYS.items() if way.settled or not way.words]
REFUSED = [name for name, way in WAYS.items() if way.words]


@pytest.mark.parametrize(("name", "ranks", "stage"), fewer(spread(RIGHT, (2, 3), (0, 1, 2, 3)), 18))
def test_a_way(name, ranks, stage, tmp_path):
    hold_ranks(WAYS[name].step, tmp_path, ranks, stage, *WAYS[name].settled)


@pytest.mark.parametrize("name", REFUSED)
def test_a_way_that_is_refused(name, tmp_path, capsys):
    path = saved(WAYS[name].step.model(), tmp_path)
    assert main(["shard", str(path), "--ranks", "2", "-o", str(tmp_path / "out")]) == 4
    said = capsys.readouterr().err
    assert said.startswith("gopt: error: ") and all(word in said for word in WAYS[name].words), said
    assert not (tmp_path / "out").exists()
