"""A certificate fails with any line changed, and where a law of the prover is wrong."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from gopt.cli.main import main
from helpers import FIXTURES, edit_file, edit_rank
from onnx import TensorProto, helper
from plants import gradient_calls

import gopt
from gopt import limits
from gopt.artifact.manifest_check import read_manifest
from gopt.errors import InputError, OptionError
from gopt.verification.certificate.check import check
from gopt.verification.certificate.lines import sealed
from gopt.verification.proof import calls, move_laws, operators, stored_values, sum_laws
from gopt.verification.proof.boxes import Boxes
from gopt.verification.proof.certificate import CertificateWriter
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.folder import folder_relation
from gopt.verification.proof.member_reductions import MemberReductions
from gopt.verification.proof.partial_sums import PartialSums
from gopt.verification.proof.products import Products
from gopt.verification.proof.prove import Prover
from gopt.verification.proof.ranges import Ranges
from gopt.verification.proof.sums import Sums

FOLDERS = {
    "momentum": ("optim/sgd_momentum_maximize", ["--ranks", "2"]),
    "micro-steps": ("cases/roles/sumloss_read2", ["--ranks", "2", "--accumulate", "2"]),
    "clip": ("optim/clip_global", ["--ranks", "2", "--stage", "3"]),
    "adam": ("mlp_adamw", ["--mesh", "dp=2,shard=2"]),
    "half": ("mlp_adamw_bf16", ["--ranks", "2"]),
    "attention": ("gpt_adamw", ["--ranks", "2"]),
    "tensor": ("mlp_adamw", ["--mesh", "tp=2"]),
    "three axes": ("mlp_adamw", ["--mesh", "dp=2,shard=2,tp=3", "--stage", "3"]),
    "micro-steps of parts": ("mlp_adamw", ["--mesh", "dp=2,tp=2", "--accumulate", "2"]),
    "experts": ("families/moe_adamw", ["--mesh", "ep=2"]),
    "parts": ("optim/sgd_momentum_maximize", ["--mesh", "tp=2"]),
    "stages": ("optim/sgd_momentum_maximize", ["--mesh", "pp=2"]),
    "stages of micro-batches": ("cases/roles/sumloss_read2", ["--mesh", "pp=2", "--accumulate", "2"]),
    "micro-batches": ("optim/sgd_momentum_maximize", ["--mesh", "pp=2", "--accumulate", "2"]),
    "stages of shards": (
        "mlp_adamw",
        ["--mesh", "pp=2,shard=2", "--stage", "3", "--accumulate", "2", "--schedule", "zb-h1"],
    ),
    "stages of parts": ("mlp_adamw", ["--mesh", "pp=2,tp=2", "--accumulate", "2"]),
    "stages that draw": ("real/dropout_mlp_random", ["--mesh", "pp=2", "--accumulate", "2"]),
}


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    """The folder of a name, and its certificate."""
    home, written = tmp_path_factory.mktemp("certified"), dict[str, Path]()

    def of(name: str) -> tuple[Path, str]:
        file = home / f"{name}.cert"
        if name not in written:
            fixture, options = FOLDERS[name]
            assert main(["shard", str(FIXTURES / f"{fixture}.onnx"), *options, "-o", str(home / name), "-q"]) == 0
            assert gopt.prove(home / name, certificate=file).proven
            written[name] = home / name
        return written[name], file.read_text(encoding="utf-8")

    return of


@pytest.mark.parametrize("name", FOLDERS)
def test_a_certificate_is_checked(name, certified):
    folder, text = certified(name)
    result = check(folder, text)
    assert (result.fault, result.lemmas, result.exit_code) == (None, {}, 0)
    assert result.checked == result.lines == len(text.splitlines())


# --- every line changed -----------------------------------------------------------------------------------------------


def changed(value: Any) -> Iterator[Any]:
    """Other values of a key, or of an item in it."""
    if value is None or isinstance(value, bool):
        yield "x"
    elif isinstance(value, int):
        yield from (value + 1, value - 1)
    elif isinstance(value, str):
        yield from (f"{value}x", "")
    elif isinstance(value, dict):
        ((kind, text),) = value.items()
        if kind == "fraction":
            yield from ({kind: str(Fraction(text) * 2)}, {kind: str(Fraction(text) + Fraction(1, 10**12))})
        elif kind == "bytes":
            yield {kind: ("01" if text.startswith("00") else "00") + text[2:]}
        else:
            yield {kind: text[1:]}
    else:
        yield value[1:] if value else [1]
        yield [*value, *value[-1:]] if value else [0]
        if len(value) > 1 and value[0] != value[1]:
            yield [value[1], value[0], *value[2:]]
        for index, item in enumerate(value):
            yield from ([*value[:index], other, *value[index + 1 :]] for other in changed(item))


def mutations(lines: list[dict[str, Any]], index: int) -> Iterator[list[dict[str, Any]]]:
    """The lines with one changed, gone, doubled, or exchanged with the next."""
    before, line, behind = lines[:index], lines[index], lines[index + 1 :]
    for key, value in line.items():
        yield from ([*before, {**line, key: other}, *behind] for other in changed(value))
        yield [*before, {name: rest for name, rest in line.items() if name != key}, *behind]
    yield [*before, {**line, "more": 1}, *behind]
    yield [*before, *behind]
    yield [*before, line, line, *behind]
    if behind:
        yield [*before, behind[0], line, *behind[1:]]


def survivors(folder: Path, text: str, chosen: Callable[[list[Any]], list[Any]], few: int = 0) -> list[Any]:
    """Changed certificates that are checked, with the digest and the number of lines as they should be; of ``few``
    lines, or of all."""
    head, *lines = map(json.loads, text.splitlines())
    del head["digest"]
    return [
        other
        for index in random.Random(text).sample(range(len(lines)), few or len(lines))
        for other in chosen(list(mutations(lines, index)))
        if check(folder, sealed([{**head, "lines": len(other)}, *other])).exit_code != 1
    ]


@pytest.mark.parametrize("name", ["momentum", "micro-steps", "parts", "stages", "stages of micro-batches"])
def test_lines_changed_at_random_are_wrong(name, certified):
    draw = random.Random(name)
    folder, text = certified(name)
    assert survivors(folder, text, lambda others: draw.sample(others, 1), few=30) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)  # thousands of checks
@pytest.mark.parametrize("name", ["momentum", "micro-steps", "clip", "parts", "stages", "stages of micro-batches"])
def test_every_change_of_every_line_is_wrong(name, certified):
    folder, text = certified(name)
    assert survivors(folder, text, lambda others: others) == []


@pytest.mark.parametrize("key", ["format", "mesh", "accumulate", "files", "lines", "digest"])
def test_a_changed_head_is_wrong(key, certified):
    folder, text = certified("momentum")
    head, *lines = map(json.loads, text.splitlines())
    del head["digest"]
    for other in changed(head[key]) if key in head and key != "files" else [{}]:
        result = check(folder, sealed([{**head, key: other}, *lines]))
        assert result.exit_code == 1 and result.fault.line == 1


def test_a_certificate_is_of_one_folder(certified):
    _, text = certified("momentum")
    folder, _ = certified("clip")
    assert check(folder, text).exit_code == 1


@pytest.mark.parametrize("text", ["", "\n", "{}\n", "[1]\n", "x", '{"format": "gopt-certificate/1"}\n'])
def test_any_other_text_is_wrong(text, certified):
    folder, _ = certified("momentum")
    assert check(folder, text).exit_code == 1


# --- a prover with a wrong law ----------------------------------------------------------------------------------------


def _doubled(old):
    return lambda self, terms, shape: old(
        self, {of: 2 * by if len(terms) > 1 else by for of, by in terms.items()}, shape
    )


def _other_axis(old):
    return lambda self, number, axes, how: old(self, number, sorted(axes)[1:], how)


def _shifted(old):
    def wrong(self, number, start, stop):
        count = self.elements(number) or 0
        more = 1 if stop < count else 0
        return old(self, number, start + more, stop + more)

    return wrong


def _other_index(old):
    def wrong(self, number, core, label, size, runs):
        return old(self, number, core, tuple(reversed(label)) if len(label) > 1 else (label[0] - 1,), size, runs)

    return wrong


def _other_range(old):
    def wrong(self, number, core, label, size, runs):
        last = runs[-1][1] - 1 if runs and runs[-1][1] - runs[-1][0] > 1 else None
        return old(self, number, core, label, size, (*runs[:-1], (runs[-1][0], last)) if last else runs)

    return wrong


DEFECTS = {
    "coefficients of sums are twice as large": ("adam", Sums, "linear", _doubled),
    "a difference is a sum": ("adam", Sums, "added", lambda old: lambda self, of, signs=None: old(self, of)),
    "a quotient is a product": (
        "adam", Products, "product", lambda old: lambda self, of, by: old(self, of, [abs(power) for power in by]),
    ),
    "a mean is a sum": ("momentum", MemberReductions, "size", lambda old: lambda self, axes: 1),
    "a reduction leaves an axis out": ("adam", MemberReductions, "reduced", _other_axis),
    "ranges of elements are one further": ("adam", Ranges, "cut", _shifted),
    "a sum along other dimensions": (
        "adam", PartialSums, "summed", lambda old: lambda self, of, axes: old(self, of, [0]),
    ),
    "rounding is lost": ("half", move_laws, "as_type", lambda old: lambda table, of, source, to: of),
    "constants are no decimals": (
        "adam", stored_values, "simplest", lambda old: lambda value: Fraction(float(value)),
    ),
    "a softmax is not normalised": (
        "attention", operators, "RULES", lambda old: {**old, "Softmax": sum_laws.exponential},
    ),
    "the first member has all": (
        "adam", calls.Members, "_gathered", lambda old: lambda self, of: [old(self, of)[0]] * len(of),
    ),
    "a part starts at zero": (
        "attention", Boxes, "take",
        lambda old: lambda self, of, runs: old(
            self, of, tuple(row and ((0, sum(high - low for low, high in row)),) for row in runs)),
    ),
    "some terms are those of another index": ("tensor", PartialSums, "parted", _other_index),
    "some terms are fewer": ("tensor", PartialSums, "parted", _other_range),
    "some terms are all": ("tensor", PartialSums, "parted", lambda old: lambda self, number, *part: number),
    "some terms are some of another sum": (
        "tensor", PartialSums, "parted",
        lambda old: lambda self, of, core, label, size, runs: old(self, of, core, label, size, ((0, size // 2),)),
    ),
    "a part starts one further": (
        "tensor", Boxes, "take",
        lambda old: lambda self, of, runs: old(
            self, of, tuple(row and tuple((max(low - 1, 0), high - min(low, 1)) for low, high in row) for row in runs)),
    ),
    "a receiver has twice what was sent": (
        "stages", MemberReductions, "on_member", lambda old: lambda self, of, at: self.scaled(old(self, of, at), 2),
    ),
    "an exponential of a sum is of its first term": (
        "attention", Expressions, "_exp", lambda old: lambda self, of: old(self, [next(self.terms(of[0]))[0]]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_wrong_law_of_the_prover_is_noticed(defect, certified, monkeypatch):
    """The certificate of a prover with a defect, whatever its verdict, has a line that does not follow."""
    name, owner, attribute, wrong = DEFECTS[defect]
    folder, text = certified(name)
    monkeypatch.setattr(owner, attribute, wrong(getattr(owner, attribute)))
    prover = Prover(folder_relation(folder))
    prover.run()
    other = CertificateWriter(folder, prover).text()
    assert other != text, "the defect must show"
    assert check(folder, other).exit_code == 1


# --- ranks that are wrong ---------------------------------------------------------------------------------------------


def _sum(model) -> None:
    for node in gradient_calls(model):
        next(entry for entry in node.attribute if entry.name == "reduce").s = b"sum"


def checked_edit(name, ranks, edit, tmp_path):
    """What the checker says of a folder whose ranks were edited, so that the prover does not prove it."""
    (fixture, options), out = FOLDERS[name], tmp_path / "out"
    assert main(["shard", str(FIXTURES / f"{fixture}.onnx"), *options, "-o", str(out), "-q"]) == 0
    for rank in range(ranks):
        edit_rank(out, rank, edit)
    prover = Prover(folder_relation(out))
    assert not prover.run().proven
    return check(out, CertificateWriter(out, prover).text())


def test_ranks_that_differ_are_noticed_without_the_verdict(certified, tmp_path):
    """The writer is told that all is proven, and the checker says which value does not follow."""
    result = checked_edit("adam", 4, _sum, tmp_path)
    assert result.exit_code == 1 and result.fault.program == "rank 0"


def _local(model) -> None:
    for node in model.graph.node:
        if node.op_type == "AllReduce" and node.output[0].endswith("whole"):
            node.op_type, node.domain = "Identity", ""
            del node.attribute[:]
            return
    raise AssertionError("no reduction of parts")


def test_a_reduction_that_is_missing_is_noticed(tmp_path):
    assert checked_edit("tensor", 2, _local, tmp_path).exit_code == 1


def _before_tanh(model) -> None:
    """The first stage sends the operand of the activation."""
    (send,) = (node for node in model.graph.node if node.op_type == "Send")
    (tanh,) = (node for node in model.graph.node if node.op_type == "Tanh")
    send.input[0] = tanh.input[0]


def _other_saved(model) -> None:
    """The last stage saves the sums of its neurons negated, under their name."""
    (sums,) = (node for node in model.graph.node if node.op_type == "Gemm")
    name = sums.output[0]
    for node in model.graph.node:
        node.input[:] = ["sums" if read == name else read for read in node.input]
    sums.output[0] = "sums"
    model.graph.node.append(helper.make_node("Neg", ["sums"], [name]))


def _first_batch_alone(model) -> None:
    """A stage adds no term of a further micro-batch to its sum, but the sum itself."""
    add = next(node for node in model.graph.node if node.op_type == "Add" and node.output[0].endswith("_sum_out"))
    add.input[1] = add.input[0]


@pytest.mark.parametrize(
    ("file", "edit"),
    [("0000.forward", _before_tanh), ("0001.forward", _other_saved), ("0001.backward", _first_batch_alone)],
)
def test_a_stage_that_is_wrong_is_noticed(file, edit, tmp_path):
    (fixture, options), out = FOLDERS["micro-batches"], tmp_path / "out"
    assert main(["shard", str(FIXTURES / f"{fixture}.onnx"), *options, "-o", str(out), "-q"]) == 0
    edit_file(out / f"rank_{file}.onnx", edit)
    prover = Prover(folder_relation(out))
    assert not prover.run().proven
    assert check(out, CertificateWriter(out, prover).text()).exit_code == 1


def test_a_value_that_nobody_receives_is_noticed(certified, tmp_path):
    """Of the certificate of a folder, where a stage sends once more: no line says anything of a Send."""
    (folder, text), out = certified("stages"), tmp_path / "out"
    shutil.copytree(folder, out)

    def send_again(model) -> None:
        sends = [node for node in model.graph.node if node.op_type == "Send"]
        model.graph.node.append(sends[0])

    edit_rank(out, 0, send_again)
    head, *lines = map(json.loads, text.splitlines())
    del head["digest"]
    result = check(out, sealed([{**head, "files": read_manifest(out)[0].read_digests}, *lines]))
    assert result.exit_code == 1 and "sent" in result.fault.actual


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_and_checks(certified, tmp_path, capsys):
    folder, text = certified("momentum")
    file = tmp_path / "step.cert"
    assert main(["prove", str(folder), "--certificate", str(file), "-q"]) == 0
    assert file.read_text(encoding="utf-8") == text, "the same text again"
    capsys.readouterr()
    assert main(["prove", str(folder), "--check", str(file)]) == 0
    assert f"checked: {len(text.splitlines())} of {len(text.splitlines())} lines" in capsys.readouterr().out
    assert main(["prove", str(folder), "--check", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "checked"
    file.write_text(text.replace('"rule": "mean"', '"rule": "sum"', 1), encoding="utf-8")
    assert main(["prove", str(folder), "--check", str(file)]) == 1
    assert "wrong: line 1" in capsys.readouterr().out


def test_nothing_is_written_for_a_folder_that_is_not_proven(tmp_path):
    fixture, options = FOLDERS["momentum"]
    assert main(["shard", str(FIXTURES / f"{fixture}.onnx"), *options, "-o", str(tmp_path / "out"), "-q"]) == 0
    for rank in range(2):
        edit_rank(tmp_path / "out", rank, _sum)
    assert main(["prove", str(tmp_path / "out"), "--certificate", str(tmp_path / "step.cert"), "-q"]) == 1
    assert not (tmp_path / "step.cert").exists()


def test_lines_on_lemmas_are_counted(tmp_path, capsys):
    model = str(FIXTURES / "mlp_adamw_fp16_scaler.onnx")
    assert main(["shard", model, "--ranks", "2", "-o", str(tmp_path / "out"), "-q"]) == 0
    assert main(["prove", str(tmp_path / "out"), "--certificate", str(tmp_path / "step.cert"), "-q"]) == 0
    assert main(["prove", str(tmp_path / "out"), "--check", str(tmp_path / "step.cert")]) == 4
    assert "lemma 'any flag'" in (said := capsys.readouterr().out) and "rest on lemmas" in said


def test_equal_values_of_other_operators_have_rules_of_their_own(certified, tmp_path):
    folder, _ = certified("momentum")
    shutil.copytree(folder, tmp_path / "out")

    def through(op_type):
        def edit(model):
            nodes = model.graph.node
            at, node = next((at, node) for at, node in enumerate(nodes) if node.op_type == "MatMul")
            name, node.output[0] = node.output[0], "product"
            operands = ["product"] if op_type == "Identity" else ["yes", "product", "product"]
            nodes.insert(at + 1, helper.make_node(op_type, operands, [name]))
            model.graph.initializer.append(helper.make_tensor("yes", TensorProto.BOOL, [], [True]))

        return edit

    for rank, op_type in enumerate(("Identity", "Where")):
        edit_rank(tmp_path / "out", rank, through(op_type))
    assert gopt.prove(tmp_path / "out", certificate=tmp_path / "step.cert").proven
    assert gopt.check_certificate(tmp_path / "step.cert", tmp_path / "out").fault is None


@pytest.mark.rest
def test_a_step_larger_than_memory_is_refused_by_name(tmp_path, capsys):
    model = str(FIXTURES / "cases" / "inspect" / "i28730_step_4g.onnx")
    assert main(["shard", model, "--ranks", "2", "-o", str(tmp_path / "out"), "-q"]) == 0
    assert main(["prove", str(tmp_path / "out"), "--certificate", str(tmp_path / "step.cert"), "-q"]) == 0
    assert main(["prove", str(tmp_path / "out"), "--check", str(tmp_path / "step.cert")]) == 4
    assert "'big'" in (said := capsys.readouterr().err) and "[1073741824]" in said


def test_what_has_no_certificate_is_refused(certified, tmp_path):
    folder, _ = certified("momentum")
    with pytest.raises(OptionError):
        gopt.prove("a.onnx", ranks=["b.onnx"], relation={"mesh": {"dp": 1}}, certificate=tmp_path / "step.cert")
    with pytest.raises(InputError):
        gopt.check_certificate(tmp_path / "missing.cert", folder)
    assert main(["prove", str(folder), "--check", "x", "--certificate", "y"]) == 2


def test_a_constant_of_more_elements_than_are_folded_is_checked(tmp_path, monkeypatch):
    gopt.shard(FIXTURES / "cnn_sgd.onnx", "h=2", prove=False).write(tmp_path / "out")
    assert gopt.prove(tmp_path / "out", certificate=tmp_path / "step.cert").proven
    monkeypatch.setattr(limits, "FOLDED_ELEMENTS", 8)
    assert gopt.check_certificate(tmp_path / "step.cert", tmp_path / "out").fault is None
