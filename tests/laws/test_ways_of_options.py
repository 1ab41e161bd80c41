"""A drawn setting by options, by a gopt.toml, by ``--pipeline``, by several processes, for some ranks, and with
placements in the source: the ranks have equal bytes, and refusals equal words."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from gopt.cli.main import main
from helpers import stage_on
from option_gen.make import Setting, written
from products import part

from gopt.passes import DEFAULT

RANK = 1


def shard(step: Path, out: Path, *words: str) -> tuple[int, str]:
    """The exit code, and the message of an error without hints."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(["shard", str(step), *words, "-o", str(out)])
    return code, said.getvalue().partition("hint:")[0]


def passes_of(setting: Setting) -> dict[str, dict[str, object]]:
    """The passes in order, each with its options."""
    passes = {name: dict(options) for name, options in setting.passes.items()}
    stage = stage_on(setting.mesh, setting.stage)
    if stage is not None:
        passes["shard"] = {"stage": stage, **passes.get("shard", {})}
    if setting.schedule:
        passes["pipeline"] = {"schedule": setting.schedule}
    names = list(DEFAULT)
    names.insert(names.index("overlap"), "recompute")
    return {
        name: passes.get(name, {})
        for name in (*names, "offload")
        if name in DEFAULT or name in passes
    }  # fmt: skip


def toml(setting: Setting) -> str:
    passes = passes_of(setting)
    lines = [f"accumulate = {setting.accumulate}", "[mesh]", *setting.mesh.replace("=", " = ").split(",")]
    lines += ["[pipeline]", f"passes = {json.dumps(list(passes))}"]
    for name, options in passes.items():
        lines += [f"[pass.{name}]", *(f"{option} = {json.dumps(value)}" for option, value in options.items())]
    return "\n".join(lines)


def pipeline(setting: Setting) -> list[str]:
    texts = []
    for name, options in passes_of(setting).items():
        words = [f"{option}={value!s}" for option, value in options.items()]
        texts.append(f"{name}{{{','.join(words)}}}")
    return ["--mesh", setting.mesh, "--accumulate", str(setting.accumulate), "--pipeline", ",".join(texts)]


def files(folder: Path) -> dict[str, bytes]:
    """All that ranks run: what a way writes besides tells the way."""
    return {path.name: path.read_bytes() for path in folder.glob("rank_*")} | {
        "schedule": b"".join(path.read_bytes() for path in folder.glob("schedule.txt"))
    }


@pytest.mark.parametrize("seed", part(range(1000, 1100), 3))
def test_every_way_to_say_a_setting_writes_equal_ranks(seed, tmp_path):
    setting = Setting.draw(seed)
    step = setting.file(tmp_path)
    if setting.schedule:
        setting = replace(setting, schedule=written(setting.schedule, tmp_path))
    (tmp_path / "gopt.toml").write_text(toml(setting))
    ways = {
        "toml": ["--config", str(tmp_path / "gopt.toml")], "pipeline": pipeline(setting),
        "jobs": [*setting.words(), "--jobs", "2"], "annotate": [*setting.words(), "--annotate"],
        "some": [*setting.words(), "--only-ranks", str(RANK)],
    }  # fmt: skip
    due, expected = shard(step, tmp_path / "due", *setting.words()), None
    for way, words in ways.items():
        found = shard(step, tmp_path / way, *words)
        assert found == due or (due[0] == 0 and found[0] == 0), (way, found, due)
        if due[0] == 0:
            expected = expected or files(tmp_path / "due")
            ranks = files(tmp_path / way)
            if way == "some":
                assert any(name.startswith(f"rank_{RANK:04}") for name in ranks)
                assert ranks == {name: expected[name] for name in ranks}
            else:
                assert ranks == expected, way
