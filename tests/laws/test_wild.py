"""One step written in many ways: each gives ranks equal to the plain step, or one line that says what settles it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from node_models import session
from onnx import ModelProto, TensorProto, helper, numpy_helper
from products import part
from wild_gen.form import Form
from wild_gen.judge import RANKS, hold_numbers, written
from wild_gen.steps import NAMES, forward_of, step
from wild_gen.table import EQUAL, FORMS, Unfit, rewritten

import gopt
from gopt.ir.functions import inline_functions

STAGES = (1, 2, 3)
CASES = [(form, name, stage) for form in FORMS for name in form.only or NAMES for stage in STAGES]


def one_of_each() -> list[tuple[Form, str, int]]:
    """Every form once; steps and stages go round."""
    right = [[name for name in form.only or NAMES if name not in form.gaps] for form in FORMS]
    return [(form, names[k % len(names)], STAGES[k % len(STAGES)]) for k, (form, names) in enumerate(zip(FORMS, right))]


def hold(form: Form, name: str, stage: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = step(name), folder / "out"
    old = form.edit(model, folder) or {}
    code = main(["shard", str(written(model, folder)), "--ranks", str(RANKS), "--stage", str(stage), "-o", str(out)])
    said = capsys.readouterr().err
    if name in form.gaps:
        assert code == 4 and said.startswith("gopt: error: ") and "hint: " in said and not out.exists(), said
        pytest.xfail(form.gaps[name])  # where it is no longer refused, the assertion fails: take the entry away
    if form.refusal is not None:
        assert code == form.refusal.code, said
        assert said.startswith("gopt: error: ") and all(word in said for word in form.refusal.words), said
        assert not out.exists()
        return
    assert code == 0, said
    hold_numbers(name, out, old)
    if form.verified:
        assert gopt.verify(out, steps=1).equal
    else:
        assert main(["verify", str(out)]) == 5
        assert "does not know the operator set" in capsys.readouterr().err


ONE_OF_EACH = one_of_each()


@pytest.mark.parametrize(("form", "name", "stage"), part(ONE_OF_EACH, 12), ids=str)
def test_a_form(form, name, stage, tmp_path, capsys):
    hold(form, name, stage, tmp_path, capsys)


def test_a_constant_node_of_statistic_and_backward(tmp_path, capsys):
    """It is not a sign that the running mean follows the backward."""
    form = next(form for form in FORMS if form.name == "constants as nodes")
    hold(form, "cnn_mom_fp16", 2, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "name", "stage"), [case for case in CASES if case not in ONE_OF_EACH], ids=str)
def test_every_form(form, name, stage, tmp_path, capsys):
    hold(form, name, stage, tmp_path, capsys)


# --- two at once ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(60))
def test_two_forms(turn, tmp_path, capsys):
    """Fresh pairs each time: equal ranks, or a refusal in one line. A pair that cannot be written is drawn again."""
    seed = random.SystemRandom().randrange(2**32)
    name, forms, model, old = drawn_pair(random.Random(seed), tmp_path)
    label, out = f"seed {seed}: {name}, {forms[0]}, then {forms[1]}", tmp_path / "out"
    stage = STAGES[turn % len(STAGES)]
    code = main(["shard", str(written(model, tmp_path)), "--ranks", str(RANKS), "--stage", str(stage), "-o", str(out)])
    said = capsys.readouterr().err
    assert code in (0, 3, 4), f"{label}: {said}"
    if code:
        assert said.startswith("gopt: error: ") and not out.exists(), label
        return
    hold_numbers(name, out, old)
    assert main(["verify", str(out), "--steps", "1"]) in (0, 4), f"{label}: {capsys.readouterr().err}"


def drawn_pair(generator: random.Random, folder: Path) -> tuple[str, list[Form], ModelProto, dict[str, str]]:
    while True:
        name, forms = generator.choice(NAMES), generator.sample(EQUAL, 2)
        if any((form.only and name not in form.only) or name in form.gaps for form in forms):
            continue
        model = step(name)
        try:
            return name, forms, model, rewritten(model, forms, folder)
        except Unfit:
            continue


# --- gopt derive ----------------------------------------------------------------------------------------------------

UNDERIVED = {
    "unused inputs": 2, "symbolic batch": 2, "product of symbols": 2, "odd symbol": 2, "empty symbol": 2,
    "anonymous batch": 2, "sequences": 4, "optionals": 4, "split and joined": 4,
}  # fmt: skip
"""Forms of which ``gopt derive`` makes no step: with --dim it does, or no rule differentiates their operators."""
WITHOUT_PARAMETERS = ("dead nodes", "a parameter of open size", "states through one If", "bfloat16 constant")
"""Their edits need parameters that are inputs, or states; of bfloat16 ONNX Runtime has no kernel of what is derived."""
DERIVED = [form for form in EQUAL if form.name not in WITHOUT_PARAMETERS]


@pytest.mark.parametrize("form", part(DERIVED, 6), ids=str)
def test_a_derived_form(form, tmp_path, capsys):
    """The step of a forward model written another way computes what that of the plain one does."""
    plain, other = forward_of(step("momentum")), forward_of(step("momentum"))
    (tmp_path / "other").mkdir()
    old = form.edit(other, tmp_path / "other") or {}
    due = UNDERIVED.get(form.name, 0)
    found = derived(other, tmp_path / "other", old.get("loss", "loss"), due)
    said = capsys.readouterr().err
    if due:
        assert said.startswith("gopt: error: ") and "hint: " in said
        return
    wanted = derived(plain, tmp_path, "loss", 0)
    generator = np.random.default_rng(3)
    feeds = {"x": generator.random((4, 3), np.float32), "y": generator.random((4, 2), np.float32)}
    feeds["lr"] = np.ones((), np.float32)
    names = [each.name for each in wanted.graph.output]
    now = [renamed(name, old) for name in names]
    results = session(wanted).run(names, feeds)
    same = session(found).run(now, {old.get(name, name): value for name, value in feeds.items()})
    for name, due_value, value in zip(names, results, same, strict=True):
        np.testing.assert_allclose(value, due_value, rtol=1e-5, atol=1e-6, err_msg=name)


def renamed(name: str, old: dict[str, str]) -> str:
    """A name that ``gopt derive`` makes of a parameter's, such as ``w0.out``."""
    stem, dot, rest = name.partition(".")
    stem, tail = (stem[: -len("_out")], "_out") if stem not in old and stem.endswith("_out") else (stem, "")
    return f"{old.get(stem, stem)}{tail}{dot}{rest}"


