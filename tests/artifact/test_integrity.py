"""One bit of any file of a folder or a checkpoint: every command that reads it names the file."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from gopt.cli.main import main
from helpers import FIXTURES
from products import part

import gopt
from gopt.artifact.integrity import FileEntry, Inventory, check_files, check_seal, is_unchecked, sealed
from gopt.artifact.json_writer import pretty_json
from gopt.errors import InputError, NoteWarning

STEP = "fixtures/mlp_adamw.onnx"
SEED = random.SystemRandom().randrange(1 << 30)
"""Other bits in every run; a failure shows it."""
MAKES = {
    "sharded": ["shard", STEP, "--ranks", "2", "--accumulate", "2"],
    "split": ["split", STEP, "--trainers", "2", "--servers", "1"],
    "async": ["split", STEP, "--trainers", "2", "--servers", "1", "--mode", "async"],
    "geo": ["split", STEP, "--trainers", "3", "--servers", "2", "--mode", "geo"],
    "meshed": ["shard", STEP, "--mesh", "shard=2,tp=2", "--stage", "2"],
}
READ_ALL = {
    "text": ["inspect", "DIR", "--text"],
    "verify": ["verify", "DIR"],
    "run": ["run", "DIR", "--data", "samples.npz", "--steps", "1", "--set", "lr=1e-3"],
    "merge": ["merge", "DIR", "-o", "merged.onnx", "--force"],
    "reshard": ["reshard", "DIR", "--ranks", "3", "-o", "other", "--force"],
    "diff": ["diff", "DIR", "DIR"],
}
READ_GRAPHS = {
    "inspect": ["inspect", "DIR"],
    "explain": ["explain", "DIR", "fc1.weight"],
    "report": ["report", "DIR", "--html", "page.html", "--force"],
}
READ_STEP = {
    "merge": ["merge", "STEP", "-o", "merged.onnx", "--force"],
    "state-dict": ["merge", "STEP", "--state-dict", "values.safetensors", "--force"],
    "reshard": ["reshard", "STEP", "--ranks", "3", "-o", "other", "--force"],
    "diff": ["diff", "STEP", "STEP"],
    "resume": [
        "run", "DIR", "--data", "samples.npz", "--steps", "4", "--set", "lr=1e-3", "--checkpoint", "kept", "--resume",
    ],
}  # fmt: skip
RESTORED = {"manifest.json", "report.json", "source.onnx"}
"""Files beside the steps that a run which resumes writes again, and does not read."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of every kind, with a checkpoint each."""
    root = tmp_path_factory.mktemp("made")
    draw = np.random.default_rng(0)
    np.savez(root / "samples.npz", x=draw.standard_normal((64, 32), dtype=np.float32), y=draw.integers(0, 10, 64))
    with pytest.MonkeyPatch.context() as patch:
        (root / "fixtures").symlink_to(FIXTURES)
        patch.chdir(root)
        for kind, command in MAKES.items():
            assert main([*command, "-o", kind]) == 0
            run = ["run", kind, "--data", "samples.npz", "--steps", "2", "--set", "lr=1e-3"]
            assert main([*run, "--checkpoint", f"{kind}.kept"]) == 0
    return root


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True, symlinks=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def flipped(path: Path, draw: random.Random) -> Iterator[int]:
    """Flip a drawn bit, and put the file back."""
    data = path.read_bytes()
    bit = draw.randrange(8 * len(data))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    yield bit
    path.write_bytes(data)


def filled(command: list[str], kind: str) -> list[str]:
    """A command for a folder; a job of one kind of checkpoint continues it."""
    places = {"DIR": kind, "STEP": f"{kind}.kept/step_00000002", "kept": f"{kind}.kept"}
    return [places.get(each, each) for each in command]


def refused(command: list[str], path: Path, capsys: pytest.CaptureFixture[str], told: str) -> None:
    capsys.readouterr()
    code, said = main(command), capsys.readouterr().err
    assert code in (3, 5), (told, code, said)
    assert path.name in said, (told, said)


