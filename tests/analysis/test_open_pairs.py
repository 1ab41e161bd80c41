"""All pairs that a step leaves open stand in one refusal, with what is refused behind them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gopt.analysis.open_pairs import OpenPairsError, settle_pairs
from gopt.analysis.role_map import RoleMap
from gopt.errors import InputError, OptionError, UnsupportedError


def step(asked: list[Exception]):
    """Refuses with each error in turn until the pairs of all before it are told."""

    def recovered(roles):
        for error in asked:
            if not isinstance(error, OpenPairsError) or not error.pairs.keys() <= roles.states.keys():
                raise error
        return SimpleNamespace(notes=[], told=dict(roles.states))

    return recovered


def open_(**pairs: str) -> OpenPairsError:
    return OpenPairsError(f"{', '.join(pairs)} may be states", pairs, f"leave {', '.join(pairs.values())} out")


def refusal(*asked: Exception) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as refused:
        settle_pairs(RoleMap(), step([*asked]))
    return refused.value


def test_what_is_asked_one_after_the_other_is_asked_at_once():
    error = refusal(open_(a="b"), open_(c="d"), open_(e="f", g="h"))
    assert error.message == "a may be states; nor of 3 more pairs"
    assert error.hints[0] == "name the pairs: --states a=b,c=d,e=f,g=h"
    assert error.hints[2:] == ("leave b out", "leave d out", "leave f, h out")


def test_what_is_refused_behind_the_pairs_is_said():
    error = refusal(open_(a="b"), InputError("no loss found", "name it"))
    assert "--states a=b" in error.hints[0]
    assert error.hints[-2:] == ("behind that stands another refusal: no loss found", "name it")


def test_pairs_that_cannot_be_told_are_no_hint():
    def recovered(roles):
        if roles.states:
            raise OptionError("the role map names 'a', which is not an input")
        raise open_(a="b")

    with pytest.raises(UnsupportedError) as refused:
        settle_pairs(RoleMap(), recovered)
    assert refused.value.hints == ("leave b out",)


def test_pairs_by_name_are_taken_with_a_note():
    named = OpenPairsError("open", {"a": "a_out", "b": "b_out"}, by_name=True)
    found = settle_pairs(RoleMap(), step([named]))
    assert found.told == named.pairs
    assert found.notes == [
        "input a and output a_out (and 1 other pair) are paired by their names: the data flow leaves them no other"
    ]


def test_what_may_rather_be_fed_is_said_first():
    error = OpenPairsError("open", {"x": "shown"}, "if it is fed, say --batch x", fed=True)
    assert refusal(error).hints[0] == "if it is fed, say --batch x"
