"""``gopt prove`` of trainers and servers: right splits are proven; ``gopt verify`` sees the same planted errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gopt.cli.main import main
from helpers import FIXTURES
from onnx import ModelProto, NodeProto, helper
from products import part
from rank_files import attributes
from split_gen.judge import Setting
from split_gen.plants import KEY, PLANTS, message, on, reduction_dropped, set_attribute
from steps_gen.make import make
from steps_gen.plan import draw

import gopt
from gopt.errors import GoptError, UnsupportedError
from gopt.verification.proof.result import ProofVerdict
from gopt.verification.verify import Verifier

SETS: dict[str, list[str]] = {
    "plain": ["--trainers", "2", "--servers", "2"],
    "pieces": ["--trainers", "3", "--servers", "3", "--minimum", "16"],
    "classic": ["--trainers", "2", "--servers", "3", "--slicing", "classic", "--minimum", "1", "--placement", "hash"],
    "whole": ["--trainers", "2", "--servers", "4", "--slicing", "off", "--placement", "round-robin", "--pull", "end"],
    "one trainer": ["--trainers", "1", "--servers", "3", "--minimum", "16"],
    "one server": ["--trainers", "3", "--servers", "1", "--bucket-mb", "0", "--pull", "end"],
    "micro-steps": ["--trainers", "2", "--servers", "2", "--minimum", "16", "--accumulate", "3"],
    "sum": ["--trainers", "2", "--servers", "2", "--loss-reduction", "sum"],
    "weighted": ["--trainers", "2", "--servers", "2", "--loss-reduction"],
    "weighted micro-steps": ["--trainers", "2", "--servers", "2", "--accumulate", "2", "--loss-reduction"],
    "rows in turn": ["--trainers", "2", "--servers", "3", "--table", "*=modulo"],
    "ranges of rows": ["--trainers", "3", "--servers", "2", "--table", "*=range", "--loss-reduction", "sum"],
    "columns of rows": ["--trainers", "2", "--servers", "2", "--table", "*=columns", "--pull", "end"],
    "halves": ["--trainers", "2", "--servers", "2", "--minimum", "16", "--wire", "float16"],
    "halves at the end": [
        "--trainers",
        "2",
        "--servers",
        "3",
        "--minimum",
        "16",
        "--wire",
        "bfloat16",
        "--pull",
        "end",
    ],
    "halves of micro-steps": ["--trainers", "2", "--servers", "3", "--wire", "float16", "--accumulate", "2"],
}
NAMES = sorted(
    str(path.relative_to(FIXTURES))[:-5] for path in FIXTURES.rglob("*.onnx") if "ort" not in path.parent.name
)


def split(name: str, options: list[str], folder: Path) -> bool:
    """Write trainers and servers of a fixture; whether it can be. The weight is the one that ranks would take."""
    path = FIXTURES / f"{name}.onnx"
    if options[-1] == "--loss-reduction":
        try:
            ranks = gopt.shard(path, 2, loss_reduction="auto")
        except GoptError:
            return False
        options = [*options, ranks.manifest().loss_reduction]
    return main(["split", str(path), *options, "-o", str(folder), "-q"]) == 0


@pytest.mark.parametrize(("name", "kind"), part([(name, kind) for name in NAMES for kind in SETS], 40))
def test_every_fixture_is_proven_under_every_option(name, kind, tmp_path, capsys):
    if not split(name, SETS[kind], tmp_path / "out"):
        pytest.skip("gopt split refuses it")
    try:
        proof = gopt.prove(tmp_path / "out")
    except UnsupportedError as error:
        assert "halves" in kind and "each row is rounded" in error.message
        return
    opened = [(claim.name, claim.verdict, claim.mismatch) for claim in proof.open()]
    assert all(verdict is ProofVerdict.UNPROVEN for _, verdict, _ in opened), opened
    assert proof.proven, opened
    assert len(proof.claims) >= len(gopt.load(FIXTURES / f"{name}.onnx").training.states)


# --- planted errors ---------------------------------------------------------------------------------------------------


def verdicts(folder: Path) -> tuple[str, str]:
    """What ``gopt prove`` and ``gopt verify`` say of a folder: the verdict, or the class of the error."""
    try:
        proof = gopt.prove(folder).verdict.value
    except GoptError as error:
        proof = type(error).__name__
    try:
        measured = Verifier(folder, deadline=5).run(confirm=False, steps=2).outcome.value
    except GoptError as error:
        measured = type(error).__name__
    return proof, measured


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    folder = tmp_path_factory.mktemp("key") / "out"
    gopt.split(FIXTURES / "mlp_adamw.onnx", KEY.options()).write(folder)
    return folder


def stale_part(model: ModelProto) -> None:
    """A trainer goes on with an old part of a parameter."""
    pull = message(model, "Pull")
    joined = next(node for node in model.graph.node if node.op_type == "Concat" and pull.output[0] in node.input)
    name = joined.output[0].removesuffix("_out")
    for bound, value in (("start", 0), ("stop", attribute_rows(pull))):
        model.graph.node.insert(0, helper.make_node("Constant", [], [f"old.{bound}"], value_ints=[value]))
    old = helper.make_node("Slice", [name, "old.start", "old.stop"], ["old.part"])
    model.graph.node.insert(list(model.graph.node).index(joined), old)
    joined.input[list(joined.input).index(pull.output[0])] = "old.part"


def attribute_rows(pull: NodeProto) -> int:
    """The rows of the first value of a pull."""
    return int(attributes(pull)["shapes"][0].split(",")[0])


def weighed_by_the_loss(model: ModelProto) -> None:
    """Servers merge by weights, which are the losses."""
    for node in model.graph.node:
        if node.op_type == "Aggregate":
            set_attribute(node, "reduce", "weighted")
        if node.op_type == "Push":
            node.input[1] = "loss"


def behind(model: ModelProto, node: NodeProto, *added: NodeProto) -> None:
    """Put nodes behind another."""
    place = list(model.graph.node).index(node)
    for new in reversed(added):
        model.graph.node.insert(place + 1, new)


def wrong_factor(model: ModelProto) -> None:
    """A server divides once more by the number of trainers."""
    node = message(model, "Aggregate")
    name = node.output[0]
    node.output[0] = f"{name}.mean"
    half = helper.make_node("Constant", [], ["half"], value_float=0.5)
    again = helper.make_node("Mul", [f"{name}.mean", "half"], [name])
    behind(model, node, half, again)


def by_the_round(model: ModelProto) -> None:
    """A server does not update in the first round."""
    node = message(model, "Aggregate")
    name = node.output[0]
    node.output[0] = f"{name}.mean"
    number = helper.make_node("Cast", [node.input[0]], ["number"], to=1)
    late = helper.make_node("Mul", [f"{name}.mean", "number"], [name])
    behind(model, node, number, late)


def rounded_push(model: ModelProto) -> None:
    """A gradient is rounded on its way, which the manifest does not say."""
    node = message(model, "Push")
    name = node.input[2]
    place = list(model.graph.node).index(node)
    node.input[2] = f"{name}.wide"
    model.graph.node.insert(place, helper.make_node("Cast", [f"{name}.narrow"], [f"{name}.wide"], to=1))
    model.graph.node.insert(place, helper.make_node("Cast", [name], [f"{name}.narrow"], to=10))


def awaited_update(model: ModelProto) -> None:
    """A trainer waits for values behind the update before it pushes."""
    for node in model.graph.node:
        if node.op_type == "Pull":
            set_attribute(node, "version", "after")


def other_round(model: ModelProto) -> None:
    """A push for the next round."""
    node = message(model, "Push")
    place = list(model.graph.node).index(node)
    model.graph.node.insert(place, helper.make_node("Add", [node.input[0], "one"], ["next"]))
    model.graph.node.insert(place, helper.make_node("Constant", [], ["one"], value_int=1))
    node.input[0] = "next"


def sums_kept(model: ModelProto) -> None:
    """The sums of micro-steps are not emptied behind the update."""
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape" and node.output[0].startswith("gopt.ps.sum"):
            old = node.output[0].removesuffix("_out")
            node.CopyFrom(helper.make_node("Identity", [old], list(node.output)))


def rows_of_another_number(model: ModelProto) -> None:
    """Rows are looked up by the numbers for another table."""
    one, other, _ = (node for node in model.graph.node if node.op_type == "PullRows")
    one.input[1] = other.input[1]


def rows_summed(model: ModelProto) -> None:
    """The mean of rows is a sum."""
    set_attribute(message(model, "AggregateRows"), "reduce", "sum")


def rows_exchanged(model: ModelProto) -> None:
    """The gradients of rows of two tables in each other's place."""
    one, other, _ = (node for node in model.graph.node if node.op_type == "PushRows")
    one.input[3], other.input[3] = other.input[3], one.input[3]


