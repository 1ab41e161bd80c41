"""The certificate of every folder that is proven is checked, or rests on laws that the checker does not have."""

from __future__ import annotations

import pytest
from products import part
from test_proof_prove import NAMES, SETS, sharded

import gopt
from gopt.errors import UnsupportedError

LEMMAS = {
    "Where", "ScatterND", "any flag", "counts that are not negative", "exponentials", "product with zero",
    "weighted mean", "sum of ranges", "values of phases before", "Sqrt", "ConvTranspose",
}  # fmt: skip
"""Laws of the prover that the checker does not have."""


@pytest.mark.parametrize(("name", "kind"), part([(n, k) for n in NAMES for k in SETS], 60))
def test_a_folder_that_is_proven_has_a_certificate(name, kind, tmp_path, capsys):
    if not sharded(name, SETS[kind], tmp_path / "out"):
        pytest.skip("gopt shard refuses it")
    file = tmp_path / "step.cert"
    try:
        proof = gopt.prove(tmp_path / "out", certificate=file)
    except UnsupportedError:
        pytest.skip("no certificate")
    if proof.proven:
        result = gopt.check_certificate(file, tmp_path / "out")
        assert result.fault is None
        assert set(result.lemmas) <= LEMMAS
    else:
        assert not file.exists()
