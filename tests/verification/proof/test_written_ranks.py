"""``gopt shard`` writes no ranks that differ from the source, and its report says what is proven."""

from __future__ import annotations

import json

import onnx
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, edit_manifest, edit_rank
from onnx import ModelProto

import gopt
from gopt.artifact import ranks
from gopt.artifact.integrity import FileEntry
from gopt.artifact.states_file import STATES_FILE
from gopt.errors import InvariantError

MODEL = str(FIXTURES / "mlp_adamw.onnx")


def wrong(model: ModelProto) -> None:
    """The first subtraction of an update adds."""
    next(node for node in model.graph.node if node.op_type == "Sub" and "gopt.shard" in node.output[0]).op_type = "Add"


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    write = ranks.write_ranks

    def write_wrong(files, *arguments, **options):
        write(files, *arguments, **options)
        path = files.folder / "rank_0001.onnx"
        model = onnx.load(path, load_external_data=False)
        wrong(model)
        path.write_bytes(model.SerializeToString())
        files.files[path.name] = FileEntry.of_file(path)

    monkeypatch.setattr(ranks, "write_ranks", write_wrong)


def test_ranks_that_differ_are_not_written(planted, tmp_path, capsys):
    assert main(["shard", MODEL, "--ranks", "2", "-o", str(tmp_path / "out")]) == 70
    assert "differs from the source" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvariantError, match="differs from the source"):
        gopt.shard(MODEL, 2).write(tmp_path / "out")


def test_without_a_proof_they_are_and_the_report_claims_nothing(planted, tmp_path):
    assert main(["shard", MODEL, "--no-prove", "--ranks", "2", "-o", str(tmp_path / "out"), "-q"]) == 0
    assert "proof" not in json.loads((tmp_path / "out" / "report.json").read_text())
    assert main(["prove", str(tmp_path / "out"), "-q"]) == 1


def test_the_report_and_verify_say_what_is_proven(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["shard", MODEL, "--ranks", "2", "-o", str(out)]) == 0
    states = len(gopt.load(MODEL).training.states)
    line = f"proven: {states + 1} of {states + 1} new states, losses and metrics equal the source's for all values"
    assert line in capsys.readouterr().out
    proof = json.loads((out / "report.json").read_text())["proof"]
    assert (proof["verdict"], proof["proven"], proof["open"]) == ("proven", states + 1, [])
    assert main(["verify", str(out), "--steps", "1"]) == 0
    assert capsys.readouterr().out.startswith(line)
    assert gopt.verify(out, steps=1).to_json()["proof"] == proof


def test_a_proof_is_of_the_files_that_were_read(tmp_path, capsys):
    """The files are edited and sealed: the report's proof is of others."""
    out = tmp_path / "out"
    assert main(["shard", MODEL, "--ranks", "2", "-o", str(out), "-q"]) == 0
    edit_rank(out, 1, wrong)
    assert main(["seal", str(out)]) == 0
    capsys.readouterr()
    assert main(["verify", str(out), "--steps", "1"]) == 1
    assert "proven:" not in capsys.readouterr().out


def test_a_proof_is_of_what_the_manifest_says(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["shard", MODEL, "--ranks", "2", "-o", str(out), "-q"]) == 0
    edit_manifest(out, lambda manifest: manifest.update(loss_reduction="sum"))
    capsys.readouterr()
    assert main(["verify", str(out), "--steps", "1"]) == 1
    assert "proven:" not in capsys.readouterr().out


def test_a_proof_is_of_the_start_values(tmp_path, capsys):
    """A state of all ranks starts from another value on all, and the folder is sealed."""
    out, certificate = tmp_path / "out", str(tmp_path / "step.cert")
    assert main(["shard", MODEL, "--ranks", "2", "-o", str(out), "-q"]) == 0
    assert main(["prove", str(out), "--certificate", certificate, "-q"]) == 0
    values = bytearray((out / STATES_FILE).read_bytes())
    values[0] ^= 1
    (out / STATES_FILE).write_bytes(values)
    assert main(["seal", str(out)]) == 0
    capsys.readouterr()
    assert main(["verify", str(out), "--steps", "1"]) == 0
    assert "proven:" not in capsys.readouterr().out
    assert main(["prove", str(out), "--check", certificate, "-q"]) == 1


def test_some_ranks_alone_are_not_proven(tmp_path):
    assert main(["shard", MODEL, "--ranks", "4", "--only-ranks", "0-1", "-o", str(tmp_path / "out"), "-q"]) == 0
    proof = json.loads((tmp_path / "out" / "report.json").read_text())["proof"]
    assert (proof["verdict"], proof["reason"]) == ("unproven", "2 of 4 ranks were written")
