"""The batches that verify draws, and the user's own."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx.parser
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, Builder, edit_ranks, perceptron, sgd
from onnx import ModelProto
from plants import attribute, gradient_calls

import gopt
from gopt import limits
from gopt.analysis.role_map import RoleMap
from gopt.analysis.training import State, StateKind
from gopt.documents.draws import Distribution, Draw
from gopt.errors import InputError, OptionError, RunError
from gopt.ir.load import load
from gopt.ir.types import TensorType
from gopt.verification.batches import SampledBatches
from gopt.verification.compare import Values
from gopt.verification.result import Outcome
from gopt.verification.sampling import Range, initial_state, integer_ranges
from gopt.verification.variants import PLAIN
from gopt.verification.verify import Verifier

MASKED, IGNORE = 0, -100


def tagger(folder: Path, replaced: int | None = IGNORE, masked: int = MASKED) -> Path:
    """Embedding rows by id, with a row for padding that the backward masks; a class per row, -100 for none.

    ``replaced``: labels of this number are replaced before anything is looked up with them; None: none are.
    ``masked``: PyTorch compares with -1 where there is no padding.
    """
    b = Builder()
    ids, labels = b.input("ids", (8,), "int64"), b.input("labels", (8,), "int64")
    table, w = b.parameter("table", (6, 4)), b.parameter("w", (4, 3))
    h = b.op("Gather", table, ids)
    scores = b.op("LogSoftmax", b.op("MatMul", h, w), axis=-1)
    no = b.op("Equal", labels, b.const(IGNORE, "int64"))
    safe = labels
    if replaced is not None:
        safe = b.op("Where", b.op("Equal", labels, b.const(replaced, "int64")), b.const(0, "int64"), labels)
    kept = b.op("Cast", b.op("Not", no), to=1)
    count = b.op("ReduceSum", kept, keepdims=0)
    column = b.op("Reshape", safe, b.const([8, 1], "int64"))
    picked = b.op("Reshape", b.op("GatherElements", scores, column, axis=1), b.const([8], "int64"))
    b.output("loss", b.op("Neg", b.op("Div", b.op("ReduceSum", b.op("Mul", picked, kept), keepdims=0), count)), ())
    hot = b.op("OneHot", safe, b.const(3, "int64"), b.const([0.0, 1.0]))
    share = b.op("Reshape", b.op("Div", kept, count), b.const([8, 1], "int64"))
    delta = b.op("Mul", b.op("Sub", b.op("Exp", scores), hot), share)
    back = b.op("MatMul", delta, b.op("Transpose", w, perm=[1, 0]))
    padding = b.op("Reshape", b.op("Equal", ids, b.const(masked, "int64")), b.const([8, 1], "int64"))
    back = b.op("Where", padding, b.const(0.0), back)
    rows = b.op("Reshape", ids, b.const([8, 1], "int64"))
    gradients = {
        table: b.op("ScatterND", b.const(np.zeros((6, 4))), rows, back, reduction="add"),
        w: b.op("MatMul", b.op("Transpose", h, perm=[1, 0]), delta),
    }
    for name, shape in ((table, (6, 4)), (w, (4, 3))):
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", gradients[name], b.const(0.1))), shape)
    return b.save(folder / "step.onnx")


def sharded(path: Path) -> Path:
    gopt.shard(gopt.load(path), 2, stage=0).write(path.parent / "out")
    return path.parent / "out"


@pytest.fixture
def drawn(monkeypatch) -> list[Values]:
    """The batches that a verification draws, in order."""
    usual, seen = SampledBatches.batch, []

    def batch(self: SampledBatches, number: int, part: int) -> Values:
        seen.append(usual(self, number, part))
        return seen[-1]

    monkeypatch.setattr(SampledBatches, "batch", batch)
    return seen


def test_rows_that_are_masked_are_not_drawn_and_labels_to_ignore_are(tmp_path, drawn):
    out = sharded(tagger(tmp_path))
    verifier = Verifier(out)
    ranges = integer_ranges(verifier.training)
    assert ranges["ids"] == Range(6, frozenset({MASKED}))
    assert ranges["labels"] == Range(3, frozenset(), IGNORE)
    result = verifier.run(steps=20)
    assert result.equal, result.to_json()
    assert {*np.unique([each["ids"] for each in drawn])} == {1, 2, 3, 4, 5}
    assert {*np.unique([each["labels"] for each in drawn])} == {IGNORE, 0, 1, 2}
    assert all((each["labels"] != IGNORE).any() for each in drawn)


@pytest.mark.parametrize("replaced", [None, 1000])
def test_labels_that_the_source_cannot_ignore_are_left_out(tmp_path, replaced, drawn):
    """-100 would be looked up: the draw goes without, also where only a run of the source shows it."""
    verifier = Verifier(sharded(tagger(tmp_path, replaced)))
    assert (integer_ranges(verifier.training)["labels"].ignored is None) == (replaced is None)
    assert verifier.run(steps=9, confirm=False).equal
    assert all((each["labels"] >= 0).all() for each in drawn[-18:])


def test_an_id_that_is_looked_up_is_never_one_to_ignore(tmp_path):
    """Id -1 would be read as the last row and masked by the backward: no gradient, and no verdict on it."""
    verifier = Verifier(sharded(tagger(tmp_path, masked=-1)))
    assert integer_ranges(verifier.training)["ids"] == Range(6)
    result = verifier.run()
    assert result.equal, result.to_json()


def shifted(folder: Path) -> Path:
    """The labels, moved one to the right behind a start id, are what is looked up; -100 becomes the padding id 1."""
    b = Builder()
    labels, table, w = b.input("labels", (8,), "int64"), b.parameter("table", (6, 4)), b.parameter("w", (4, 6))
    places = b.const(np.arange(1, 8).reshape(7, 1), "int64")
    moved = b.op("Slice", labels, b.const([0], "int64"), b.const([7], "int64"))
    moved = b.op("ScatterND", b.const(np.full(8, 2), "int64"), places, moved)
    none = b.op("Equal", moved, b.const(IGNORE, "int64"))
    ids = b.op("Where", none, b.const(1, "int64"), moved)
    h = b.op("Gather", table, ids)
    delta = b.op("MatMul", h, w)
    target = b.op("Equal", labels, b.const(IGNORE, "int64"))
    hot = b.op("OneHot", b.op("Where", target, b.const(0, "int64"), labels), b.const(6, "int64"), b.const([0.0, 1.0]))
    delta = b.op("Sub", delta, hot)
    squares = [b.op("ReduceSum", b.op("Mul", each, each), keepdims=0) for each in (delta, table)]
    b.output("loss", b.op("Mul", b.op("Add", *squares), b.const(0.5)), ())
    back = b.op("MatMul", delta, b.op("Transpose", w, perm=[1, 0]))
    padding = b.op("Reshape", b.op("Equal", ids, b.const(1, "int64")), b.const([8, 1], "int64"))
    back = b.op("Where", padding, b.const(0.0), back)
    rows = b.op("Reshape", ids, b.const([8, 1], "int64"))
    # The loss reads the whole table as well, as a tied head does: no row's gradient is always zero.
    gradient = b.op("Add", b.op("ScatterND", b.const(np.zeros((6, 4))), rows, back, reduction="add"), table)
    gradients = {table: gradient, w: b.op("MatMul", b.op("Transpose", h, perm=[1, 0]), delta)}
    for name, shape in ((table, (6, 4)), (w, (4, 6))):
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", gradients[name], b.const(0.1))), shape)
    return b.save(folder / "step.onnx")


def test_labels_that_become_ids_avoid_the_padding_row(tmp_path):
    verifier = Verifier(sharded(shifted(tmp_path)))
    assert integer_ranges(verifier.training)["labels"] == Range(6, frozenset({1}), IGNORE)
    result = verifier.run()
    assert all(each.holds for each in result.gradients), result.to_json()


def test_ranges_leave_out_what_is_masked():
    drawn = Range(5, frozenset({0, 3})).draw((400,), np.random.default_rng(0))
    assert {*np.unique(drawn)} == {1, 2, 4}
    assert {*np.unique(Range(2, frozenset({0, 1})).draw((40,), np.random.default_rng(0)))} == {0, 1}, "nothing is left"


def test_operators_that_ignore_a_label_say_so(tmp_path):
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18]> g (float[4,3] x, int64[4] y) => (float l)
        { l = SoftmaxCrossEntropyLoss<ignore_index = -1>(x, y) }"""
    )
    onnx.save(model, tmp_path / "g.onnx")
    training = SimpleNamespace(graph=load(tmp_path / "g.onnx", own=True), batch=["x", "y"])
    assert integer_ranges(training) == {"y": Range(3, frozenset(), -1)}