@pytest.mark.parametrize("kind", part(MAKES, keep=1))
def test_a_flipped_bit_of_a_folder_is_noticed_by_every_command(
    home: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    draw = random.Random(SEED)
    names = sorted(path.name for path in Path(kind).iterdir())
    assert {"manifest.json", "report.json", "source.onnx", "states.bin"} < {*names}
    for name in names:
        commands = READ_ALL | ({} if name == "states.bin" else READ_GRAPHS)
        with flipped(Path(kind, name), draw) as bit:
            for command in commands.values():
                told = f"seed {SEED}: bit {bit} of {name}: {' '.join(command)}"
                refused(filled(command, kind), Path(kind, name), capsys, told)


@pytest.mark.parametrize("kind", part(MAKES, keep=2))
def test_a_flipped_bit_of_a_checkpoint_is_noticed_by_every_command(
    home: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    draw = random.Random(SEED)
    kept = Path(f"{kind}.kept")
    files = [path for path in sorted(kept.rglob("*")) if path.is_file() and path.name != ".gopt.lock"]
    assert len(files) >= 6
    for path in files:
        with flipped(path, draw) as bit:
            for name, command in READ_STEP.items():
                if name == "resume" and path.parent == kept and path.name in RESTORED:
                    continue
                told = f"seed {SEED}: bit {bit} of {path}: {' '.join(command)}"
                refused(filled(command, kind), path, capsys, told)


@pytest.mark.parametrize("kind", part(MAKES, keep=1, first=3))
def test_a_flipped_bit_is_taken_unchecked_and_once_sealed(
    home: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Unchecked a command ends as it does once the file is sealed: a bit of a value is a value, one of a graph may be
    refused."""
    draw = random.Random(SEED)
    merge = filled(["merge", "DIR", "-o", "merged.onnx", "--force"], kind)
    for name in sorted(path.name for path in Path(kind).iterdir() if path.name != "manifest.json"):
        with flipped(Path(kind, name), draw) as bit:
            told = f"seed {SEED}: bit {bit} of {name}"
            code = main([*merge, "--unchecked"])
            assert code in (0, 3, 4, 5) and (name != "states.bin" or code == 0), (told, capsys.readouterr().err)
            merged = Path("merged.onnx").read_bytes() if code == 0 else b""
            assert main(["seal", kind]) == 0, (told, capsys.readouterr().err)
            assert main(merge) == code, (told, capsys.readouterr().err)
            assert code or Path("merged.onnx").read_bytes() == merged, told
        assert main(merge) == 3, name
        assert main(["seal", kind]) == main(merge) == 0, name


def test_an_edited_folder_is_read_unchecked_and_once_sealed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("sharded/report.json")
    path.write_text(path.read_text().replace('"notes": [', '"notes":  [', 1))
    assert main(["inspect", "sharded"]) == 3
    assert "if you have edited it: gopt seal sharded" in capsys.readouterr().err
    assert main(["inspect", "sharded", "--unchecked"]) == 0
    with gopt.unchecked():
        gopt.inspect("sharded")
    capsys.readouterr()
    assert main(["seal", "sharded", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["changed"], told["path"]) == (["report.json"], "sharded/manifest.json")
    assert main(["inspect", "sharded"]) == 0
    assert gopt.verify("sharded").equal


def test_no_terabyte_of_a_model_is_sealed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("sharded/source.onnx").open("wb") as file:
        file.truncate(1 << 40)
    assert main(["seal", "sharded"]) == 3
    assert "sharded/source.onnx: 1099511627776 bytes: a protobuf file has at most 2 GiB" in capsys.readouterr().err


def test_a_step_of_another_run_is_refused_until_it_is_sealed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume = filled(READ_STEP["resume"], "sharded")
    again = [*resume[:-3], "--checkpoint", "second.kept"]
    again[again.index("4")] = "3"
    assert main(again) == 0
    shutil.copytree("second.kept/step_00000003", "sharded.kept/step_00000003")
    merge = ["merge", "sharded.kept/step_00000003", "-o", "merged.onnx"]
    for command in (merge, resume):
        capsys.readouterr()
        assert main(command) == 5
        assert "sharded.kept/step_00000003 is of another run" in capsys.readouterr().err
    assert main(["seal", "sharded.kept/step_00000003"]) == 0
    assert main(merge) == main(resume) == 0


def test_blocks_without_a_comparison_may_end_in_any_order() -> None:
    first, second = gopt.unchecked(), gopt.unchecked()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_unchecked()
    second.__exit__(None, None, None)
    assert not is_unchecked()


def test_a_damaged_manifest_beside_the_steps_is_restored_with_the_run_of_the_steps(home: Path) -> None:
    path = Path("sharded.kept/manifest.json")
    before = path.read_bytes()
    path.write_bytes(before[:-3])
    assert main(filled(READ_STEP["resume"], "sharded")) == 0
    assert json.loads(path.read_bytes())["run"] == json.loads(before)["run"]


def test_a_folder_without_digests_is_read_with_a_note(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("sharded/manifest.json")
    record = json.loads(path.read_bytes())
    del record["files"], record["seal"]
    path.write_text(json.dumps(record))
    assert main(["verify", "sharded"]) == 0
    assert capsys.readouterr().err.count("sharded has no digests: an older gopt wrote it. gopt seal sharded") == 1
    with pytest.warns(NoteWarning, match="gopt seal sharded"):
        gopt.inspect("sharded")
    assert gopt.seal("sharded").files == len(list(Path("sharded").iterdir())) - 1
    assert main(["verify", "sharded"]) == 0
    assert "digests" not in capsys.readouterr().err


def test_a_missing_file_is_left_to_its_reader(tmp_path: Path) -> None:
    check_files(tmp_path, {"gone": FileEntry(1, "0" * 64)})


def test_an_inventory_knows_what_was_written(tmp_path: Path) -> None:
    files, data = Inventory(tmp_path), bytes(range(256)) * 8192
    with files.create("a") as file:
        file.writelines([b"head", memoryview(data), b""])
    assert files.files == {"a": FileEntry.of(b"head" + data)} == {"a": FileEntry.of_file(tmp_path / "a")}
    check_files(tmp_path, files.files)
    (tmp_path / "a").write_bytes(b"head" + data + b".")
    with pytest.raises(InputError, match="edited or damaged \\(2097157 bytes instead of 2097156\\)"):
        check_files(tmp_path, files.files)


def test_a_seal_is_of_every_byte_before_it(tmp_path: Path) -> None:
    text = sealed(pretty_json({"a": 1}), {"f": FileEntry(1, "0" * 64)})
    seal = json.loads(text)["seal"]
    check_seal(text.encode(), "name", seal, tmp_path)
    for wrong in (text + "\n", text.replace(": 1", ":  1", 1), text[:-1]):
        with pytest.raises(InputError, match="name is not what gopt wrote"):
            check_seal(wrong.encode(), "name", seal, tmp_path)
