"""Options in hints: all names up to a limit, and how many more there are."""

from __future__ import annotations

from gopt.analysis.role_hints import MOST, batch_option, others, states_option


def test_all_names_stand_in_one_option():
    assert states_option({"m": "m_new", "v": "v_new"}) == "--states m=m_new,v=v_new"
    assert batch_option(["x", "mask"]) == "--batch x,mask"


def test_a_hint_ends_after_some_names():
    names = [f"x{n}" for n in range(MOST + 3)]
    assert batch_option(names) == f"--batch {','.join(names[:MOST])} and so on for 3 more"


def test_others_are_counted():
    assert [others(count, "state") for count in (0, 1, 2)] == ["", " (and 1 other state)", " (and 2 other states)"]
