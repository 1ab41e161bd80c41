"""The table of operators in docs/collectives.md has those of gopt, with their attributes."""

from __future__ import annotations

import re

from helpers import ROOT

from gopt.collectives.table import COLLECTIVES

PAGE = (ROOT / "docs/collectives.md").read_text("utf-8")


def test_the_table_has_every_form_of_every_operator():
    rows = re.findall(r"^\| `(\w+)` \|[^|]*→[^|]*\| ([^|]*) \|", PAGE, re.M)
    found = {(name, frozenset(re.findall(r"`(\w+)`", attributes))) for name, attributes in rows}
    wanted = set[tuple[str, frozenset[str]]]()
    for name, record in COLLECTIVES.items():
        of_forms = frozenset[str]().union(*record.forms)
        plain = {each.name for each in record.attributes} - of_forms - {"group"}
        wanted.update((name, frozenset(plain | form)) for form in record.forms or (frozenset[str](),))
    assert found == wanted and len(rows) == len(wanted)