def test_what_the_backward_alone_compares_ids_with_is_no_label_to_ignore():
    """An embedding without a padding row exports a mask of row -1: as an id that is the last row, not masked at all."""
    training = gopt.load(FIXTURES / "gpt_adamw.onnx").training
    ranges = integer_ranges(training)
    assert ranges["x"].ignored is None
    assert ranges["y"].ignored == -100


def arithmetic(b: Builder, random: np.random.Generator, value: str, shape: tuple[int, ...]) -> tuple[str, Any]:
    """A value behind some integer arithmetic and layout, and the same in NumPy."""
    steps = []
    for _ in range(random.integers(1, 5)):
        kind = random.choice(["Add", "Sub", "from", "Mul", "offsets", "Cast", "Reshape", "plain"])
        number = int(random.integers(1, 5))
        if kind in ("Add", "Sub", "Mul"):
            value = b.op(kind, value, b.const(number, "int64"))
            steps.append({"Add": np.add, "Sub": np.subtract, "Mul": np.multiply}[kind])
            steps[-1] = functools.partial(lambda made, other, x: made(x, other), steps[-1], number)
        elif kind == "from":
            value = b.op("Add", b.const(number, "int64"), value)
            steps.append(functools.partial(np.add, number))
        elif kind == "offsets":
            other = random.integers(0, 6, shape[-1])
            value = b.op("Add", value, b.const(other, "int64"))
            steps.append(functools.partial(np.add, other))
        elif kind == "Cast":
            value = b.op("Cast", b.op("Cast", value, to=6), to=7)
        elif kind == "Reshape":
            value = b.op("Reshape", b.op("Unsqueeze", value, b.const([0], "int64")), b.const(shape, "int64"))
    return value, lambda x: functools.reduce(lambda held, step: step(held), steps, x)


