"""A short run of the fuzzer, of the same cases each time: ``python -m fuzz`` in ``tests`` is the long one."""

from __future__ import annotations

import pytest
from fuzz.campaign import Campaign
from fuzz.cases import KINDS

SEEDS = 2


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    return Campaign(list(KINDS), tmp_path_factory.mktemp("fuzz"))


@pytest.mark.rest
@pytest.mark.parametrize("kind", KINDS)
def test_no_case_goes_wrong(campaign, kind):
    before = sum(campaign.codes.values())
    campaign.kinds = [kind]
    for seed in range(SEEDS):
        campaign.one(seed)
    assert campaign.findings == [], "\n".join(map(str, campaign.findings))
    assert sum(campaign.codes.values()) >= before + SEEDS
