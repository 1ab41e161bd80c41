"""``gopt golden``: exit codes, what a change touches, and the action and the hook through their own shell lines."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import onnx
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, ROOT

SHARD = '[case.mlp]\nmodel = "m.onnx"\noptions = {}\n'
FOUR = '["--ranks", "4", "--stage", "1"]'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden of the MLP."""
    found = tmp_path_factory.mktemp("goldens")
    (found / "m.onnx").write_bytes((FIXTURES / "mlp_adamw.onnx").read_bytes())
    (found / "gopt-golden.toml").write_text(SHARD.format(FOUR))
    assert main(["golden", "update", str(found)]) == 0
    assert max(map(len, (found / "golden/mlp.txt").read_text().splitlines())) <= 80
    return found


def _copy(folder: Path, to: Path, options: str = FOUR) -> Path:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    (to / "gopt-golden.toml").write_text(SHARD.format(options))
    return to


def _changed(capsys: pytest.CaptureFixture[str], folder: Path) -> list[str]:
    capsys.readouterr()
    assert main(["golden", "check", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"to accept: gopt golden update {folder}"
    return [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def test_a_hyper_parameter(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _copy(folder, tmp_path)
    model = onnx.load(found / "m.onnx")
    held = next(e for e in model.graph.initializer if onnx.numpy_helper.to_array(e).tolist() == pytest.approx(0.01))
    held.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(held) * 2, held.name))
    onnx.save(model, found / "m.onnx")
    changed = _changed(capsys, found)
    assert "+  update constant float32[] 0.02: read 1 times" in changed and len(changed) <= 12


@pytest.mark.parametrize(
    "options", ['["--ranks", "8", "--stage", "1"]', '["--ranks", "4", "--stage", "1", "--bucket-mb", "0.01"]']
)
def test_an_option(folder: Path, tmp_path: Path, options: str, capsys: pytest.CaptureFixture[str]) -> None:
    changed = _changed(capsys, _copy(folder, tmp_path, options))
    assert changed[0].startswith(("-  --ranks", "+  --bucket-mb")) and len(changed) <= 60


def test_names_and_order_do_not_count(folder: Path, tmp_path: Path) -> None:
    found = _copy(folder, tmp_path)
    model = onnx.load(found / "m.onnx")
    kept = {each.name for each in (*model.graph.input, *model.graph.output)}
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [name if name in kept or not name else f"other.{name}" for name in names]
    for each in (*model.graph.initializer, *model.graph.value_info):
        each.name = each.name if each.name in kept else f"other.{each.name}"
    states = [each for each in model.graph.initializer if each.name in kept]  # their order is the order of buckets
    shuffled = [each for each in model.graph.initializer if each.name not in kept]
    random.Random(0).shuffle(shuffled)
    del model.graph.initializer[:]
    model.graph.initializer.extend([*shuffled, *states])
    onnx.save(model, found / "m.onnx")
    assert main(["golden", "check", str(found)]) == 0


def test_missing_and_extra(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _copy(folder, tmp_path)
    (found / "golden/mlp.txt").rename(found / "golden/old.txt")
    assert main(["golden", "check", str(found)]) == 1
    assert {"missing: golden/mlp.txt", "extra: golden/old.txt: no case asks for it"} <= set(
        capsys.readouterr().out.splitlines()
    )
    assert main(["golden", "update", str(found)]) == 0
    assert [path.name for path in (found / "golden").iterdir()] == ["mlp.txt"]


def test_json(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _copy(folder, tmp_path)
    nothing: dict[str, object] = {"differing": {}, "missing": [], "extra": []}

    def result(command: str, code: int) -> dict[str, object]:
        capsys.readouterr()
        assert main(["golden", command, str(found), "--json"]) == code
        record: dict[str, object] = json.loads(capsys.readouterr().out)
        assert record.pop("format") == f"gopt-golden-{command}/1"
        return record

    assert result("check", 0) == {"equal": True, **nothing}
    assert result("update", 0) == {"added": [], "changed": [], "removed": []}
    _copy(folder, tmp_path, FOUR.replace("4", "2"))
    differing = result("check", 1)["differing"]
    assert isinstance(differing, dict) and list(differing) == ["mlp.txt"] and "+  --ranks 2" in differing["mlp.txt"]
    (found / "golden/mlp.txt").rename(found / "golden/old.txt")
    assert result("check", 1) == {"equal": False, **nothing, "missing": ["mlp.txt"], "extra": ["old.txt"]}
    assert result("update", 0) == {"added": ["mlp.txt"], "changed": [], "removed": ["old.txt"]}


def test_what_gopt_did_not_write_stays(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _copy(folder, tmp_path)
    (found / "golden/own.txt").write_text("not written by gopt\n")
    assert main(["golden", "update", str(found)]) == 2
    assert f"{found}/golden/own.txt was not written by gopt golden" in capsys.readouterr().err
    assert (found / "golden/own.txt").read_text() == "not written by gopt\n"


def test_sections_that_are_kept(folder: Path, tmp_path: Path) -> None:
    found = _copy(folder, tmp_path, f'{FOUR}\nkeep = ["calls", "ranks"]')
    assert main(["golden", "update", str(found)]) == 0
    lines = (found / "golden/mlp.txt").read_text().splitlines()
    assert [line for line in lines[1:] if line and line[0] != " "] == ["asked", "ranks", "calls"]


def test_a_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '["--trainers", "2", "--servers", "{}"]\ncommand = "split"'
    (tmp_path / "m.onnx").write_bytes((FIXTURES / "mlp_sgd.onnx").read_bytes())
    (tmp_path / "gopt-golden.toml").write_text(SHARD.format(text.format(2)))
    assert main(["golden", "update", str(tmp_path)]) == 0 == main(["golden", "check", str(tmp_path)])
    (tmp_path / "gopt-golden.toml").write_text(SHARD.format(text.format(3)))
    assert _changed(capsys, tmp_path)[:2] == ["-  --servers 2", "+  --servers 3"]


@pytest.mark.parametrize(
    ("text", "code"), [(None, 3), ("[case", 3), (SHARD.format('["--dry-run", "--ranks", "2"]'), 2)]
)
def test_refusals(tmp_path: Path, text: str | None, code: int) -> None:
    if text is not None:
        (tmp_path / "gopt-golden.toml").write_text(text)
    assert main(["golden", "check", str(tmp_path)]) == code


def _shell(line: str, **more: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **more}
    return subprocess.run(["bash", "-e", "-c", line], env=environment, capture_output=True, text=True, check=False)


def test_action(folder: Path, tmp_path: Path) -> None:
    line = textwrap.dedent((ROOT / "action.yml").read_text().rpartition("run: |\n")[2])
    summary = tmp_path / "summary.md"
    (tmp_path / "case").mkdir()
    found = _copy(folder, tmp_path / "case", '["--ranks", "2"]')
    done = _shell(line, FOLDER=str(found), GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == 1, done.stderr
    assert "to accept: gopt golden update" in done.stdout and summary.read_text().startswith("```diff\n")


def test_hook(folder: Path) -> None:
    lines = (ROOT / ".pre-commit-hooks.yaml").read_text().splitlines()
    (entry,) = [line.partition("entry: ")[2] for line in lines if "entry: " in line]
    done = _shell(f"{entry} {folder}")
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
    (pattern,) = [line.partition("files: ")[2] for line in lines if "files: " in line]
    files = [str(each.relative_to(folder.parent)) for each in folder.rglob("*") if each.is_file()]
    assert len(files) > 2 and all(re.search(pattern, each) for each in files)
