"""``--statistics sync``: the ranks' step is that of one large batch, running statistics and all."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest
from coupled_steps import Coupled, build
from helpers import ROOT
from large_batch import worst_difference
from products import part, spread

import gopt
from gopt.errors import OptionError, UnsupportedError
from gopt.verification.verify import Verifier

pytestmark = pytest.mark.usefixtures("unchecked")

KINDS = {
    "fused": Coupled(),
    "straight": Coupled(fused=False),
    "by sums": Coupled(sums=True),
    "two, momentum": Coupled(layers=2, momentum=True),
    "straight, two": Coupled(fused=False, layers=2),
    "halves": Coupled(half=True, momentum=True),
    "weighted": Coupled(loss="weighted", momentum=True),
    "weighted, no norm": Coupled(loss="weighted", normal=False),
    "root": Coupled(loss="root"),
    "root, no norm": Coupled(loss="root", normal=False),
    "balanced": Coupled(loss="balanced", fused=False),
}


def made(kind: Coupled):
    return lambda batch: build(kind, batch)


@pytest.mark.parametrize(("kind", "way"), spread(KINDS, [("shard=3", 2), ("dp=2,shard=2", 3), ("dp=2", 0)]))
def test_it_is_the_step_of_one_large_batch(kind, way, tmp_path):
    mesh, stage = way
    worst = worst_difference(made(KINDS[kind]), 4, mesh, tmp_path, stage=stage, statistics="sync")
    assert worst < (3e-2 if KINDS[kind].half else 3e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_without_it_it_is_not(kind, tmp_path):
    assert worst_difference(made(KINDS[kind]), 4, "shard=3", tmp_path) > 1e-2


@pytest.mark.parametrize("kind", part(("weighted", "two, momentum", "balanced"), 1))
def test_verify_takes_the_same_values_together(kind, tmp_path):
    (tmp_path / "step.onnx").write_bytes(build(KINDS[kind], 4).SerializeToString())
    sharded = gopt.shard(gopt.load(tmp_path / "step.onnx"), 3, statistics="sync")
    sharded.write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2, confirm=False).equal
    manifest, report = (json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("manifest", "report"))
    for name, record in (("manifest", manifest), ("report", report)):
        jsonschema.validate(record, json.loads((ROOT / f"gopt/schemas/{name}.schema.json").read_text()))
    assert report["couplings"] == []
    manifest["synchronised"]["values"].pop()
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    assert not Verifier(tmp_path / "out").run(steps=2, confirm=False).equal


def sharded(kind: Coupled, folder, **options):
    (folder / "step.onnx").write_bytes(build(kind, 4).SerializeToString())
    return gopt.shard(gopt.load(folder / "step.onnx"), 2, statistics="sync", **options)


def test_what_does_not_go_with_it(tmp_path):
    with pytest.raises(OptionError, match="micro-steps"):
        sharded(Coupled(), tmp_path, accumulate=2)
    with pytest.raises(UnsupportedError, match="are means over the samples, and ranks add them"):
        sharded(Coupled(), tmp_path, loss_reduction="sum")


@pytest.mark.parametrize(
    "kind,why",
    [
        (Coupled(loss="summed"), "the loss 'loss' is made of sums"),
        (Coupled(loss="largest"), "the loss 'loss' is made of sums or maxima"),
        (Coupled(loss="shares"), "is made of sums"),
        (Coupled(loss="pairs"), "compares samples with each other"),
        (Coupled(loss="first"), "some samples are picked"),
    ],
    ids=lambda value: getattr(value, "loss", ""),
)
def test_what_would_not_be_exact_is_refused(kind, why, tmp_path):
    with pytest.raises(UnsupportedError, match=why):
        sharded(kind, tmp_path)


def test_values_of_one_rank_alone_are_no_matter(tmp_path):
    (tmp_path / "step.onnx").write_bytes(build(replace(Coupled(), layers=2), 4).SerializeToString())
    source = gopt.load(tmp_path / "step.onnx")
    assert gopt.shard(source, 1, statistics="sync").manifest().to_json().get("synchronised") is None