def derived(model: ModelProto, folder: Path, loss: str, code: int) -> ModelProto:
    path, out = written(model, folder), folder / "derived.onnx"
    assert main(["derive", str(path), "--loss", loss, "--optimizer", "momentum", "-o", str(out)]) == code
    made = onnx.load(out) if not code else ModelProto()
    made.ir_version = min(made.ir_version, 10)
    return made


# --- other commands -------------------------------------------------------------------------------------------------

FEW = ("as it is", "ir 3", "products as functions", "products in Scan", "odd names", "several data files", "texts")


@pytest.mark.parametrize("form", [form for form in FORMS if form.name in FEW], ids=str)
def test_other_commands(form, tmp_path, capsys):
    """``inspect`` reads the file, ``merge`` gives the values back, ``diff`` finds ranks equal to themselves."""
    model = step("momentum")
    old = form.edit(model, tmp_path) or {}
    path, out, back = written(model, tmp_path), tmp_path / "out", tmp_path / "back.onnx"
    if form.refusal is not None:
        assert main(["inspect", str(path)]) == form.refusal.code
        assert form.refusal.words[0] in capsys.readouterr().err
        return
    assert main(["inspect", str(path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in record["parameters"]} == {old.get(name, name) for name in ("w0", "b0", "w1", "b1")}
    assert main(["shard", str(path), "--ranks", "2", "-o", str(out)]) == 0
    assert main(["merge", str(out), "-o", str(back)]) == 0
    plain = {each.name: onnx.numpy_helper.to_array(each) for each in step("momentum").graph.initializer}
    for each in onnx.load(back).graph.initializer:
        name = next((name for name, new in old.items() if new == each.name), each.name)
        if name in plain:
            np.testing.assert_array_equal(onnx.numpy_helper.to_array(each).reshape(plain[name].shape), plain[name])
    assert main(["diff", str(out), str(out)]) == 0


@pytest.mark.parametrize("name", ["a metric by element", "an input as output"])
def test_what_the_hint_says_settles_it(name, tmp_path, capsys):
    """A metric of the batch's type is refused; ``--batch`` says what it is, and the ranks are those of the step."""
    form = next(form for form in FORMS if form.name == name)
    model, out = step("momentum"), tmp_path / "out"
    form.edit(model, tmp_path)
    assert main(["shard", str(written(model, tmp_path)), "--ranks", "2", "-o", str(out), "--batch", "x"]) == 0
    hold_numbers("momentum", out, {})
    assert gopt.verify(out, steps=1).equal


def test_functions_keep_the_defaults_of_their_attributes(tmp_path):
    """onnx's inliner forgets them: a slope of one became 0.01."""
    model = step("momentum")
    next(form for form in FORMS if form.name == "functions with attributes").edit(model, tmp_path)
    slopes = [
        [each.f for each in node.attribute if each.name == "alpha"]
        for node in inline_functions(model).graph.node if node.op_type == "LeakyRelu"
    ]  # fmt: skip
    assert slopes == [[1.0]] * 4


@pytest.mark.slow
def test_more_than_two_gigabytes(tmp_path, capsys):
    """A table of 2.2 GB in a sparse file, behind whose hole a value lies; the ranks have both."""
    model, size, rows = step("momentum"), 2_200_000_000, 550_000_000
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(size)
    table = TensorProto(name="wild.table", data_type=TensorProto.FLOAT, dims=[rows], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "large.bin"), ("offset", "0"), ("length", str(size))):
        table.external_data.add(key=key, value=value)
    model.graph.initializer.append(table)
    model.graph.initializer.append(numpy_helper.from_array(np.array([rows - 1], np.int64), "wild.last"))
    model.graph.node.append(helper.make_node("Gather", ["wild.table", "wild.last"], ["wild.row"], name="wild.n"))
    model.graph.output.append(helper.make_tensor_value_info("wild.row", TensorProto.FLOAT, [1]))
    assert main(["shard", str(written(model, tmp_path)), "--ranks", "2", "-o", str(tmp_path / "out")]) == 0
    assert main(["inspect", str(tmp_path / "out")]) == 0
    stored = tmp_path / "out" / "states.bin"
    rank = onnx.load(tmp_path / "out" / "rank_0000.onnx", load_external_data=False)
    held = next(each for each in rank.graph.initializer if each.name == "wild.table")
    assert held.data_location == TensorProto.EXTERNAL and stored.stat().st_size >= size
