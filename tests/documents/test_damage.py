"""Every key of every document that gopt reads × every kind of damage: refused in one line, or read; never a defect.

What the door refuses is seen at the door. Documents that it lets in go through every command that reads them.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from damage import KINDS, Damage, damaged, every, places
from gopt.cli.main import main
from helpers import FIXTURES, is_clean
from products import fewer, part, spread

from gopt.api import stored_roles
from gopt.artifact.checkpoint_index import open_index
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.report_check import read_report
from gopt.errors import GoptError, InputError
from gopt.ir.load import load

Check = Callable[[Path], object]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[Path]:
    """Output folders with and without micro-steps, each with a checkpoint, and data for them."""
    top, before = tmp_path_factory.mktemp("damage"), Path.cwd()
    os.chdir(top)
    for name, more in (("plain", ["--stage", "2"]), ("micro", ["--stage", "3", "--accumulate", "2"])):
        assert main(["shard", str(FIXTURES / "mlp_adamw.onnx"), "--ranks", "2", *more, "-o", name]) == 0
        assert main([*train(name), "--steps", "1", "--checkpoint", f"{name}.kept"]) == 0
        shutil.copytree(name, f"{name}.whole")
        shutil.copytree(f"{name}.kept", f"{name}.kept.whole")
    yield top
    os.chdir(before)


def train(name: str) -> list[str]:
    generator = np.random.default_rng(0)
    np.savez("data.npz", x=generator.standard_normal((64, 32), np.float32), y=np.zeros(64, np.int64))
    return ["run", name, "--data", "data.npz", "--set", "lr=1e-3"]


def commands(what: str, name: str) -> dict[str, list[str]]:
    """The commands that read a document."""
    other = ["--force", "--json"]
    if what in ("manifest", "report", "roles"):
        found = {
            "inspect": ["inspect", name],
            "diff": ["diff", name, f"{name}.whole"],
            "merge": ["merge", name, "-o", "m.onnx", *other],
            "reshard": ["reshard", name, "--ranks", "3", "-o", "r.ranks", *other],
            "verify": ["verify", name, "--steps", "1", "--no-confirm"],
            "run": [*train(name), "--steps", "1"],
        }
        return {key: found[key] for key in found if what != "report" or key not in ("verify", "run")}
    step = f"{name}.kept/step_00000001"
    return {
        "diff": ["diff", step, f"{name}.kept.whole/step_00000001"],
        "merge": ["merge", step, "-o", "m.onnx", *other],
        "reshard": ["reshard", step, "--ranks", "3", "-o", "r.ranks", *other],
        "resume": [*train(name), "--steps", "1", "--checkpoint", f"{name}.kept", "--resume"],
    }


def holds(arguments: list[str], what: str, damage: Damage, capsys) -> int:
    """Run a command: whatever it finds, it says so in one clean line."""
    capsys.readouterr()
    code = main(arguments)
    out, err = capsys.readouterr()
    case = f"{what}: {damage.kind} at {damage.place}: {' '.join(arguments)} -> {code}\n{err}"
    assert code in (0, 1, 3, 4, 5), case
    lines = err.splitlines()
    assert all(line.startswith(("gopt: ", "  hint: ")) and len(line.encode()) < 1000 for line in lines), case
    assert is_clean(out) and is_clean(err), case
    if code not in (0, 1) or (code == 1 and arguments[0] != "diff" and arguments[0] != "verify"):
        assert [line for line in lines if line.startswith("gopt: error: ")] == lines[:1], case
    return code


def alike(damage: Damage) -> tuple[object, ...]:
    """Damages of entries of one list are alike, past the door."""
    return (damage.kind, *("#" if isinstance(key, int) else key for key in damage.place))


def readers(what: str, damage: Damage) -> tuple[str, ...]:
    """The commands that look at what is damaged, or of damages that are alike at all of them a few."""
    if what == "report" and damage.place[0] not in ("source", "pipeline", "mesh", "ranks"):
        return ("inspect",)
    if damage.kind in ("text", "empty", "markup", "nul", "one", "half") or what == "report":
        return ("inspect", "reshard", "resume")
    return ("inspect", "diff", "merge", "reshard", "verify", "run", "resume")


def some(commands: Mapping[str, list[str]], turn: int, depth: str) -> list[list[str]]:
    """All commands; or one of them at every fourth turn, another each time."""
    listed = list(commands.values())
    return listed if depth == "all" else [] if turn % 4 else [listed[turn // 4 % len(listed)]]


def sweep(world: Path, what: str, name: str, path: Path, check: Check, kind: str, depth: str, capsys) -> None:
    whole = path.read_text(encoding="utf-8")
    document, seen, refused = json.loads(whole), set[tuple[object, ...]](), 0
    try:
        for turn, place in enumerate(places(document), list(KINDS).index(kind)):
            if what == "report" and depth != "all" and turn % 6:
                continue  # it has hundreds of keys: each is damaged in a sixth of all ways
            damage = Damage(place, kind, damaged(document, place, kind))
            path.write_text(damage.text, encoding="utf-8")
            try:
                check(path.parent)
            except GoptError as error:
                assert error.exit_code in (3, 5) and error.message
                refused += 1
                if refused > 1:  # one of them goes through the commands as well
                    continue
            if alike(damage) in seen:
                continue
            seen.add(alike(damage))
            asked = readers(what, damage)
            those = {command: each for command, each in commands(what, name).items() if command in asked}
            for arguments in some(those, len(seen) + list(KINDS).index(kind), depth):
                holds(arguments, what, damage, capsys)
    finally:
        path.write_text(whole, encoding="utf-8")


DEPTHS = ["some", pytest.param("all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("kind", "name"), fewer(spread(KINDS, ["plain", "micro"]), 9))
def test_a_damaged_manifest(name, kind, depth, world, capsys):
    sweep(world, "manifest", name, world / name / "manifest.json", read_manifest, kind, depth, capsys)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", part(KINDS, 6))
def test_a_damaged_report(kind, depth, world, capsys):
    check: Check = lambda folder: read_report(folder, read_manifest(folder)[0])  # noqa: E731
    sweep(world, "report", "plain", world / "plain/report.json", check, kind, depth, capsys)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", part(KINDS, 6, first=1))
def test_a_damaged_manifest_of_checkpoints(kind, depth, world, capsys):
    sweep(world, "kept", "plain", world / "plain.kept/manifest.json", read_manifest, kind, depth, capsys)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("kind", "name"), fewer(spread(KINDS, ["plain", "micro"]), 9))
def test_a_damaged_index(name, kind, depth, world, capsys):
    sweep(world, "index", name, world / f"{name}.kept/step_00000001/index.json", open_index, kind, depth, capsys)


@pytest.mark.parametrize("depth", DEPTHS)
def test_damaged_roles(depth, world, capsys):
    """The role map lies in the metadata of the kept source."""
    path = world / "plain" / "source.onnx"
    whole = path.read_bytes()
    model = onnx.load(path)
    entry = next(each for each in model.metadata_props if each.key == "gopt.roles")
    document, text = json.loads(entry.value), entry.value
    try:
        for turn, damage in enumerate(every(document)):
            if depth != "all" and turn % 5:
                continue
            entry.value = damage.text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
            path.write_bytes(model.SerializeToString())
            try:
                stored_roles(load(path, own=True), path)
            except InputError:
                if damage.kind != "null":
                    continue
            asked = {
                command: each for command, each in commands("roles", "plain").items()
                if command in ("reshard", "verify") or damage.kind == "text"
            }  # fmt: skip
            for arguments in some(asked, turn, depth)[: 9 if depth == "all" else 1]:
                holds(arguments, "roles", damage, capsys)
    finally:
        path.write_bytes(whole)
    assert text == json.dumps(document, ensure_ascii=False)


CONFIGURATION = {
    "accumulate": 2, "mesh": {"shard": 2, "rep": 1}, "axes": {"rep": "replica"},
    "pipeline": {"passes": ["hoist-casts", "shard", "statistics", "fuse-collectives", "overlap", "prune"]},
    "pass": {"shard": {"stage": 1, "bucket-mb": 4.0}, "overlap": {"prefetch": 2}},
    "roles": {"loss": "loss", "params": ["fc1.weight"], "states": {"step": "step_out"}, "batch": ["x", "y"]},
}  # fmt: skip


def toml(value: Any) -> str:
    """A value of TOML in one line; text as JSON has it, which TOML reads as well."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return '""' if value is None else json.dumps(value)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", part(sorted(KINDS.keys() - {"deep", "digits", "twice", "surrogate"}), 6))
