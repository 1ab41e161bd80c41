"""Groups of options that several commands share: how their texts are read."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from gopt.cli.options import (
    arguments_of,
    axis_table,
    build_mesh,
    parse_ranks,
    pass_option,
    read_config,
    role_map,
    seconds,
)
from gopt.cli.run import command as run

from gopt.documents.config import GoptConfig, RolesTable
from gopt.errors import InputError, OptionError
from gopt.records.mesh import AxisKind


@pytest.mark.parametrize(
    ("text", "ranks"),
    [(None, None), ("0", [0]), ("0-3,7", [0, 1, 2, 3, 7]), ("5,0-1,1", [0, 1, 5]), ("3-3", [3])],
)
def test_ranks_are_read(text, ranks):
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "1-", "-1", "3-1", "a", "1,,2", "1-2-3", "1.5"])
def test_ranks_that_are_none(text):
    with pytest.raises(OptionError, match="as ranks"):
        parse_ranks(text)


def test_an_option_of_a_pass():
    assert pass_option("shard.style=broadcast") == ("shard", "style", "broadcast")
    assert pass_option(" shard.bucket_mb = 4 ") == ("shard", "bucket-mb", "4")
    assert pass_option("shard.override=a.b:rows;c=d:flat") == ("shard", "override", "a.b:rows;c=d:flat")


@pytest.mark.parametrize(
    ("text", "said"),
    [("shard.style", "as an option of a pass"), ("style=broadcast", "as an option of a pass"),
     ("shrad.style=x", "no pass is called 'shrad'")],
)  # fmt: skip
def test_an_option_of_no_pass(text, said):
    with pytest.raises(OptionError, match=said):
        pass_option(text)


@pytest.mark.parametrize(("text", "found"), [("0.5", 0.5), ("1e9", 1e9), (120, 120.0)])
def test_a_time_to_wait(text, found):
    assert seconds(text) == found


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1.1e9", "soon", ""])
def test_no_time_to_wait(text):
    with pytest.raises(click.BadParameter, match="is not a time to wait"):
        seconds(text)


# --- roles ------------------------------------------------------------------------------------------------------------


def test_roles_are_read():
    roles = role_map("l", ["a=da,b", "c"], ["m=m_out", "v=v_out,t=t_out"], ["x,y"], None, ["n"])
    assert (roles.loss, roles.params) == ("l", {"a": "da", "b": "", "c": ""})
    assert roles.states == {"m": "m_out", "v": "v_out", "t": "t_out"}
    assert (list(roles.batch), list(roles.shared)) == (["x", "y"], ["n"])


def test_options_go_before_the_configuration():
    table = RolesTable(loss="l", params=("a", "b"), states={"m": "old", "v": "v_out"}, batch=("x",))
    config = GoptConfig(roles=table)
    roles = role_map("other", ["a=da"], ["m=new"], ["y"], config)
    assert (roles.loss, roles.params) == ("other", {"a": "da", "b": ""})
    assert (roles.states, list(roles.batch)) == ({"m": "new", "v": "v_out"}, ["x", "y"])
    assert role_map("", [], [], [], config).loss == "l"
    assert role_map("", [], [], [], GoptConfig(roles=RolesTable(params={"a": "da"}))).params == {"a": "da"}


def test_states_that_say_two_things():
    with pytest.raises(OptionError, match="names no output"):
        role_map("", [], ["m"], [])
    with pytest.raises(OptionError, match="gives 'm' two new values: 'a' and 'b'"):
        role_map("", [], ["m=a", "m=b"], [])
    assert role_map("", [], ["m=a", "m=a"], []).states == {"m": "a"}


# --- meshes and configurations ----------------------------------------------------------------------------------------


def test_ranks_and_mesh():
    config = {"dp": 2, "shard": 2}
    assert str(build_mesh(3, None, None)) == "shard=3"
    assert str(build_mesh(None, "dp=2,shard=3", config)) == "dp=2,shard=3"
    assert str(build_mesh(None, None, config)) == "dp=2,shard=2"
    assert str(build_mesh(3, None, config)) == "shard=3", "what is typed goes before the file"
    assert str(build_mesh(6, "dp=2,shard=3", None)) == "dp=2,shard=3"
    kinds = {"zone": AxisKind.DATA}
    assert build_mesh(None, "zone=2", None, kinds).kinds == (("zone", AxisKind.DATA),)


@pytest.mark.parametrize(
    ("ranks", "text", "said"),
    [
        (None, None, "the number of ranks is missing"),
        (0, None, "--ranks cannot be 0"),
        (3, "shard=2", r"\(2 ranks\) disagree"),
    ],
)
def test_a_mesh_that_cannot_be(ranks, text, said):
    with pytest.raises(OptionError, match=said):
        build_mesh(ranks, text, None)


def test_axes_of_options_go_before_the_configuration():
    config = {"zone": "data", "rep": "replica"}
    assert axis_table(["zone=replica"], config) == {"zone": AxisKind.REPLICA, "rep": AxisKind.REPLICA}
    assert axis_table(["a=data,b=data"], None) == {"a": AxisKind.DATA, "b": AxisKind.DATA}


def test_a_configuration_is_a_file(tmp_path):
    assert read_config(None) == GoptConfig()
    with pytest.raises(InputError, match="there is no configuration file"):
        read_config(str(tmp_path / "gopt.toml"))
    with pytest.raises(InputError, match="is a folder"):
        read_config(str(tmp_path))
    Path(tmp_path, "gopt.toml").write_text("[mesh]\nshard = 2\n")
    assert read_config(str(tmp_path / "gopt.toml")) == GoptConfig(mesh={"shard": 2})


def test_arguments_for_a_process_that_does_the_same():
    """What was not given stays out; what may be repeated is."""
    typed = [
        "out",
        "--data",
        "d.npz",
        "--steps",
        "3",
        "--shuffle",
        "0",
        "--set",
        "lr=1",
        "--set",
        "wd=0",
        "--resume",
        "--engine",
        "mpi",
    ]
    context = run.make_context("run", [*typed, "--checkpoint", "ck"])
    found = arguments_of(context, ("path", "folder", "engine"))
    again = run.make_context("run", ["out", *found])
    assert "mpi" not in found and "--resume" in found and found.count("--set") == 2
    assert found[found.index("--shuffle") + 1] == "0", "0 is a seed like any other"
    same = {name for name in context.params if context.params[name] == again.params[name]}
    assert set(context.params) - same == {"engine"}