@pytest.mark.parametrize("seed", range(12))
def test_ids_behind_arithmetic_stay_in_range(seed, tmp_path):
    """Every id of the range is on the axis behind the arithmetic, and next to no other is."""
    random, b = np.random.default_rng(seed), Builder()
    shape, rows = (4, 3), int(random.integers(60, 900))
    ids, table = b.input("ids", shape, "int64"), b.parameter("table", (rows, 2))
    value, same = arithmetic(b, random, ids, shape)
    if random.random() < 0.5:
        found = b.op("Gather", table, value)
    else:
        found = b.op("OneHot", value, b.const(rows, "int64"), b.const([0.0, 1.0]))
    b.output("loss", b.op("ReduceSum", found, keepdims=0), ())
    graph = load(b.save(tmp_path / "g.onnx"), own=True)
    own = integer_ranges(SimpleNamespace(graph=graph, batch=["ids"]))["ids"]
    every = range(rows + 20)
    right = [
        each for each in every if same(np.full(shape, each)).min() >= 0 and same(np.full(shape, each)).max() < rows
    ]
    ids_of_range = [each for each in every if own.low <= each < own.bound]
    assert {*ids_of_range} <= {*right} and len(right) - len(ids_of_range) <= 12, (
        "offsets that are added are bounded apart"
    )
    assert {*np.unique(own.draw((20_000,), random))} <= {*range(own.low, own.bound)}


def test_an_index_computed_from_a_uniform_draw_is_in_range(tmp_path):
    """As PyTorch's integers were exported: a normal number would be an index out of the table, and an error."""
    b = Builder()
    u, x, w = b.input("u", (8,)), b.input("x", (8, 2)), b.parameter("w", (2, 2))
    rows = b.op("Cast", b.op("Floor", b.op("Mul", u, b.const(2000.0))), to=7)
    table = b.const(np.random.default_rng(0).standard_normal((2000, 2)))
    out = b.op("Add", b.op("MatMul", x, w), b.op("Gather", table, rows))
    b.output("loss", b.op("Mul", b.op("ReduceSum", b.op("Mul", out, out), keepdims=0), b.const(0.5)), ())
    gradient = b.op("MatMul", b.op("Transpose", x, perm=[1, 0]), out)
    b.output("w_out", b.op("Sub", w, b.op("Mul", gradient, b.const(0.1))), (2, 2))
    path = b.save(tmp_path / "step.onnx")
    with pytest.raises(RunError, match="out of range"):
        Verifier(sharded(path)).run()
    roles = RoleMap(draws={"u": Draw(Distribution.UNIFORM)})
    gopt.shard(gopt.load(path, roles=roles), 2, stage=0).write(tmp_path / "told")
    result = Verifier(tmp_path / "told").run()
    assert result.equal, result.to_json()


# --- the user's own -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    b = Builder()
    sgd(b, perceptron(b))
    return sharded(b.save(tmp_path / "step.onnx"))


def samples(path: Path, rows: int = 32) -> Path:
    generator = np.random.default_rng(3)
    x, y = (generator.standard_normal((rows, width)).astype(np.float32) for width in (3, 2))
    np.savez(path / "samples.npz", x=x, y=y)
    return path / "samples.npz"


