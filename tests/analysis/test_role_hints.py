"""Options in hints: all names, and how many others a sentence leaves out."""

from __future__ import annotations

import tomllib

from gopt.cli.main import main
from written_steps import NET, SHAPES, Written, each, saved, sgd

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


POLYAK = each("  q_@ = Mul(g@, g@)\n  n_@ = ReduceSum<keepdims = 0>(q_@)\n") + (
    f"  norm = Sum({', '.join(f'n_{name}' for name in SHAPES)})\n  part = Div(loss, norm)\n  rate = Mul(part, lr)\n"
) + each("  s_@ = Mul(g@, rate)\n  @_out = Sub(@, s_@)\n")  # fmt: skip
"""A step as long as the loss says."""


def test_an_update_by_the_loss_is_told_the_option_that_shards_it(tmp_path, capsys):
    path = saved(Written(NET + POLYAK).model(), tmp_path)
    assert main(["shard", str(path), "--ranks", "2", "-o", str(tmp_path / "ranks")]) == 4
    assert "--shared loss" in capsys.readouterr().err
    assert main(["shard", str(path), "--ranks", "2", "-o", str(tmp_path / "ranks"), "--shared", "loss"]) == 0
    assert main(["verify", str(tmp_path / "ranks")]) == 0


def test_a_loop_in_an_update_is_told_to_write_its_turns_out(tmp_path, capsys):
    loop = (
        "  three = Constant<value = int64 {3}>()\n  yes = Constant<value = bool {1}>()\n"
        "  end = Loop(three, yes, gw0) <body = turn (int64 i, bool c, float[3,5] g) => (bool go, float[3,5] turned) "
        "{ go = Identity(c) r = Tanh(g) turned = Mul(r, kept) }>\n  s = Mul(end, lr)\n  w0_out = Sub(w0, s)\n"
    )
    text = NET + "  kept = Constant<value = float {0.9}>()\n" + sgd(("b0", "w1", "b1")) + loop
    path = saved(Written(text).model(), tmp_path)
    assert main(["shard", str(path), "--ranks", "2", "-o", str(tmp_path / "ranks")]) == 4
    assert "the turns of a loop written out" in capsys.readouterr().err
