"""``gopt shard`` writes no ranks that differ from the source, and its report says what is proven."""

from __future__ import annotations

import json
from dataclasses import replace

import onnx
import onnx.parser
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, edit_manifest, edit_rank
from onnx import ModelProto

import gopt
from gopt.artifact import ranks
from gopt.artifact.integrity import FileEntry
from gopt.artifact.kinds import Kinds
from gopt.artifact.states_file import STATES_FILE
from gopt.errors import InvariantError
from gopt.records.mesh import Mesh
from gopt.verbs.shard import prove_files

MODEL = str(FIXTURES / "mlp_adamw.onnx")
COLUMNS = """<ir_version: 10, opset_import: ["": 20]>
step (float[4,{rows}] x, float lr, float[{rows},8] a, float[8,6] b)
  => (float loss, float[{rows},8] a_out, float[8,6] b_out)
<float half = {{0.5}}>
{{
  h = MatMul(x, a)
  y = MatMul(h, b)
  square = Mul(y, y)
  loss = ReduceSum<keepdims: int = 0>(square)
  dy = Add(y, y)
  bt = Transpose<perm: ints = [1, 0]>(b)
  dh = MatMul(dy, bt)
  ht = Transpose<perm: ints = [1, 0]>(h)
  db = MatMul(ht, dy)
  xt = Transpose<perm: ints = [1, 0]>(x)
  da = MatMul(xt, dh)
  la = Mul(lr, da)
  lb = Mul(lr, db)
  a_out = Sub(a, la)
  b_out = Sub(b, lb)
}}"""


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


MESHES = {
    "shards": ("dp=2,shard=2", {}),
    "columns": ("dp=2,shard=2,tp=2", {"stage": 3}),
    "stages": ("dp=2,pp=2,shard=2", {"accumulate": 2, "schedule": "1f1b"}),
    "stages of columns": ("pp=2,dp=2,tp=2", {"accumulate": 4, "schedule": "zb-h1"}),
}


@pytest.mark.parametrize("only", [[0], [1, 3]])
@pytest.mark.parametrize("name", MESHES)
def test_ranks_that_are_not_written_are_proven_with_some_that_are(name, only, tmp_path):
    mesh, options = MESHES[name]
    every = gopt.shard(MODEL, mesh, **options).write(tmp_path / "all").proof
    some = gopt.shard(MODEL, mesh, only_ranks=only, **options).write(tmp_path / "some").proof
    assert some.verdict == every.verdict == "proven" and some.proven == every.proven
    assert some.unwritten == Mesh.parse(mesh).ranks - len(only) and every.unwritten == 0
    assert f"{some.unwritten} were not written" in some.line()
    assert not list((tmp_path / "some").glob("kind_*"))


def wrong_peer(kinds: Kinds) -> Kinds:
    """A rank whose peers are counted from another rank."""
    rank, phases = next((rank, phases) for rank, phases in kinds.peers.items() if rank != 0)
    return replace(kinds, peers={**kinds.peers, rank: {phase: of + 1 for phase, of in phases.items()}})


def wrong_pieces(kinds: Kinds) -> Kinds:
    """A rank that holds the pieces of another one."""
    one, two = (entry for entry in kinds.entries if entry.rank in (2, 4))
    swapped = replace(one, state=two.state), replace(two, state=one.state)
    entries = {entry.rank: entry for entry in (*kinds.entries, *swapped)}
    return replace(kinds, entries=tuple(entries[rank] for rank in sorted(entries)))


def wrong_kind(kinds: Kinds) -> Kinds:
    """A rank with the files of another stage."""
    one, two = kinds.entries[2], kinds.entries[4]
    changed = replace(one, files=two.files)
    return replace(kinds, entries=(*kinds.entries[:2], changed, *kinds.entries[3:]))


@pytest.mark.parametrize("wrong", [wrong_peer, wrong_pieces, wrong_kind])
def test_a_rank_that_is_not_written_and_is_wrong_is_noticed(wrong, tmp_path):
    sharded = gopt.shard(MODEL, "pp=2,dp=2,shard=2", accumulate=2, schedule="1f1b", only_ranks=[0])
    sharded.prover = lambda folder, manifest, training, kinds: prove_files(folder, manifest, training, wrong(kinds))
    with pytest.raises(InvariantError):
        sharded.write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sums_of_parts_are_read_without_the_rows(tmp_path):
    """Columns of a matrix have a range of elements in each row; a sum of micro-steps is of the part."""
    sizes = []
    for rows in (16, 64):
        onnx.save(onnx.parser.parse_model(COLUMNS.format(rows=rows)), tmp_path / f"{rows}.onnx")
        folder = tmp_path / f"{rows}.ranks"
        gopt.shard(tmp_path / f"{rows}.onnx", "shard=2,tp=2", accumulate=2).write(folder)
        proof = gopt.prove(folder)
        assert proof.proven
        sizes.append(proof.expressions)
    assert sizes[0] == sizes[1]
