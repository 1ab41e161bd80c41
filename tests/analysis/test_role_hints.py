"""Options in hints: all names, and how many others a sentence leaves out."""

from __future__ import annotations

import tomllib

from gopt.analysis.role_hints import batch_option, others, states_hints, states_option
from gopt.limits import LINE


def test_all_names_stand_in_one_option():
    assert states_option({"m": "m_new", "v": "v_new"}) == "--states m=m_new,v=v_new"
    assert batch_option(["x", "mask"]) == "--batch x,mask"


def test_all_pairs_stand_in_one_message():
    pairs = {f"layer{n}.weight.moment": f"layer{n}.weight.moment_out" for n in range(60)}
    *options, table = states_hints(pairs)
    told = [text.partition("--states ")[2] for text in options]
    assert dict(pair.split("=") for text in told for pair in text.split(",")) == pairs
    assert len(options) > 1 and max(map(len, options)) < LINE and "[roles.states]" in table


def test_few_pairs_stand_in_a_line_of_a_configuration():
    option, table = states_hints({"a b": "c"})
    assert option == "name the pair: --states 'a b=c'"
    before, _, line = table.partition("[roles]: ")
    assert before == "or in gopt.toml, under " and tomllib.loads(line) == {"states": {"a b": "c"}}


def test_a_name_that_no_option_can_say_stands_in_the_configuration():
    (hint,) = states_hints({"a=b": "c,d"})
    assert tomllib.loads(hint.partition("[roles]: ")[2]) == {"states": {"a=b": "c,d"}}


def test_others_are_counted():
    assert [others(count, "state") for count in (0, 1, 2)] == ["", " (and 1 other state)", " (and 2 other states)"]
