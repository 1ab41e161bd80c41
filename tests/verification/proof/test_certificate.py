"""The certificate of every folder that is proven is checked, or rests on laws that the checker does not have."""

from __future__ import annotations

import pytest
from mesh_gen.make import Recipe, make
from products import part
from test_proof_prove import NAMES, SETS, SPLIT_SETS, sharded

import gopt
from gopt.errors import UnsupportedError

LEMMAS = {
    "Where", "ScatterND", "any flag", "counts that are not negative", "what may be no number", "weighted mean",
    "values of phases before", "Sqrt", "ConvTranspose",
}  # fmt: skip
"""Laws of the prover that the checker does not have."""

CHECKED = [name for name in NAMES if not name.endswith("i28730_step_4g")]
"""All but a step of 4 GiB: the check computes every element."""
SPLIT_LEMMAS = LEMMAS | {
    "Gather", "Log", "Less", "Conv", "MaxPool", "places of maxima", "ScatterElements", "empty sum", "open shape", *(
        f"parts of {op}" for op in ("Gather", "ScatterND", "ScatterElements", "Conv", "ConvTranspose", "in a row",
                                    "GatherElements")
    ),
}  # fmt: skip
"""Laws besides, where the computation is split: lookups in parts of a table, places of images, softmax over parts."""


@pytest.mark.parametrize(("name", "kind"), part([(n, k) for n in CHECKED for k in SETS], 40))
def test_a_folder_that_is_proven_has_a_certificate(name, kind, tmp_path, capsys):
    check_certificate(name, SETS[kind], LEMMAS, tmp_path)


@pytest.mark.parametrize(("name", "kind"), part([(n, k) for n in CHECKED for k in SPLIT_SETS], 30))
def test_a_folder_that_is_split_has_a_certificate(name, kind, tmp_path, capsys):
    check_certificate(name, SPLIT_SETS[kind], SPLIT_LEMMAS, tmp_path)


def test_a_part_of_elements_in_other_rows_is_in_normal_form(tmp_path):
    """No part of the value before the reshape is these elements."""
    step = make(Recipe(3, (2, 4, 6, 2), "ids", ("dense",), "other rows", "sgd"))
    (tmp_path / "step.onnx").write_bytes(step.model.SerializeToString())
    gopt.shard(tmp_path / "step.onnx", "shard=2").write(tmp_path / "out")
    assert gopt.prove(tmp_path / "out", certificate=tmp_path / "step.cert").proven
    assert gopt.check_certificate(tmp_path / "step.cert", tmp_path / "out").fault is None


def check_certificate(name, options, lemmas, tmp_path):
    if not sharded(name, options, tmp_path / "out"):
        pytest.skip("gopt shard refuses it")
    file = tmp_path / "step.cert"
    try:
        proof = gopt.prove(tmp_path / "out", certificate=file)
    except UnsupportedError:
        pytest.skip("no certificate")
    if proof.proven:
        result = gopt.check_certificate(file, tmp_path / "out")
        assert result.fault is None
        assert set(result.lemmas) <= lemmas
    else:
        assert not file.exists()
