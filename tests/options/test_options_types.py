"""Every public function and option record refuses a value of a wrong type by name: never a TypeError of Python's."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from gopt.cli.options import parse_ranks

import gopt
from gopt.errors import OptionError
from gopt.options.types import called, fits
from gopt.records.mesh import Mesh

STEP = "fixtures/mlp_sgd.onnx"
WRONG = {
    "object": (object(), ()),
    "bytes": (b"x", ()),
    "bool": (True, ("bool",)),
    "int": (3, ("int", "float")),
    "None": (None, ("None",)),
    "set": ({"x"}, ()),
    "numbers": ({1: 2}, ("Mapping[int",)),
    "text": ("x", ("str", "PathLike", "Path", "Folder")),
}
"""A value, and the words of an annotation that may allow it; none of them: no annotation does."""
GIVEN: dict[str, dict[str, Any]] = {
    "Auto": {}, "DeriveOptions": {"loss": "cross-entropy", "optimizer": "sgd"}, "RunOptions": {}, "ShardOptions": {},
    "SplitOptions": {"trainers": 2, "servers": 1}, "VerifyOptions": {}, "Mesh": {"axes": (("dp", 2),)},
    "derive": {"forward": "no.onnx", "output": "no", "options": None}, "diff": {"a": "no", "b": "no"},
    "explain": {"folder": "no", "name": "x"}, "export": {"factory": "no.py:no", "output": "no"},
    "golden_check": {"folder": "no"}, "golden_update": {"folder": "no"},
    "import_step": {"source": "no", "output": "no"}, "inspect": {"what": "no"}, "load": {"path": "no"},
    "merge": {"what": "no", "model": "no"}, "plan": {"source": "no", "mesh": 2}, "prove": {"folder": "no"},
    "provenance": {"what": "no"}, "check_certificate": {"certificate": "no", "folder": "no"},
    "report": {"folder": "no"}, "reshard": {"what": "no", "mesh": 2}, "run": {"folder": "no", "data": "no", "steps": 1},
    "calibrate": {"folder": "no", "trace": "no"}, "seal": {"folder": "no"},
    "save_state_dict": {"what": "no", "output": "no.safetensors"},
    "shard": {"source": "no", "mesh": 2}, "split": {"source": "no", "options": None}, "unchecked": {},
    "verify": {"folder": "no"},
}  # fmt: skip
"""Public name -> arguments that it needs."""


def annotations(name: str) -> Iterator[tuple[str, str]]:
    """Parameter, or field, and its annotation as text."""
    public = getattr(gopt, name)
    if is_dataclass(public):
        yield from ((each.name, str(each.type)) for each in fields(public))
        return
    for each in inspect.signature(public).parameters.values():
        if each.kind is not each.VAR_KEYWORD:
            yield each.name, str(each.annotation)


CASES = [
    (name, parameter, kind)
    for name in GIVEN
    for parameter, annotation in annotations(name)
    for kind, (_, words) in WRONG.items()
    if not any(word in annotation for word in words)
]


def test_every_public_function_and_option_record_is_in_the_table():
    results = {"Plan", "Run", "Sharded", "Source", "Split", "__version__"}
    errors = {name for name in gopt.__all__ if name.endswith("Error")}
    assert set(gopt.__all__) == GIVEN.keys() | results | errors


@pytest.mark.parametrize(("name", "parameter"), sorted({case[:2] for case in CASES}))
def test_a_wrong_type_is_refused_with_the_name_of_its_parameter(name, parameter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {key: _options(name) if key == "options" else value for key, value in GIVEN[name].items()}
    for kind in (case[2] for case in CASES if case[:2] == (name, parameter)):
        with pytest.raises(OptionError, match=rf"\b{parameter} cannot be ") as caught:
            getattr(gopt, name)(**given | {parameter: WRONG[kind][0]})
        assert "it takes " in caught.value.hints[0] or "write " in caught.value.hints[0], kind
    assert not list(tmp_path.iterdir())


def _options(name: str) -> Any:
    kind = {"derive": "DeriveOptions", "split": "SplitOptions"}[name]
    return getattr(gopt, kind)(**GIVEN[kind])


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (np.int64(3), int, True), (np.float32(3), float, True), (3.0, int, False), (False, float, False),
        (["a"], tuple[str, ...], True), ("ab", tuple[str, ...], False), (("dp", 2), tuple[str, int], True),
        (("dp", 2.0), tuple[str, int], False), (("dp",), tuple[str, int], False),
        (None, int | None, True), (np.ones(2), np.ndarray[Any, Any], True), (b"x", np.ndarray[Any, Any], False),
    ],
)  # fmt: skip
def test_a_value_is_of_a_type_or_not(value, hint, expected):
    assert fits(value, hint) is expected


def test_types_are_called_in_words():
    assert called(int | None) == "a whole number or None"
    assert called(tuple[str, ...]) == "a list, each item a text"


def test_texts_of_enums_become_members_and_others_list_them():
    assert gopt.SplitOptions(trainers=2, servers=1, mode="async").mode.value == "async"  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="mode cannot be 'asnyc'") as caught:
        gopt.SplitOptions(trainers=2, servers=1, mode="asnyc")  # type: ignore[arg-type]
    assert "half-async" in caught.value.hints[0]


def test_a_link_that_nothing_uses_is_read_and_said_to_have_no_effect():
    with pytest.raises(OptionError, match="cannot read 'x' as a link"):
        gopt.shard(STEP, 2, link="x")
    notes = [each.record.note for each in gopt.shard(STEP, 2, link="200GB/s").ran]
    assert "no axis splits the computation: link has no effect" in notes


@pytest.mark.parametrize(("ranks", "wrong"), [([-1], -1), ([0, 2], 2), ([-3, 0], -3)])
def test_a_rank_that_the_mesh_has_not_is_named(ranks, wrong):
    with pytest.raises(OptionError, match=f"names rank {wrong}, the mesh has 2") as caught:
        gopt.shard(STEP, 2, only_ranks=ranks)
    assert caught.value.hints == ("ranks count from 0 to 1",)


def test_a_rank_that_is_named_twice_is_made_once():
    assert [each.rank for each in gopt.shard(STEP, 2, only_ranks=[1, 0, 1]).ranks] == [0, 1]


@pytest.mark.parametrize("digits", ["²", "٣", "9" * 5000, "1e3", ""])
def test_digits_that_python_or_a_machine_cannot_read_are_refused(digits):
    for call in (lambda: parse_ranks(digits), lambda: parse_ranks(f"0-{digits}x"), lambda: Mesh.parse(f"dp={digits}")):
        with pytest.raises(OptionError, match="cannot read"):
            call()


def test_a_range_of_more_ranks_than_there_can_be_is_refused_before_it_is_counted():
    with pytest.raises(OptionError, match="names rank 999999999999999: gopt makes at most"):
        parse_ranks("0-999999999999999")
