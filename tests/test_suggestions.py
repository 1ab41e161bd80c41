"""Suggestions for names that are not known."""

from __future__ import annotations

from gopt.suggestions import MOST, did_you_mean


def test_the_nearest_name_is_quoted_and_escaped():
    assert did_you_mean("los", ["lr", "loss", "labels"]) == "did you mean 'loss'?"
    assert did_you_mean("weight\x1b", ["weight\x1b[1m"]) == r"did you mean 'weight\x1b[1m'?"


def test_a_name_far_from_all_has_none():
    assert did_you_mean("zzz", ["loss", "lr"]) is None
    assert did_you_mean("loss", []) is None


def test_only_so_many_names_are_compared():
    names = (f"other{i}" for i in range(10 * MOST))
    did_you_mean("nothing", names)
    assert next(names) == f"other{MOST}"
