"""One thing given where another belongs: which command takes it; and what two checkpoints differ in."""

from __future__ import annotations

from pathlib import Path

import pytest
from gopt.cli.main import main
from helpers import FIXTURES
from test_run import samples, train, written

from gopt.errors import InputError, OptionError, RunError
from gopt.offline.diff import diff

MODEL = str(FIXTURES / "mlp_adamw.onnx")
RUN = ("--data", "x.npz", "--steps", "1")
HINTS = {
    "model": "shard it first: gopt shard",
    "rank": "it is a part of one: give {folder}",
    "part": "it is a part of one: give {step}",
    "home": "gopt run DIR --data FILE --steps N --checkpoint {home} --resume",
    "step": "gopt reshard {step} --ranks N",
    "nowhere": "make one with gopt shard",
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    """An output folder, checkpoints of steps 2 and 4, and what lies in them."""
    top = tmp_path_factory.mktemp("given")
    folder = written(top)
    train(folder, samples(top), 4, checkpoint=top / "c", every=2)
    step = top / "c" / "step_00000004"
    return {
        "model": Path(MODEL), "folder": folder, "rank": folder / "rank_0000.onnx", "home": top / "c", "step": step,
        "part": step / "rank_0000.safetensors", "nowhere": top / "nowhere", "other": top,
    }  # fmt: skip


def said(arguments: list[str], capsys, code: int = 3) -> str:
    capsys.readouterr()
    assert main(arguments) == code
    found = capsys.readouterr().err
    assert found.count("gopt: error:") == 1 and found.count("  hint: ") >= 1, found
    return found


@pytest.mark.parametrize("what", HINTS)
@pytest.mark.parametrize("command", [("run", *RUN), ("run", "--launch", "2", *RUN), ("verify",)])
def test_where_an_output_folder_belongs(command, what, paths, capsys):
    text = said([command[0], str(paths[what]), *command[1:]], capsys)
    assert HINTS[what].format(**paths) in text and "is not an output folder" in text


@pytest.mark.parametrize("command", [("merge", "-o", "no.onnx"), ("reshard", "--ranks", "3", "-o", "no.ranks")])
@pytest.mark.parametrize("what", ["model", "rank", "part", "home", "nowhere"])
def test_where_an_output_folder_or_a_checkpoint_belongs(command, what, paths, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    hint = {"home": "name one: {step} is the newest", "nowhere": "or a checkpoint of gopt run"}.get(what, HINTS[what])
    assert hint.format(**paths) in said([command[0], str(paths[what]), *command[1:]], capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [("shard", "--ranks", "2", "-o", "no.ranks"), ("plan", "--ranks", "2")])
@pytest.mark.parametrize(
    ("what", "hint"),
    [
        ("folder", "gopt reshard {folder} makes other ranks"), ("home", "gopt merge {step} -o MODEL"),
        ("step", "gopt merge {step} -o MODEL"),
    ],
)  # fmt: skip
def test_where_a_model_belongs(command, what, hint, paths, capsys):
    assert hint.format(**paths) in said([command[0], str(paths[what]), *command[1:]], capsys)


@pytest.mark.parametrize("what", ["home", "step"])
def test_inspect_shows_a_checkpoint_as_one_and_says_what_makes_ranks_of_it(what, paths, capsys):
    assert main(["inspect", str(paths[what])]) == 0
    shown = capsys.readouterr().out
    assert " of gopt: after step " in shown and f"gopt reshard {paths['step']} --ranks N -o DIR" in shown


def test_verify_the_wrong_way_round(paths, capsys):
    text = said(["verify", str(paths["folder"]), MODEL], capsys, 2)
    assert f"gopt verify {MODEL} {paths['folder']}" in text


def test_force_spares_checkpoints(paths, capsys):
    before = sorted(paths["home"].rglob("*"))
    assert "holds checkpoints" in said(["shard", MODEL, "--ranks", "2", "-o", str(paths["home"]), "--force"], capsys, 2)
    assert sorted(paths["home"].rglob("*")) == before


def test_a_checkpoint_is_merged_from_its_own_folder(paths, monkeypatch, tmp_path):
    monkeypatch.chdir(paths["step"])
    assert main(["merge", ".", "-o", str(tmp_path / "a.onnx")]) == 0
    assert main(["merge", str(paths["step"]), "-o", str(tmp_path / "b.onnx")]) == 0
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


# --- diff -----------------------------------------------------------------------------------------------------------


def test_checkpoints_are_compared_by_value(paths, tmp_path, capsys):
    first, last = paths["home"] / "step_00000002", paths["step"]
    assert diff(last, last).equal
    result = diff(first, last)
    assert [line.text for line in result.lines if line.kind == "record"] == ["step: 2 -> 4"]
    changed = {line.text.partition(":")[0] for line in result.lines if line.kind == "value"}
    assert changed >= {"%w0", "%w1"} and len(changed) + 1 == len(result.lines)
    assert main(["diff", str(first), str(last)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"not equal: {len(result.lines)} differences (1 record, {len(changed)} value)"
    )
    for name, step in (("a", first), ("b", last)):
        assert main(["merge", str(step), "-o", str(tmp_path / f"{name}.onnx")]) == 0
    models = diff(tmp_path / "a.onnx", tmp_path / "b.onnx")
    assert {line.text for line in models.lines} == {line.text for line in result.lines if line.kind == "value"}


def test_the_same_values_on_other_ranks(tmp_path):
    """One element in another place would be told; the ranks that wrote it are, and no more."""
    data = samples(tmp_path)
    train(written(tmp_path, "shard=2"), data, 1, checkpoint=tmp_path / "a", every=1)
    other = written(tmp_path, "dp=2", stage=0)
    train(other, data, 1, checkpoint=tmp_path / "b", every=1)
    result = diff(tmp_path / "a" / "step_00000001", tmp_path / "b" / "step_00000001")
    assert [line.text for line in result.lines] == ["mesh: shard=2 -> dp=2"]


def test_what_diff_cannot_compare(paths, capsys):
    with pytest.raises(InputError, match="holds 2 checkpoints") as caught:
        diff(paths["home"], paths["home"])
    assert caught.value.hints == (f"name one: {paths['step']} is the newest",)
    for a, b in (("step", "folder"), ("folder", "step"), ("model", "step")):
        with pytest.raises(OptionError, match="not one of each"):
            diff(paths[a], paths[b])


def test_a_damaged_checkpoint_is_no_equal_one(tmp_path):
    train(written(tmp_path), samples(tmp_path), 2, checkpoint=tmp_path / "c")
    step = tmp_path / "c" / "step_00000002"
    victim = step / "rank_0001.safetensors"
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.write_bytes(raw)
    with pytest.raises(RunError, match="damaged"):
        diff(step, step)


def test_a_missing_step_names_the_nearest(paths, capsys):
    text = said(["merge", str(paths["home"] / "step_00000003"), "-o", "no.onnx"], capsys)
    assert "did you mean" in text and "step_0000000" in text and "gopt shard" not in text


def test_a_folder_where_a_model_belongs(paths, capsys, tmp_path):
    assert "it has no .onnx file: give a model" in said(["shard", str(tmp_path), "--ranks", "2"], capsys)
    for name in ("b.onnx", "a.onnx"):
        (tmp_path / name).write_bytes(b"x")
    text = said(["shard", str(tmp_path), "--ranks", "2"], capsys)
    assert f"give one of its files: '{tmp_path}/a.onnx', '{tmp_path}/b.onnx'" in text


def test_a_file_of_values_names_the_model_beside_it(paths, capsys, tmp_path):
    (tmp_path / "states.bin").write_bytes(b"\xff" * 64)
    (tmp_path / "step.onnx").write_bytes(b"x")
    text = said(["inspect", str(tmp_path / "states.bin")], capsys)
    assert (
        f"is not an ONNX model\n  hint: if it holds values of a model, give the model, such as '{tmp_path}/step.onnx'"
        in text
    )


@pytest.mark.parametrize("data", ["{other}/no.npz", "{other}/no.safetensors", "nothing"])
def test_missing_data_is_seen_before_anything_runs(data, paths, capsys, monkeypatch):
    monkeypatch.setattr("gopt.verification.verify.Verifier.__init__", lambda *_, **__: pytest.fail("it was read"))
    code = main(["verify", str(paths["folder"]), "--data", data.format(**paths)])
    text = capsys.readouterr().err
    assert code == (2 if data == "nothing" else 3)
    assert ("cannot read 'nothing' as data" if data == "nothing" else "no such file") in text