SAME_START = {"start values are swapped"}
"""Folders that begin elsewhere, and whose step is right."""
SMALL = {"a constant is a little off", "a push is rounded"}
"""Errors below what is measured."""
TABLES = Setting(2, 3, tables="modulo", rows="dense")
MORE: dict[str, tuple[str, Setting, Callable[[Path], None]]] = {
    "rows of another number": ("sparse/dlrm_adam", TABLES, on("trainer.onnx", rows_of_another_number)),
    "rows are summed": ("sparse/dlrm_adam", TABLES, on("server_*.onnx", rows_summed)),
    "rows of one table are pushed to another": ("sparse/dlrm_adam", TABLES, on("trainer.onnx", rows_exchanged)),
    "a part is stale": ("mlp_adamw", KEY, on("trainer.onnx", stale_part)),
    "merged by losses": ("mlp_adamw", KEY, on("*r*.onnx", weighed_by_the_loss)),
    "the first round is left out": ("mlp_adamw", KEY, on("server_0001.onnx", by_the_round)),
    "a factor more": ("mlp_adamw", KEY, on("server_0001.onnx", wrong_factor)),
    "a push is rounded": ("mlp_adamw", KEY, on("trainer.onnx", rounded_push)),
    "norms of servers": ("mlp_mom_clip_sched", Setting(2, 3), on("server_*.onnx", reduction_dropped)),
    "sums are not emptied": ("mlp_sgd", Setting(2, 2, accumulate=2), on("trainer.update.onnx", sums_kept)),
}


