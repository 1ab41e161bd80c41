"""Manifests of trainers and servers with one thing wrong: each is refused, by the place where it is."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import source

from gopt import api
from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.server_entries import Mode, PullAt
from gopt.errors import GoptError, InputError
from gopt.parameter_server.options import SplitOptions
from gopt.records.roles import Roles

pytestmark = pytest.mark.usefixtures("unchecked")

Document = dict[str, Any]


def _written(name: str, **given: object) -> Document:
    options = SplitOptions(**{"trainers": 2, "servers": 2, "minimum": 16, **given})  # type: ignore[arg-type]
    document: Document = json.loads(api.split(source(name), options).manifest().text())
    return document


@pytest.fixture(scope="module")
def plain() -> Document:
    """Keys 0 and 1 are runs of pieces on the two servers."""
    return _written("mlp_adamw", roles=Roles.parse("trainer:0,1;server:0,1"))


@pytest.fixture(scope="module")
def scaled() -> Document:
    """The last key is a loss scale."""
    return _written("mlp_adamw_fp16_scaler", pull=PullAt.END)


@pytest.fixture(scope="module")
def rows() -> Document:
    """Table 0 is updated lazily, and no file has its rows."""
    return _written("sparse/dlrm_adam", rows={"*": "lazy"}, init={"table0": "zeros"})


def _read(document: Document, folder: Path) -> Manifest:
    (folder / "manifest.json").write_text(json.dumps(document), encoding="utf-8")
    return read_manifest(folder)[0]


def _keys(document: Document) -> Any:
    return document["parameter_server"]["keys"]


def _key(index: int, **given: object) -> Callable[[Document], None]:
    return lambda document: _keys(document)[index].update(given)


def _plan(**given: object) -> Callable[[Document], None]:
    return lambda document: document["parameter_server"].update(given)


def _rank(index: int, **given: object) -> Callable[[Document], None]:
    return lambda document: document["ranks"][index].update(given)


def _at(place: str, value: object) -> Callable[[Document], None]:
    """Set what ``a.0.b`` names."""

    def change(document: Document) -> None:
        *way, last = [int(part) if part.lstrip("-").isdigit() else part for part in place.split(".")]
        found: Any = document
        for part in way:
            found = found[part]
        found[last] = value

    return change


KEYS = "parameter_server.keys"
DAMAGES: list[tuple[str, Callable[[Document], object], str]] = [
    ("a server beyond the last", _key(1, server=2), f"{KEYS}[1].server: 2"),
    ("no such type", _key(1, dtype="float31"), f"{KEYS}[1].dtype"),
    ("another type than the parameter's", _key(1, dtype="float64", wire="float64"), f"{KEYS}[1].dtype: float64, but"),
    ("a wire of integers", _key(0, wire="int8"), f"{KEYS}[0].wire"),
    ("a shape beyond memory", _key(0, shape=[2**40, 2**40]), f"{KEYS}[0].shape"),
    ("a shape of another size", _key(0, shape=[3]), f"{KEYS}[0].shape: 3 elements"),
    ("no piece", _key(0, pieces=[]), f"{KEYS}[0].pieces: a parameter's key"),
    ("no inputs", _key(0, inputs=[]), f"{KEYS}[0].inputs: 0 inputs"),
    ("a state that the server has not", _at(f"{KEYS}.0.inputs.1", "nix"), f"{KEYS}[0].inputs[1]: 'nix'"),
    ("another output", _at(f"{KEYS}.0.outputs.1", "nix"), f"{KEYS}[0].outputs[1]: 'nix'"),
    ("a piece of no parameter", _at(f"{KEYS}.0.pieces.0.tensor", "step"), f"{KEYS}[0].pieces[0].tensor: 'step'"),
    ("a piece of nothing", _at(f"{KEYS}.0.pieces.0.tensor", "nix"), f"{KEYS}[0].pieces[0].tensor: 'nix'"),
    ("a key that is gone", lambda d: _keys(d).pop(), f"{KEYS}["),
    ("a key twice", lambda d: _keys(d).append(copy.deepcopy(_keys(d)[0])), f"{KEYS}["),
    ("two pieces exchanged", lambda d: _keys(d)[0]["pieces"].reverse(), f"{KEYS}[0].pieces: the server holds other"),
    ("a bucket of two servers", lambda d: _keys(d)[1].update(bucket=_keys(d)[0]["bucket"]), f"{KEYS}[1].bucket"),
    ("a bucket beyond all keys", _key(1, bucket=10**9), f"{KEYS}[1].bucket: 1000000000"),
    ("a metric in a parameter's place", _key(0, kind="metric"), f"{KEYS}[0].server: every server"),
    ("more servers than roles", _plan(servers=3), "parameter_server.roles"),
    ("servers beyond all ranks", _plan(servers=10**9), "parameter_server.servers: 1000000000"),
    ("pushes every few steps in rounds", _plan(every=2), "parameter_server.every: it has no effect"),
    ("counts in rounds", _plan(count="push"), "parameter_server.count"),
    ("compensation in rounds", _plan(compensation=0.5), "parameter_server.compensation"),
    ("roles of three", _at("parameter_server.roles.trainers", 3), "parameter_server.roles"),
    ("two trainers on one rank", _at("parameter_server.roles.trainer_ranks", [0, 0]), "parameter_server.roles"),
    ("a rank beyond all", _at("parameter_server.roles.server_ranks", [0, 10**9]), "parameter_server.roles"),
    ("a rule of no loss", lambda d: d.update(loss_reduction="weighted"), "loss_reduction"),
    ("a state of all", lambda d: d["common"].update(state=d["ranks"][2]["state"][:1]), "common.state"),
    ("a server as a trainer", _rank(2, role="trainer"), "ranks[2].role"),
    ("a rank less", lambda d: d["ranks"].pop(), "ranks: 3 entries"),
    ("one file of two servers", lambda d: d["ranks"][3].update(files=d["ranks"][2]["files"]), "ranks[3].files"),
    ("a server's file of trainers", lambda d: d["ranks"][3].update(files=d["ranks"][0]["files"]), "ranks[3].files"),
    ("trainers with two files", _at("ranks.1.files.step", "other.onnx"), "ranks[1].files: it differs"),
    ("a trainer with a state of its own", lambda d: d["ranks"][1].update(state=d["ranks"][2]["state"][-1:]),
     "ranks[1].state: it differs"),
    ("a server that sums", lambda d: d["ranks"][2].update(accumulators=[
        {"input": "a", "output": "b", "dtype": "float32", "shape": [2]}]), "ranks[2].accumulators"),
    ("a piece that servers lack", _at("ranks.2.state.0.pieces", []), "ranks[2].state[0].pieces: it holds nothing"),
    ("a piece beyond its tensor", _at(f"{KEYS}.0.pieces.0.stop", 10**6), f"{KEYS}[0].shape"),
    ("an empty piece", _at("ranks.2.state.0.pieces.0.stop", 0), "ranks[2].state[0].pieces: it holds nothing"),
    ("half a tensor on servers", lambda d: d["ranks"][2]["state"].pop(), "ranks: "),
]  # fmt: skip
SCALARS: list[tuple[str, Callable[[Document], object], str]] = [
    ("a scalar of one server", _key(-1, server=0), "every server has a scalar"),
    ("a scalar of pieces", lambda d: _keys(d)[-1].update(pieces=_keys(d)[0]["pieces"]), "cannot have pieces"),
    ("a scalar of two numbers", _key(-1, shape=[2]), "one number, not 2"),
    ("a scalar that is pushed", _key(-1, gradient="g"), "a value alone is pushed"),
    ("a scalar of two states", lambda d: _keys(d)[-1]["inputs"].append("x"), "has 1 inputs and 1 outputs"),
    ("a scalar that not all servers have", _at(f"{KEYS}.-1.inputs.0", "nix"), "'nix' is not a state of every server"),
    ("a metric that nobody shows", _key(-1, kind="metric", inputs=[]), "is not a metric"),
    ("a value without a name", _key(-1, kind="value", inputs=[], outputs=[]), "a value alone is pushed"),
    ("a scalar among others", lambda d: _keys(d)[-1].update(bucket=_keys(d)[0]["bucket"]), "bucket"),
    ("copies of what was pulled at the start", _plan(pull="start"), "keep no"),
    ("a copy that is none", _at("ranks.0.state.0.copy", False), "ranks["),
    ("half a copy", _at("ranks.0.state.1.pieces.0.stop", 1), "whole or not at all"),
    ("more servers", _plan(servers=3), "ranks: 4 entries"),
]


TABLES = "parameter_server.tables"


def _table(document: Document) -> Any:
    return document["parameter_server"]["tables"][0]


OF_TABLES: list[tuple[str, Callable[[Document], object], str]] = [
    ("a part that is gone", lambda d: _table(d)["states"].pop(), f"{TABLES}[0].states: it has 2"),
    ("ids of one part", _at(f"{TABLES}.0.ids", ["x"]), f"{TABLES}[0].ids: it has 2"),
    ("another first state", _at(f"{TABLES}.0.states.1.inputs.0", "x"), f"{TABLES}[0].states[1]: the part of the table"),
    ("a state of no server", _at(f"{TABLES}.0.states.1.inputs.1", "x"), f"{TABLES}[0].states[1]: 'x' is not a state"),
    ("a rule for another tensor", _at(f"{TABLES}.0.init.0.tensor", "top0.weight"), f"{TABLES}[0].init[0].tensor"),
    ("a rule that is none", _at(f"{TABLES}.0.init.0.rows", "some"), f"{TABLES}[0].init[0].rows: cannot read"),
    ("no rounds and no ids", lambda d: (_plan(mode="async")(d), _table(d).pop("ids")), f"{TABLES}[0].ids"),
]  # fmt: skip


DAMAGED = [("plain", each) for each in DAMAGES] + [("scaled", each) for each in SCALARS] + [
    ("rows", each) for each in OF_TABLES
]  # fmt: skip


@pytest.mark.parametrize(("split", "damage"), DAMAGED, ids=[damage[0] for _, damage in DAMAGED])
def test_a_damage_is_refused_by_its_place(
    split: str, damage: tuple[str, Callable[[Document], object], str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    document = copy.deepcopy(request.getfixturevalue(split))
    _read(document, tmp_path)
    damage[1](document)
    if split == "scaled":  # its trainers are alike
        document["ranks"][1]["state"] = document["ranks"][0]["state"]
    with pytest.raises(InputError) as caught:
        _read(document, tmp_path)
    assert damage[2] in caught.value.message


@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.HALF_ASYNC])
def test_what_asynchronous_modes_have_is_read_back(mode: Mode, tmp_path: Path) -> None:
    plan = _read(_written("mlp_adamw", mode=mode, compensation=0.5, count="push"), tmp_path).parameter_server
    assert plan is not None
    assert (plan.mode, plan.compensation, plan.count) == (mode, 0.5, "push")


def test_whatever_is_replaced_nothing_crashes(plain: Document, tmp_path: Path) -> None:
    """One value after another by something else of its kind, or of another one."""
    rng, places = random.Random(5), list(_places(plain["parameter_server"], ["parameter_server"]))
    places += list(_places(plain["ranks"], ["ranks"]))
    for place in rng.sample(places, 150):
        document = copy.deepcopy(plain)
        value: Any = rng.choice([0, 1, -1, 10**12, "", "x", [], {}, None, True, 0.5])
        found: Any = document
        for part in place[:-1]:
            found = found[part]
        found[place[-1]] = value
        try:
            _read(document, tmp_path)
        except GoptError as error:
            assert isinstance(error, InputError), (place, value)


def _places(found: Any, way: list[Any]) -> Any:
    items = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for part, each in items:
        yield [*way, part]
        yield from _places(each, [*way, part])
