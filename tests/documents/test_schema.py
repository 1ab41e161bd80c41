"""A document held against its schema: the first fault is named, however far down it is."""

from __future__ import annotations

import json

import pytest
from refusals import many, refused

from gopt.documents import MANIFEST


@pytest.mark.parametrize("place", [0, 63, 64, 1000, 1999])
def test_a_fault_far_down_a_list_is_named(place):
    manifest = many(2000, 1, 1)
    manifest["ranks"][place] = manifest["ranks"][place] | {"rank": "x"}
    assert f"ranks[{place}].rank: 'x' is not of type" in refused(json.dumps(manifest), MANIFEST)
    manifest["ranks"][place] = manifest["ranks"][place] | {"rank": place}
    state = manifest["ranks"][place]["state"][0]
    manifest["ranks"][place]["state"] = [state] * 100 + [state | {"input": 3}]
    assert f"ranks[{place}]" in refused(json.dumps(manifest), MANIFEST)