@pytest.mark.parametrize("plant", [*PLANTS, *MORE])
def test_what_is_planted_is_seen_as_verify_does(plant, tmp_path):
    name, setting, edit = MORE.get(plant, ("mlp_adamw", KEY, PLANTS.get(plant)))
    folder = tmp_path / "out"
    gopt.split(FIXTURES / f"{name}.onnx", setting.options()).write(folder)
    assert gopt.prove(folder).proven
    edit(folder)
    with gopt.unchecked():
        proof, measured = verdicts(folder)
    if plant in SAME_START:
        assert (proof, measured) == ("proven", "equal")
    else:
        assert proof in ("different", "InputError")
        assert proof == measured or (plant in SMALL and (proof, measured) == ("different", "equal"))


@pytest.mark.parametrize(
    ("setting", "file", "edit", "told"),
    [
        (Setting(2, 3), "server_0001.onnx", reduction_dropped, "never come to it"),
        (Setting(2, 3), "trainer.onnx", awaited_update, "does not end its update"),
        (Setting(2, 3), "trainer.onnx", other_round, "another round"),
    ],
    ids=["a call of some servers", "a pull before the update", "another round"],
)  # fmt: skip
def test_a_message_that_never_comes_is_named(setting, file, edit, told, tmp_path):
    gopt.split(FIXTURES / "mlp_mom_clip_sched.onnx", setting.options()).write(tmp_path / "out")
    on(file, edit)(tmp_path / "out")
    with gopt.unchecked():
        [claim] = gopt.prove(tmp_path / "out").claims
    assert (claim.kind, claim.verdict) == ("call", ProofVerdict.DIFFERENT)
    assert claim.mismatch is not None and told in claim.mismatch.actual


@pytest.mark.parametrize(
    ("options", "told"), [(["--rows", "lazy"], "rows that were pushed"), (["--wire", "float16"], "each row is rounded")]
)
def test_tables_without_a_law_are_named(options, told, tmp_path):
    options = ["--trainers", "2", "--servers", "2", *options]
    assert split("sparse/dlrm_adam", options, tmp_path / "out")
    with pytest.raises(UnsupportedError, match=told):
        gopt.prove(tmp_path / "out")


UNLISTED = "rounded to"
"""What stays open in drawn steps: the gradient of a parameter in another half precision than that of ``--wire``."""


@pytest.mark.parametrize("seed", part(range(1000), 24))
def test_a_drawn_step_that_is_split_is_proven(seed, tmp_path):
    path = tmp_path / "step.onnx"
    path.write_bytes(make(draw(seed)).model.SerializeToString())
    try:
        gopt.split(path, Setting.draw(seed).options()).write(tmp_path / "out")
    except GoptError:
        pytest.skip("gopt split refuses it")
    for claim in gopt.prove(tmp_path / "out").open():
        assert claim.verdict is ProofVerdict.UNPROVEN and claim.mismatch, claim
        assert UNLISTED in claim.mismatch.actual, claim


@pytest.mark.parametrize("mode", ["async", "half-async", "geo"])
def test_modes_without_rounds_are_refused_as_verify_does(mode, tmp_path):
    options = ["--trainers", "2", "--servers", "1", "--mode", mode, *(["--every", "2"] if mode == "geo" else [])]
    assert split("mlp_sgd", options, tmp_path / "out")
    with pytest.raises(UnsupportedError, match="order of messages"):
        gopt.prove(tmp_path / "out")


def test_the_command_counts_trainers_and_servers(tmp_path, capsys):
    assert split("mlp_sgd", SETS["plain"], tmp_path / "out")
    assert main(["prove", str(tmp_path / "out")]) == 0
    assert "on 4 ranks" in capsys.readouterr().out
