"""The names that a graph defines."""

import pytest

from gopt import limits
from gopt.errors import InputError
from gopt.ir.symbol_table import SymbolTable


def test_a_name_is_defined_once():
    symbols = SymbolTable(None)
    symbols.define("a", "an input")
    with pytest.raises(InputError, match="value 'a' is defined twice"):
        symbols.define("a", "an input")
    with pytest.raises(InputError, match="an input without a name"):
        symbols.define("", "an input")


def test_the_body_of_a_branch_has_names_of_its_own():
    symbols = SymbolTable(None)
    symbols.define("a", "an input")
    symbols.inner().define("a", "an input of a body")
    assert symbols.bodies == 1


def test_names_of_gopt_are_refused_unless_its_own_output_is_read():
    with pytest.raises(InputError, match=r"'gopt\.a': names that begin with 'gopt\.'") as caught:
        SymbolTable("rename it").define("gopt.a", "an input")
    assert caught.value.hints == ("rename it",)
    SymbolTable(None).define("gopt.a", "an input")


@pytest.mark.parametrize("name", [b"\xff", "n" * (limits.NAME_LENGTH + 1)])
def test_names_that_are_no_text_or_too_long_are_refused(name):
    with pytest.raises(InputError):
        SymbolTable(None).define(name, "an input")


def test_readers_share_the_object_of_a_name():
    symbols = SymbolTable(None)
    name = "".join(["va", "lue"])
    symbols.define(name, "an input")
    assert symbols.defined["value"] is name
