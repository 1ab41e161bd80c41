"""Options of passes: read from text and from TOML, refused with what is known, and shown as they were settled."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

import pytest

from gopt.errors import OptionError
from gopt.passes import DEFAULT, PASSES, find
from gopt.passes.base import Pass, build_options, option_table, show_options
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram


class Kind(str, Enum):
    """Some kinds."""

    FLAT = "flat"
    ROWS = "rows"


class Level(IntEnum):
    """Some levels."""

    LOW = 0
    HIGH = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """One of each type."""

    kind: Kind = Kind.FLAT
    level: Level = Level.LOW
    cap_mb: float | None = None
    count: int = 4
    on: bool = True
    names: str = ""


@dataclass(frozen=True)
class Needs:
    """One without a default."""

    count: int


def apply(program: SpmdProgram, options: Any) -> PassResult:
    """Do nothing.

    And say more of it.
    """
    return PassResult()


SPEC = Pass("some", Options, apply)


def test_text_and_toml_say_the_same():
    text = {"kind": "rows", "level": "3", "cap-mb": "1.5", "count": "-2", "on": "False", "names": "a:rows;b:flat"}
    toml = {"kind": "rows", "level": 3, "cap_mb": 1.5, "count": -2, "on": False, "names": {"a": "rows", "b": "flat"}}
    made = Options(kind=Kind.ROWS, level=Level.HIGH, cap_mb=1.5, count=-2, on=False, names="a:rows;b:flat")
    assert build_options(SPEC, text) == build_options(SPEC, toml) == made
    assert build_options(SPEC, {}) == build_options(SPEC, {"cap-mb": "auto"}) == Options()


@pytest.mark.parametrize(
    ("given", "said", "takes"),
    [
        ({"kind": "cols"}, "option kind cannot be 'cols'", "flat | rows"),
        ({"level": "1"}, "option level cannot be '1'", "0 | 3"),
        ({"level": "high"}, "option level cannot be 'high'", "0 | 3"),
        ({"cap-mb": "much"}, "option cap-mb cannot be 'much'", "float"),
        ({"cap-mb": "nan"}, "option cap-mb cannot be 'nan'", "float"),
        ({"cap-mb": "inf"}, "option cap-mb cannot be 'inf'", "float"),
        ({"count": "1.5"}, "option count cannot be '1.5'", "int"),
        ({"count": str(1 << 63)}, "option count cannot be", "int"),
        ({"on": "yes"}, "option on cannot be 'yes'", "bool"),
    ],
)
def test_values_that_cannot_be(given, said, takes):
    with pytest.raises(OptionError) as caught:
        build_options(SPEC, given)
    assert said in caught.value.message and caught.value.hints == (f"it takes {takes}",)


def test_an_option_that_is_not_there():
    with pytest.raises(OptionError, match="pass some has no option 'cap-md'") as caught:
        build_options(SPEC, {"cap-md": "1"})
    assert caught.value.hints == ("did you mean 'cap-mb'?",)
    with pytest.raises(OptionError) as caught:
        build_options(SPEC, {"zzz": "1"})
    assert caught.value.hints == ("it takes kind, level, cap-mb, count, on, names",)


def test_the_table_of_options():
    assert option_table(SPEC) == [
        ("kind", "flat | rows", "flat"), ("level", "0 | 3", "0"), ("cap-mb", "float | auto", "auto"),
        ("count", "int", "4"), ("on", "bool", "True"), ("names", "str", ""),
    ]  # fmt: skip
    assert option_table(Pass("needs", Needs, apply)) == [("count", "int", "required")]
    assert SPEC.summary == "Do nothing."


def test_options_as_the_report_has_them():
    shown = show_options(Options(level=Level.HIGH))
    assert shown == {"kind": "flat", "level": 3, "cap_mb": None, "count": 4, "on": True, "names": ""}
    assert (type(shown["kind"]), type(shown["level"])) == (str, int)


# --- the table of passes ----------------------------------------------------------------------------------------------


def test_a_pass_is_found_by_its_name():
    assert find("prune") is PASSES["prune"]
    with pytest.raises(OptionError, match="no pass is called 'shrad'") as caught:
        find("shrad")
    assert caught.value.hints == ("did you mean 'shard'?",)
    with pytest.raises(OptionError) as caught:
        find("zzz")
    assert caught.value.hints == (f"there are {', '.join(PASSES)}",)


def test_the_default_order_is_one_that_passes_allow():
    for place, name in enumerate(DEFAULT):
        assert not set(PASSES[name].after) & set(DEFAULT[place:])