def test_data_of_the_user_is_what_is_compared(folder, tmp_path):
    seen = []
    result = Verifier(folder).run(
        data=str(samples(tmp_path)), tamper=lambda rank, feeds: seen.append((rank, feeds["x"].copy())), steps=2
    )
    assert result.equal and result.gradients
    x = np.load(tmp_path / "samples.npz")["x"]
    np.testing.assert_array_equal(seen[0][1], x[:4])
    np.testing.assert_array_equal(seen[1][1], x[4:8])
    np.testing.assert_array_equal(seen[2][1], x[8:12])


def test_data_of_a_function(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "own_batches.py").write_text(
        "import numpy as np\n\n"
        "def make(part, parts):\n"
        "    generator = np.random.default_rng(part)\n"
        "    while True:\n"
        "        x, y = (generator.standard_normal((4, width)).astype('f') for width in (3, 2))\n"
        "        yield {'x': x, 'y': y}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["verify", str(folder), "--data", "own_batches:make"]) == 0
    assert "equal" in capsys.readouterr().out


def test_planted_errors_are_seen_on_data_of_the_user(folder, tmp_path):
    def plant(model: ModelProto) -> None:
        for node in gradient_calls(model):
            attribute(node, "reduce").s = b"sum"

    edit_ranks(folder, plant)
    result = Verifier(folder).run(data=str(samples(tmp_path)), confirm=False, steps=1)
    assert result.outcome is Outcome.DIFFERENT


def test_data_that_does_not_fit_is_refused(folder, tmp_path):
    np.savez(tmp_path / "wrong.npz", x=np.zeros((8, 7), np.float32), y=np.zeros((8, 2), np.float32))
    with pytest.raises(InputError, match="'x'"):
        Verifier(folder).run(data=str(tmp_path / "wrong.npz"))
    with pytest.raises(OptionError, match="nowhere"):
        Verifier(folder).run(data="nowhere:at_all")
    assert main(["verify", str(folder), "--data", str(tmp_path / "none.npz")]) == 3


def test_data_with_micro_steps(tmp_path):
    gopt.shard(gopt.load(FIXTURES / "mlp_sgd.onnx"), 2, accumulate=2).write(tmp_path / "out")
    verifier = Verifier(tmp_path / "out")
    types = verifier.training.graph.types
    arrays = {}
    for name in verifier.training.batch:
        type = types[name]
        generator = np.random.default_rng(0)
        floats = generator.standard_normal((8 * type.dims[0], *type.dims[1:])).astype(np.float32)
        arrays[name] = floats if type.dtype == "float32" else (np.abs(floats) * 3).astype(np.int64)
    np.savez(tmp_path / "samples.npz", **arrays)
    result = verifier.run(data=str(tmp_path / "samples.npz"), steps=2, confirm=False)
    assert result.equal, result.to_json()


@pytest.mark.parametrize(
    ("dims", "spread"),
    [((8, 4), 0.2), ((30,), 0.2), ((2048, 512), 0.03125), ((512, 2048), 0.03125), ((16, 512, 3, 3), 0.0208)],
)
def test_parameters_of_wide_layers_are_drawn_smaller(dims, spread):
    """Sums over many inputs would leave the numbers behind some layers."""
    graph = SimpleNamespace(types={"w": TensorType("float32", dims)}, initializers={})
    state = State("w", "w_out", StateKind.PARAMETER)
    value = initial_state(SimpleNamespace(graph=graph), state, np.random.default_rng(0))  # type: ignore[arg-type]
    assert float(value.std()) == pytest.approx(spread, rel=0.3 if value.size < 100 else 0.05)


def test_a_step_that_was_computed_is_not_computed_again(tmp_path, monkeypatch):
    """The trial of labels to ignore, the first step, gradients of other sizes and schedules read the same values."""
    gopt.shard(gopt.load(FIXTURES / "gpt_adamw.onnx"), 2).write(tmp_path / "out")
    verifier, ran = Verifier(tmp_path / "out"), []
    local = verifier.reference.local
    before_calls: list[str] = []
    for rank in verifier.ranks:
        for program in rank.programs.values():
            program.mark = lambda name, begin, end: before_calls.append(name)
    monkeypatch.setattr(limits, "LARGE_BATCH_BYTES", 1)
    monkeypatch.setattr(verifier.reference, "local", lambda *given: ran.append(given[0].name) or local(*given))
    assert verifier.run(steps=1, confirm=False).equal
    assert ran == [PLAIN.name] * 3  # two are disturbed, to see what rounding moves
    longest = max(before_calls, key=lambda name: int(name.split()[-1]))
    assert before_calls.count(longest) == len(verifier.ranks), "forward and backward of a rank"
