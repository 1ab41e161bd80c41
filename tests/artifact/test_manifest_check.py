"""Ranks with the words of an earlier rank are read once, and as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import FIXTURES, edit_manifest

import gopt
from gopt import documents, limits
from gopt.artifact.manifest import MANIFEST_FILE, Manifest
from gopt.artifact.manifest_check import parse_manifest, read_manifest
from gopt.documents.records import from_document
from gopt.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sixteen ranks, of which two hold one content."""
    gopt.shard(FIXTURES / "mlp_adamw.onnx", "dp=8,shard=2").write(tmp_path / "ranks")
    return tmp_path / "ranks"


def whole(data: bytes) -> Manifest:
    """The manifest, every rank by itself."""
    return from_document(Manifest, documents.parse_json(data, documents.MANIFEST, "manifest"))


def test_replicas_share_records_and_are_read_as_by_themselves(folder: Path) -> None:
    manifest, _ = read_manifest(folder)
    assert manifest == whole((folder / MANIFEST_FILE).read_bytes())
    assert len({id(rank.state) for rank in manifest.ranks}) == 2


@pytest.mark.parametrize("rank", [0, 2, 15])
def test_a_rank_with_other_words_has_its_own(folder: Path, rank: int) -> None:
    lines = (folder / MANIFEST_FILE).read_bytes().splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if line.startswith(b'{"rank": %d,' % rank))
    lines[at] = lines[at].replace(b'.exp_avg", "start"', b'.exp_avg_sq", "start"', 1)
    data = b"".join(lines)
    manifest, _ = parse_manifest(data, "manifest")
    assert manifest == whole(data)
    assert manifest.ranks[rank].state != read_manifest(folder)[0].ranks[rank].state


def test_limits_are_on_what_is_said_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (folder / MANIFEST_FILE).read_bytes()
    monkeypatch.setattr(limits, "DOCUMENT_BYTES", len(data) * 2 // 3)
    assert len(read_manifest(folder)[0].ranks) == 16
    once = data.replace(b'"trainer", "files"', b'"trainer",  "files"')  # not as gopt writes it
    with pytest.raises(InputError, match="DOCUMENT_BYTES"):
        parse_manifest(once, "manifest")


@pytest.mark.parametrize("statistics", ["mean", "local", "points"])
@pytest.mark.parametrize("rule", ["mean", "root", "local", "sum", "max", "gather"])
def test_the_rule_of_a_statistic_is_that_of_its_points_and_records(statistics, rule, tmp_path):
    points = statistics == "points"
    path = FIXTURES / ("cases/roles/c08_scale_ema.onnx" if points else "cnn_sgd.onnx")
    gopt.shard(path, 2, statistics="auto" if points else statistics).write(folder := tmp_path / "ranks")
    before = read_manifest(folder)[0].reductions[0]
    assert bool(before.points) == points
    equal = rule == before.rule or {rule, before.rule} == {"mean", "root"}
    edit_manifest(folder, lambda manifest: manifest["reductions"][0].update(rule=rule))
    if equal:
        read_manifest(folder)
    else:
        with pytest.raises(InputError, match=r"reductions\[0\].rule"):
            read_manifest(folder)
