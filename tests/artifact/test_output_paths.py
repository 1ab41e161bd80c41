"""What ``--force`` may replace, where outputs may lie, and that nothing beside them is touched."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from gopt.cli.main import main
from helpers import FIXTURES

import gopt.offline.merge as merging
import gopt.system.staging as draft_module
from gopt.artifact import output_paths
from gopt.errors import OptionError
from gopt.system import rename

MODEL = str(FIXTURES / "mlp_sgd.onnx")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["shard", MODEL, "--ranks", "2", "-o", "out"]) == 0


def shard(*more: str) -> int:
    return main(["shard", MODEL, "--ranks", "3", "-o", "out", *more])


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(code: int, capsys: pytest.CaptureFixture[str], *words: str) -> None:
    error = capsys.readouterr().err
    assert code == 2, error
    [line] = [each for each in error.splitlines() if each.startswith("gopt: error:")]
    assert all(word in line for word in words), line


# --- what --force replaces ------------------------------------------------------------------------------------------


def test_a_folder_of_somebody_else_with_a_manifest_stays(capsys):
    web = Path("web")
    web.mkdir()
    (web / "manifest.json").write_text('{"name": "a site", "start_url": "/"}')
    (web / "index.html").write_text("work of years")
    kept = content(web)
    refused(main(["shard", MODEL, "--ranks", "2", "-o", "web", "--force"]), capsys, "web", "was not written by gopt")
    assert content(web) == kept


@pytest.mark.parametrize("damage", ["{", "[" * 100_000, '{"format": "gopt-report/1"}', "null"])
def test_a_folder_whose_manifest_says_nothing_stays(damage, capsys):
    Path("out/manifest.json").write_text(damage)
    refused(shard("--force"), capsys, "was not written by gopt")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda record: record.clear(), "the key 'mesh' is missing"),
        (lambda record: record.pop("states"), "the key 'states' is missing"),
        (lambda record: record["ranks"].append(record["ranks"][0]), "ranks[2].rank"),
        (lambda record: record["ranks"][0].update(files={"step": "../rank_0000.onnx"}), "files.step"),
    ],
)
def test_a_manifest_that_gopt_would_not_read_vouches_for_nothing(change, said, capsys):
    record = json.loads(Path("out/manifest.json").read_text())
    change(record)
    Path("out/manifest.json").write_text(json.dumps(record | {"format": "gopt-manifest/1"}))
    Path("out/source.onnx").write_text("my thesis")
    kept = content(Path("out"))
    for command in (["shard", MODEL], ["reshard", "other"]):
        main(["shard", MODEL, "--ranks", "2", "-o", "other"])
        capsys.readouterr()
        code = main([*command, "--ranks", "3", "-o", "out", "--force"])
        refused(code, capsys, "out is not a valid output folder", "manifest.json", said)
    assert content(Path("out")) == kept


@pytest.mark.parametrize("name", ["notes.txt", "rank_0007.onnx", "model.onnx", "e\x1b[31m"])
def test_an_unknown_entry_is_named(name, capsys):
    Path("out", name).write_text("mine")
    refused(shard("--force"), capsys, repr(name))
    assert Path("out", name).read_text() == "mine"


def test_checkpoints_inside_stay(capsys):
    kept = Path("out/ck/step_00000002")
    kept.mkdir(parents=True)
    (kept / "index.json").write_text('{"format": "gopt-checkpoint/1"}')
    refused(shard("--force"), capsys, "'ck'")
    shutil.move("out/ck", "ck")
    shutil.copy("out/manifest.json", "ck")
    refused(main(["shard", MODEL, "--ranks", "2", "-o", "ck", "--force"]), capsys, "ck holds checkpoints")
    refused(main(["reshard", "out", "--ranks", "3", "-o", "ck/new"]), capsys, "ck", "a folder of checkpoints")


def test_an_entry_that_is_no_file_stays(capsys):
    Path("out/report.json").unlink()
    Path("out/report.json").symlink_to(Path("elsewhere").absolute())
    refused(shard("--force"), capsys, "'report.json'")


def test_a_link_to_a_folder_is_not_replaced(capsys):
    Path("out").rename("real")
    Path("out").symlink_to("real")
    refused(shard("--force"), capsys, "out is a link")
    refused(shard(), capsys, "exists already")


def test_the_folder_that_a_command_runs_in_is_not_replaced(capsys, monkeypatch):
    monkeypatch.chdir("out")
    refused(main(["shard", MODEL, "--ranks", "2", "-o", ".", "--force"]), capsys, "runs in")


def test_a_manifest_is_checked_once_for_a_command(monkeypatch):
    """It is looked at before the work and on both sides of the exchange, and checking it costs more than writing."""
    checked = []
    real = output_paths.parse_manifest
    monkeypatch.setattr(output_paths, "parse_manifest", lambda data, name: checked.append(name) or real(data, name))
    manifest = Path("out/manifest.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()), indent=3))  # bytes that no test has checked yet
    assert shard("--force") == 0
    assert len(checked) == 1


def test_a_manifest_that_is_damaged_meanwhile_is_checked_anew(capsys, monkeypatch):
    real = rename.exchange

    def damage(one: Path, other: Path) -> None:
        manifest = Path("out/manifest.json")
        record = json.loads(manifest.read_text())
        if len(record["ranks"]) == 2:
            manifest.write_text(json.dumps(record | {"ranks": [record["ranks"][0]] * 2}))
        real(one, other)

    monkeypatch.setattr(draft_module, "exchange", damage)
    refused(shard("--force"), capsys, "out is not a valid output folder", "ranks[1].rank")
    assert len(json.loads(Path("out/manifest.json").read_text())["ranks"]) == 2


def test_what_comes_meanwhile_stays(capsys, monkeypatch):
    """Between the check and the exchange: the old folder is looked at again when it is out of the way."""
    real = rename.exchange

    def late(one: Path, other: Path) -> None:
        if not Path("out/late").exists() and not (one / "late").exists():
            Path("out/late").write_text("mine")
        real(one, other)

    monkeypatch.setattr(draft_module, "exchange", late)
    kept = content(Path("out"))
    refused(shard("--force"), capsys, "'late'")
    assert content(Path("out")) == kept | {"late": b"mine"}
    assert os.listdir() == ["out"]


def test_reshard_in_place():
    assert main(["reshard", "out", "--ranks", "3", "-o", "again"]) == 0
    assert main(["reshard", "out", "--ranks", "3", "-o", "out", "--force"]) == 0
    assert content(Path("out")) == content(Path("again"))


# --- where outputs lie ----------------------------------------------------------------------------------------------


@pytest.fixture
def beside():
    """``link/..`` is ``else``, and not the folder in which the link lies."""
    Path("else/dir").mkdir(parents=True)
    Path("link").symlink_to("else/dir")


def test_a_path_through_a_link_is_the_systems(beside):
    kept = content(Path("out"))
    for name in ("out", "again"):
        assert main(["shard", MODEL, "--ranks", "3", "-o", f"link/../{name}"]) == 0
        assert content(Path("out")) == kept and Path("else", name, "manifest.json").is_file()
    assert main(["reshard", "out", "--ranks", "3", "-o", "link/../out", "--force"]) == 0
    assert main(["reshard", "out", "--ranks", "3", "-o", "link/../new"]) == 0
    Path("m.onnx").write_text("mine")
    assert main(["merge", "out", "-o", "link/../m.onnx"]) == 0
    assert Path("m.onnx").read_text() == "mine"
    assert content(Path("out")) == kept
    assert sorted(os.listdir("else")) == ["again", "dir", "m.onnx", "new", "out"]


def test_what_stands_there_is_looked_for_where_it_is_written(beside, capsys):
    assert main(["reshard", "out", "--ranks", "3", "-o", "else/out"]) == 0
    Path("else/m.onnx").write_text("mine")
    refused(main(["shard", MODEL, "--ranks", "2", "-o", "link/../out"]), capsys, "link/../out", "exists already")
    refused(main(["reshard", "out", "--ranks", "2", "-o", "link/../out"]), capsys, "link/../out", "exists already")
    refused(main(["merge", "out", "-o", "link/../m.onnx"]), capsys, "link/../m.onnx", "exists already")
    refused(main(["merge", "out", "-o", "link/../out/m.onnx"]), capsys, "an output folder")
    for command in (["shard", MODEL, "--ranks", "2"], ["reshard", "out", "--ranks", "2"], ["merge", "out"]):
        assert main([*command, "-o", "missing/../out"]) == 5
        assert "cannot write missing/../out: No such file or directory" in capsys.readouterr().err


def test_the_last_name_is_not_followed(beside, capsys):
    Path("else/l").symlink_to("dir")
    refused(main(["shard", MODEL, "--ranks", "2", "-o", "link/../l", "--force"]), capsys, "link/../l is a link")
    refused(main(["shard", MODEL, "--ranks", "2", "-o", "link", "--force"]), capsys, "link is a link")


def test_no_output_lies_inside_of_another(capsys):
    refused(main(["reshard", "out", "--ranks", "3", "-o", "out/new"]), capsys, "out", "an output folder")
    refused(main(["shard", MODEL, "--ranks", "3", "-o", "out/a/b"]), capsys, "an output folder")
    for name in ("rank_0000.onnx", "source.onnx", "new.onnx"):
        refused(main(["merge", "out", "-o", f"out/{name}", "--force"]), capsys, "out", "output folder")
    assert sorted(os.listdir("out")) == [
        "manifest.json", "rank_0000.onnx", "rank_0001.onnx", "report.json", "source.onnx", "states.bin",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["folder", "link", "device"])
def test_merge_replaces_files_alone(kind, capsys):
    target = Path("m.onnx")
    if kind == "folder":
        target.mkdir()
    else:
        target.symlink_to("kept.onnx") if kind == "link" else os.mkfifo(target)
    refused(main(["merge", "out", "-o", "m.onnx", "--force"]), capsys, "m.onnx", "only files")
    assert not Path("kept.onnx").exists()


# --- nothing else is written ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o027, 0o002])
def test_the_umask_holds(mask, monkeypatch):
    monkeypatch.setattr(merging, "EMBED", 0)
    before = os.umask(mask)
    try:
        assert main(["shard", MODEL, "--ranks", "2", "-o", "new/out"]) == 0
        assert shard("--force") == 0
        assert main(["merge", "out", "-o", "m.onnx"]) == 0
    finally:
        os.umask(before)
    for path in (Path("new"), Path("new/out"), Path("out"), *Path("out").iterdir(), *Path().glob("m.onnx*")):
        wanted = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == wanted & ~mask, path


def test_a_name_as_long_as_a_file_system_takes():
    name = "é" * 120 + ".ranks"
    assert main(["shard", MODEL, "--ranks", "2", "-o", name]) == 0
    assert main(["shard", MODEL, "--ranks", "2", "-o", name, "--force"]) == 0
    assert sorted(os.listdir()) == sorted(["out", name])


@pytest.mark.parametrize("what", ["fifo", "file", "link", "other folder", "folder of gopt", "empty folder"])
def test_force_is_offered_where_it_replaces(what, tmp_path):
    target = tmp_path / "there"
    if what == "fifo":
        os.mkfifo(target)
    elif what == "file":
        target.write_text("mine")
    elif what == "link":
        target.symlink_to(tmp_path)
    elif what == "folder of gopt":
        shutil.copytree("out", target)
    else:
        target.mkdir()
        if what == "other folder":
            (target / "notes.txt").write_text("mine")
    with pytest.raises(OptionError) as caught:
        output_paths.check_output_folder(target, force=False)
    offered = "replace it with --force" in caught.value.hints[0]
    assert offered is (what in ("folder of gopt", "empty folder"))
    if offered:
        output_paths.check_output_folder(target, force=True)
    else:
        with pytest.raises(OptionError):
            output_paths.check_output_folder(target, force=True)