def test_a_damaged_configuration(kind, depth, world, capsys):
    model, path = str(FIXTURES / "mlp_adamw.onnx"), world / "gopt.toml"
    readers = {"shard": ["shard", model, "--dry-run", "--json"], "plan": ["plan", model, "--json", "--bucket-mb", "4"]}
    for turn, place in enumerate(places(CONFIGURATION)):
        made = copy.deepcopy(CONFIGURATION)
        owner: Any = made
        for key in place[:-1]:
            owner = owner[key]
        if kind == "gone":
            del owner[place[-1]]
        else:
            owner[place[-1]] = KINDS[kind]
        path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in made.items()), encoding="utf-8")
        damage = Damage(place, kind, path.read_text(encoding="utf-8"))
        both = list(readers.values())
        for arguments in both if depth == "all" else [both[(turn + list(KINDS).index(kind)) % 2]]:
            capsys.readouterr()
            code = main([*arguments, "--config", "gopt.toml"])
            err = capsys.readouterr().err
            case = f"{damage}: {arguments[0]} -> {code}\n{err}"
            assert code in (0, 2, 3, 4), case  # 2 where a name that it may have is none that there is
            assert is_clean(err) and err.count("gopt: error: ") == (code != 0), case
            assert all(len(line.encode()) < 1000 for line in err.splitlines()), case
