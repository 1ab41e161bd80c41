"""Start-up graphs: a rank's is without inputs, has what the rank holds alone, and gives the states of the whole one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from gopt.cli.main import main
from helpers import FIXTURES
from helpers import source as fixture
from onnx import ModelProto, TensorProto, helper, numpy_helper
from products import fewer, spread
from training_info_models import model_of, saved

import gopt
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.pieces import cut
from gopt.artifact.server_entries import Mode, PullAt
from gopt.ir.load import load
from gopt.ir.types import TensorType
from gopt.parameter_server.options import SplitOptions
from gopt.runtime.training.startup import startup_values

pytestmark = pytest.mark.usefixtures("unchecked")
ROWS, COLUMNS = 40, 12
RANDOM = np.random.default_rng(3)
W = RANDOM.standard_normal((ROWS, COLUMNS)).astype(np.float32)
B = RANDOM.standard_normal(COLUMNS).astype(np.float32)
FIRST_B = np.full(COLUMNS, 0.25, np.float32)


def starting(*bound: str, seed: float | None = 5.0, scale: float = 0.3) -> ModelProto:
    """A step whose initialization draws w, fills b and begins the count at 7; ``bound`` of them are bound."""
    model = model_of("adam", W, B)
    info = model.training_info[0]
    draw = helper.make_node("RandomNormal", [], ["w"], shape=[ROWS, COLUMNS], scale=scale)
    if seed is not None:
        draw.attribute.append(helper.make_attribute("seed", seed))
    first = numpy_helper.from_array(np.array([0.25], np.float32))
    types = {"w": (TensorProto.FLOAT, W.shape), "b0": (TensorProto.FLOAT, B.shape), "count0": (TensorProto.INT64, ())}
    info.initialization.CopyFrom(
        helper.make_graph(
            [draw, helper.make_node("ConstantOfShape", ["n"], ["b0"], value=first),
             helper.make_node("Identity", ["seven"], ["count0"])],
            "initialization", [], [helper.make_tensor_value_info(name, *each) for name, each in types.items()],
            [numpy_helper.from_array(np.array([COLUMNS]), "n"), numpy_helper.from_array(np.array(7), "seven")],
        )
    )  # fmt: skip
    for key in bound:
        info.initialization_binding.add(key=key, value={"w": "w", "b": "b0", "count": "count0"}[key])
    return model


def in_functions(model: ModelProto) -> ModelProto:
    """The step with the draw of its initialization in a function that another one calls."""
    node = model.training_info[0].initialization.node[0]
    seed = "".join(f", seed={each.f}" for each in node.attribute if each.name == "seed")
    for text in (
        f'<domain: "my", opset_import: ["" : 20]> Draw () => (drawn) '
        f"{{ drawn = RandomNormal<shape=[{ROWS}, {COLUMNS}]{seed}>() }}",
        '<domain: "my", opset_import: ["" : 20, "my" : 1]> First () => (first) { first = my.Draw() }',
    ):
        model.functions.append(onnx.parser.parse_function(text))
    model.opset_import.add(domain="my", version=1)
    node.CopyFrom(helper.make_node("First", [], list(node.output), domain="my"))
    return model


def drawn() -> np.ndarray:
    """What the seed gives, by the runtime alone."""
    graph = helper.make_graph(
        [helper.make_node("RandomNormal", [], ["w"], shape=[ROWS, COLUMNS], scale=0.3, seed=5.0)], "draw", [],
        [helper.make_tensor_value_info("w", TensorProto.FLOAT, W.shape)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {})[0]


def made(path: Path) -> dict[str, np.ndarray]:
    """The outputs of a file, by the runtime alone."""
    session = onnxruntime.InferenceSession(str(path))
    assert not session.get_inputs()
    return dict(zip((each.name for each in session.get_outputs()), session.run(None, {})))


MESHES: dict[str, dict] = {
    "shard=2": {"stage": 0}, "shard=3": {"stage": 1}, "shard=4": {"stage": 3}, "dp=2,shard=2": {"stage": 2},
    "tp=2": {"passes": {"tensor-parallel": {"parameters": "w:dim1;b:dim0"}}},
}  # fmt: skip


def expected(bound: tuple[str, ...]) -> dict[str, np.ndarray]:
    whole = {"w": drawn(), "b": FIRST_B, "count": np.array(7)}
    return {"w": W, "b": B, "count": np.array(1)} | {name: whole[name] for name in bound}


@pytest.mark.parametrize(("mesh", "bound"), fewer(spread(MESHES, [("w", "b", "count"), ("w",), ("b",)]), 3))
def test_a_rank_computes_the_pieces_that_it_holds(mesh: str, bound: tuple[str, ...], tmp_path: Path):
    path, folder = saved(starting(*bound), tmp_path), tmp_path / "ranks"
    gopt.shard(gopt.load(path), mesh, **MESHES[mesh]).write(folder)
    whole = made(folder / "startup.onnx")
    assert whole.keys() == set(bound)
    for name, value in whole.items():
        np.testing.assert_array_equal(value, expected(bound)[name])
    manifest, _ = read_manifest(folder)
    seen: dict[str, int] = dict.fromkeys(bound, 0)
    for rank in manifest.ranks:
        found = made(folder / rank.startup) if rank.startup is not None else {}
        own = [state for state in manifest.states_of(rank) if {piece.tensor for piece in state.pieces} & set(bound)]
        assert found.keys() == {state.input for state in own}
        for state in own:
            parts = [cut(piece, expected(bound)[piece.tensor]) for piece in state.pieces]
            np.testing.assert_array_equal(found[state.input].reshape(-1), np.concatenate(parts))
            for piece in state.pieces:
                if piece.tensor in seen:
                    seen[piece.tensor] += piece.elements
    sizes = {"w": W.size, "b": B.size, "count": 1}
    assert all(seen[name] >= sizes[name] for name in bound)
    assert gopt.verify(folder).equal and gopt.verify(folder, path).equal


def test_a_rank_has_the_nodes_that_it_needs_alone(tmp_path: Path):
    path, folder = saved(starting("w", "b"), tmp_path), tmp_path / "ranks"
    gopt.shard(gopt.load(path), 2, stage=3, partition="whole").write(folder)
    held = [onnx.load(folder / f"rank_{rank:04d}.startup.onnx", load_external_data=False) for rank in (0, 1)]
    kinds = [{node.op_type for node in each.graph.node} for each in held]
    assert not {"Slice", "Cast"} & {*kinds[0], *kinds[1]}, "whole tensors of their own type"
    assert sorted("RandomNormal" in each for each in kinds) == [False, True]
    assert sorted("ConstantOfShape" in each for each in kinds) == [False, True]
    for each in held:
        onnx.checker.check_model(each)
        assert {entry.key: entry.value for entry in each.metadata_props}["gopt.format"] == "gopt-startup/1"


def samples(folder: Path) -> Path:
    random = np.random.default_rng(5)
    path = folder / "samples.npz"
    np.savez(path, x=random.standard_normal((24, ROWS)).astype("f4"),
             target=random.standard_normal((24, COLUMNS)).astype("f4"))  # fmt: skip
    return path


def trained(source: Path, folder: Path, *more: str, ranks: str = "2") -> dict[str, np.ndarray]:
    """Every state after two steps of ranks."""
    home = folder / f"of_{source.stem}_{ranks}_{len(more)}"
    assert main(["shard", str(source), "--ranks", ranks, "-o", str(home)]) == 0
    data, kept, last = samples(folder), home.with_suffix(".kept"), home.with_suffix(".onnx")
    order = ["run", str(home), "--data", str(data), "--steps", "2", "--set", "lr=0.05", "--checkpoint", str(kept)]
    assert main([*order, *more]) == 0
    assert main(["merge", str(kept / "step_00000002"), "-o", str(last)]) == 0
    return {each.name: numpy_helper.to_array(each) for each in onnx.load(last).graph.initializer}


def test_a_run_starts_as_the_graph_says_unless_told_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As one that starts from the same values, stored."""
    path = saved(starting("w", "b", "count"), tmp_path)
    computed = trained(path, tmp_path)
    assert "note: states start as start-up graphs compute them" in capsys.readouterr().err
    stored = trained(path, tmp_path, "--no-startup")
    assert "start-up graphs compute them" not in capsys.readouterr().err
    plain = model_of("adam", drawn(), FIRST_B)
    for each in plain.training_info[0].algorithm.initializer:
        if each.name == "count":
            each.CopyFrom(numpy_helper.from_array(np.array(7), "count"))
        elif each.name.endswith("_w"):
            each.CopyFrom(numpy_helper.from_array(np.zeros_like(W), each.name))
    onnx.save(plain, tmp_path / "same.onnx")
    onnx.save(model_of("adam", W, B), tmp_path / "other.onnx")
    same, other = trained(tmp_path / "same.onnx", tmp_path), trained(tmp_path / "other.onnx", tmp_path)
    for name in ("w", "b", "count", "v_w", "h_b"):
        np.testing.assert_array_equal(computed[name], same[name])
        np.testing.assert_array_equal(stored[name], other[name])
    assert np.abs(computed["w"] - stored["w"]).max() > 0.1


def test_a_run_that_resumes_does_not_start_anew(tmp_path: Path):
    path, home = saved(starting("w", "b", "count"), tmp_path), tmp_path / "ranks"
    assert main(["shard", str(path), "--ranks", "2", "-o", str(home)]) == 0
    data, whole, parts = samples(tmp_path), tmp_path / "whole", tmp_path / "parts"
    order = ["run", str(home), "--data", str(data), "--set", "lr=0.05"]
    assert main([*order, "--steps", "3", "--checkpoint", str(whole)]) == 0
    assert main([*order, "--steps", "1", "--checkpoint", str(parts)]) == 0
    assert main([*order, "--steps", "3", "--checkpoint", str(parts), "--resume"]) == 0
    for file in (whole / "step_00000003").glob("*.safetensors"):
        assert file.read_bytes() == (parts / "step_00000003" / file.name).read_bytes()


def test_other_ranks_start_the_same_and_those_of_a_checkpoint_from_its_values(tmp_path: Path):
    path, home, other = saved(starting("w", "b"), tmp_path), tmp_path / "ranks", tmp_path / "other"
    gopt.shard(gopt.load(path), 2, stage=3).write(home)
    assert main(["reshard", str(home), "--ranks", "3", "-o", str(other)]) == 0
    manifest, _ = read_manifest(other)
    assert manifest.startup == "startup.onnx" and all(rank.startup for rank in manifest.ranks)
    assert gopt.verify(other, path).equal
    kept = tmp_path / "kept"
    run = ["run", str(home), "--data", str(samples(tmp_path)), "--steps", "1", "--set", "lr=0.05"]
    assert main([*run, "--checkpoint", str(kept)]) == 0
    assert main(["reshard", str(kept / "step_00000001"), "--ranks", "3", "-o", str(other), "--force"]) == 0
    assert read_manifest(other)[0].startup is None
    assert not list(other.glob("*startup*"))


def test_ranks_are_written_back_with_their_initialization(tmp_path: Path):
    """And those of a checkpoint without: its values are the first ones."""
    path, home, back = saved(starting("w", "b"), tmp_path), tmp_path / "ranks", tmp_path / "back.onnx"
    gopt.shard(gopt.load(path), 2, stage=3).write(home)
    order = ["merge", str(home), "--training-info", "--output", "y", "-o", str(back)]
    assert main(order) == 0
    (info,) = onnx.load(back).training_info
    assert {each.key: each.value for each in info.initialization_binding} == {"w": "w", "b": "b"}
    again = tmp_path / "again"
    gopt.shard(gopt.load(back), 3, stage=3).write(again)
    whole = made(again / "startup.onnx")
    np.testing.assert_array_equal(whole["w"], drawn())
    np.testing.assert_array_equal(whole["b"], FIRST_B)
    assert onnx.load(again / "startup.onnx").graph == onnx.load(home / "startup.onnx").graph
    kept = tmp_path / "kept"
    run = ["run", str(home), "--data", str(samples(tmp_path)), "--steps", "1", "--set", "lr=0.05"]
    assert main([*run, "--checkpoint", str(kept)]) == 0
    order[1:2] = [str(kept / "step_00000001")]
    assert main([*order, "--force"]) == 0
    assert not onnx.load(back).training_info[0].HasField("initialization")


def test_a_plain_step_has_the_stored_values_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, plain = saved(starting("w", "b"), tmp_path), tmp_path / "plain.onnx"
    assert main(["import", str(path), "-o", str(plain)]) == 0
    assert "note: the source computes first values of 2 states, w first" in capsys.readouterr().out
    stored = {each.name: numpy_helper.to_array(each) for each in onnx.load(plain).graph.initializer}
    np.testing.assert_array_equal(stored["w"], W)


def with_other_seed(path: Path) -> None:
    model = onnx.load(path, load_external_data=False)
    draw = next(node for node in model.graph.node if node.op_type == "RandomNormal")
    next(each for each in draw.attribute if each.name == "seed").f = 6.0
    onnx.save(model, path)


def exchanged(folder: Path) -> None:
    one, two = folder / "rank_0000.startup.onnx", folder / "rank_0001.startup.onnx"
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(kept)


@pytest.mark.parametrize(
    "plant",
    [
        lambda folder: with_other_seed(folder / "rank_0001.startup.onnx"),
        lambda folder: with_other_seed(folder / "startup.onnx"),
    ],
    ids=["seed of a rank", "seed of the source"],
)
def test_verify_sees_what_starts_otherwise(plant, tmp_path: Path):
    path, folder = saved(starting("w", "b"), tmp_path), tmp_path / "ranks"
    gopt.shard(gopt.load(path), 2, stage=3, partition="rows").write(folder)
    assert gopt.verify(folder, path).equal
    plant(folder)
    found = gopt.verify(folder, path)
    assert found.exit_code == 1
    assert {failure.worst.variant for failure in found.failing()} == {"start-up"}


def as_file(folder: Path, *nodes: onnx.NodeProto, inputs: int = 0) -> Path:
    """A graph that sets ``w``, of two elements of float32."""
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("w", "fed")]
    graph = helper.make_graph(nodes, "startup", infos[1:] * inputs, infos[:1])
    if any(node.op_type == "Cast" for node in nodes):
        graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "startup.onnx")
    return folder / "startup.onnx"


CONSTANT = helper.make_node("Constant", [], ["c"], value_floats=[1.0, 2.0])
AS_W = helper.make_node("Identity", ["c"], ["w"])


@pytest.mark.parametrize(
    ("nodes", "inputs", "type", "message"),
    [
        ([helper.make_node("Neg", ["fed"], ["w"])], 1, TensorType("float32", (2,)), "and this one has 'fed'"),
        ([CONSTANT, AS_W], 0, None, "it sets 'w', which is not a state here"),
        ([CONSTANT, AS_W], 0, TensorType("float32", (3,)), r"'w' is float32\[2\], the state is float32\[3\]"),
        ([CONSTANT, helper.make_node("Cast", ["c"], ["w"], to=TensorProto.DOUBLE)], 0, TensorType("float32", (2,)),
         r"'w' is float64\[2\], the state is float32\[2\]"),
    ],
)  # fmt: skip
def test_a_start_up_graph_that_does_not_fit_is_refused(
    nodes: list[onnx.NodeProto], inputs: int, type: TensorType | None, message: str, tmp_path: Path
):
    types = {} if type is None else {"w": type}
    with pytest.raises(gopt.InputError, match=message) as caught:
        startup_values(as_file(tmp_path, *nodes, inputs=inputs), types)
    assert caught.value.hints == ("shard again",)
    fits = startup_values(as_file(tmp_path, CONSTANT, AS_W), {"w": TensorType("float32", (2,))})
    np.testing.assert_array_equal(fits["w"], [1, 2])
    with pytest.raises(gopt.RunError, match="there is no file"):
        startup_values(tmp_path / "none.onnx", types)


def test_exchanged_graphs_are_refused(tmp_path: Path):
    path, folder = saved(starting("w", "b"), tmp_path), tmp_path / "ranks"
    gopt.shard(gopt.load(path), 2, stage=3, partition="rows").write(folder)
    exchanged(folder)
    with pytest.raises(gopt.InputError, match=r"rank_0000\.startup\.onnx: '.*' is float32"):
        gopt.verify(folder)


@pytest.mark.parametrize("bound", [("w", "b"), ("w",)], ids="-".join)
def test_verify_sees_a_rank_that_lacks_its_graph(bound: tuple[str, ...], tmp_path: Path):
    """Also where a shard has computed elements beside stored ones."""
    path, folder = saved(starting(*bound), tmp_path), tmp_path / "ranks"
    gopt.shard(gopt.load(path), 2, stage=3).write(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["ranks"][1]["startup"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert gopt.verify(folder).exit_code == 1


def test_verify_sees_a_rank_that_computes_a_stored_value(tmp_path: Path):
    less, more = tmp_path / "less", tmp_path / "more"
    for bound, folder in ((("w",), less), (("w", "b"), more)):
        gopt.shard(gopt.load(saved(starting(*bound), tmp_path)), 2, stage=0).write(folder)
    assert gopt.verify(less).equal
    shutil.copy(more / "rank_0001.startup.onnx", less / "rank_0001.startup.onnx")
    assert {(each.worst.variant, each.worst.name, each.worst.rank) for each in gopt.verify(less).failing()} == {
        ("start-up", "b", 1)
    }


def unlike(found: gopt.Verification) -> set[str]:
    """The names of states whose start differs."""
    return {each.worst.name for each in found.failing() if each.worst.variant == "start-up"}


def test_a_model_that_starts_otherwise_is_seen(tmp_path: Path):
    path, folder = saved(starting("w", "b"), tmp_path), tmp_path / "ranks"
    gopt.shard(gopt.load(path), 2).write(folder)
    saved(starting("w", "b", seed=6.0), tmp_path)
    assert unlike(gopt.verify(folder, path)) == {"w"}
    saved(starting("w"), tmp_path)
    assert unlike(gopt.verify(folder, path)) == {"b"}, "the folder alone computes it"
    saved(starting("w", "b", "count"), tmp_path)
    assert unlike(gopt.verify(folder, path)) == {"count"}, "the model alone computes it"
    saved(starting(), tmp_path)
    assert gopt.verify(folder).equal
    shutil.rmtree(folder)
    gopt.shard(gopt.load(path), 2).write(folder)
    saved(starting("w"), tmp_path)
    assert gopt.verify(folder, path).exit_code == 4


def test_what_ranks_cannot_compute_alike_is_not_run_with_a_note(tmp_path: Path):
    """Every rank would draw other numbers; a value that no step changes is not a state of a rank."""
    frozen = starting("w")
    frozen.training_info[0].algorithm.initializer.append(numpy_helper.from_array(B, "kept"))
    frozen.training_info[0].initialization_binding.add(key="kept", value="b0")
    infinite = starting("w")
    for model, why in (
        (starting("w", seed=None), "its RandomNormal 'startup/w' has no seed; give it one"),
        (in_functions(starting("w", seed=None)), "its RandomNormal 'drawn' has no seed; give it one"),
        (frozen, "it sets 'kept', which no step changes; store the value instead"),
    ):
        source = gopt.load(saved(model, tmp_path))
        assert source.rank_startup is None
        assert f"training_info's initialization is not run, ranks start from the stored values: {why}" in [
            *source.training.notes
        ]
        report = gopt.shard(source, 2).write(tmp_path / "ranks", force=True)
        assert not list((tmp_path / "ranks").glob("*startup*")) and any(why in note for note in report.notes)
    assert gopt.load(saved(infinite, tmp_path)).rank_startup is not None
    assert gopt.load(saved(in_functions(infinite), tmp_path)).rank_startup is not None


def test_a_start_that_is_not_finite_is_not_confirmed(tmp_path: Path):
    path, folder = saved(starting("w", scale=float("inf")), tmp_path), tmp_path / "ranks"
    gopt.shard(gopt.load(path), 2).write(folder)
    found = gopt.verify(folder)
    assert found.exit_code == 4 and any("not finite" in doubt.why for doubt in found.doubts)


def test_a_folder_with_start_up_graphs_is_replaced_and_a_users_file_is_not(tmp_path: Path):
    path, folder = saved(starting("w"), tmp_path), tmp_path / "ranks"
    order = ["shard", str(path), "--ranks", "2", "-o", str(folder), "--force"]
    assert main(order) == 0 and main(order) == 0
    saved(starting(), tmp_path)
    assert main(order) == 0
    (folder / "startup.onnx").write_bytes(b"mine")
    assert main(order) == 2
    assert (folder / "startup.onnx").read_bytes() == b"mine"


def computed_by(nodes: list[onnx.NodeProto], outputs: dict[str, tuple[int, ...]], **bound: str) -> ModelProto:
    """A step whose initialization has these nodes, and the initializers ``c`` and ``b``."""
    model = model_of("adam", W, B)
    info = model.training_info[0]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
    stored = [numpy_helper.from_array(np.array(True), "c"), numpy_helper.from_array(2 * B, "b")]
    info.initialization.CopyFrom(helper.make_graph(nodes, "initialization", [], infos, stored))
    for key, value in bound.items():
        info.initialization_binding.add(key=key, value=value)
    return model


DRAW = helper.make_node("RandomNormal", [], ["w"], shape=[ROWS, COLUMNS], scale=0.3, seed=5.0)


def branch(name: str, op_type: str) -> onnx.GraphProto:
    """A body that reads a value from outside."""
    made = helper.make_tensor_value_info(f"{name}_made", TensorProto.FLOAT, W.shape)
    return helper.make_graph([helper.make_node(op_type, ["w"], [f"{name}_made"])], name, [], [made])


def with_function() -> ModelProto:
    half = numpy_helper.from_array(np.array(0.5, np.float32))
    body = [helper.make_node("Constant", [], ["k"], value=half), helper.make_node("Mul", ["x", "k"], ["y"])]
    call = helper.make_node("Half", ["w"], ["v"], domain="mine")
    model = computed_by([DRAW, call], {"v": W.shape}, w="v")
    model.functions.append(helper.make_function("mine", "Half", ["x"], ["y"], body, [helper.make_opsetid("", 20)]))
    model.opset_import.append(helper.make_opsetid("mine", 1))
    return model


@pytest.mark.parametrize(
    ("model", "factors"),
    [
        (
            computed_by(
                [DRAW, helper.make_node("If", ["c"], ["v"], then_branch=branch("a", "Neg"),
                                        else_branch=branch("b", "Abs"))],
                {"w": W.shape, "v": W.shape}, w="w", v_w="v",
            ),
            {"w": 1, "v_w": -1},
        ),
        (computed_by([DRAW], {"w": W.shape}, w="w", v_w="w", h_w="w"), {"w": 1, "v_w": 1, "h_w": 1}),
        (
            computed_by([DRAW, helper.make_node("Neg", ["w"], ["h_w"])], {"w": W.shape, "h_w": W.shape}, w="h_w",
                        h_w="w"),
            {"w": -1, "h_w": 1},
        ),
        (
            computed_by([DRAW, helper.make_node("Neg", ["w"], ["n"]), helper.make_node("Identity", ["n"], ["v_w"])],
                        {"w": W.shape, "v_w": W.shape}, v_w="w"),
            {"v_w": 1},
        ),
        (computed_by([DRAW], {"w": W.shape, "b": B.shape}, w="w", b="b"), {"w": 1}),
        (with_function(), {"w": 0.5}),
    ],
    ids=["body", "one value thrice", "exchanged names", "name of a copy", "stored output", "function"],
)  # fmt: skip
def test_names_and_bodies_of_an_initialization(model: ModelProto, factors: dict[str, float], tmp_path: Path):
    path, folder = saved(model, tmp_path), tmp_path / "ranks"
    gopt.shard(gopt.load(path), 3, stage=3).write(folder)
    whole = made(folder / "startup.onnx")
    for name, factor in factors.items():
        np.testing.assert_array_equal(whole[name], drawn() * np.float32(factor))
    if "b" in whole:
        np.testing.assert_array_equal(whole["b"], 2 * B)
    assert gopt.verify(folder, path).equal


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3, "accumulate": 2}], ids=["copies", "micro-steps"])
def test_halves_and_micro_steps(options: dict, tmp_path: Path):
    """Each floating state of a step with loss scaling is drawn; a narrow copy is the cast of what is drawn."""
    path, folder = tmp_path / "step.onnx", tmp_path / "ranks"
    asked = ["merge", str(FIXTURES / "mlp_adamw_fp16_scaler.onnx"), "--training-info", "--output", "addmm_1"]
    assert main([*asked, "-o", str(path)]) == 0
    model = onnx.load(path)
    info = model.training_info[0]
    stored = {each.name: each for each in (*model.graph.initializer, *info.algorithm.initializer)}
    tensors = [stored[each.key] for each in info.update_binding if stored[each.key].dims]
    floating = [each for each in tensors if each.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16)]
    draws = [
        helper.make_node("RandomUniform", [], [f"r{number}"], shape=list(each.dims), dtype=each.data_type, low=0.01,
                         high=0.05, seed=float(number))
        for number, each in enumerate(floating)
    ]  # fmt: skip
    infos = [helper.make_tensor_value_info(f"r{n}", each.data_type, each.dims) for n, each in enumerate(floating)]
    info.initialization.CopyFrom(helper.make_graph(draws, "initialization", [], infos))
    for number, each in enumerate(floating):
        info.initialization_binding.add(key=each.name, value=f"r{number}")
    onnx.save(model, path)
    gopt.shard(gopt.load(path), 3, **options).write(folder)
    manifest, _ = read_manifest(folder)
    whole = made(folder / "startup.onnx")
    copies = 0
    for rank in manifest.ranks:
        found = made(folder / rank.startup)
        for state in manifest.states_of(rank):
            if state.copy:
                copies += 1
                wide = np.concatenate([cut(piece, whole[piece.tensor]) for piece in state.pieces])
                np.testing.assert_array_equal(found[state.input].reshape(-1), wide.astype(np.float16))
    assert (copies > 0) == (options["stage"] == 1)
    assert gopt.verify(folder, path).equal


ALL = ("w", "b", "count")
SPLITS = [("sync", 16, "end", ALL), ("sync", 1, "start", ("b",)), ("async", 16, "start", ALL), ("geo", 1, "end", ALL)]


@pytest.mark.parametrize(("mode", "minimum", "pull", "bound"), SPLITS)
def test_servers_and_trainers_compute_what_they_hold(
    mode: str, minimum: int, pull: str, bound: tuple[str, ...], tmp_path: Path
):
    """A run of one trainer has, after two steps, the states of one from the same values, stored."""
    found = []
    first = expected(bound)
    plain = model_of("adam", first["w"], first["b"])
    given = {each.name: each for each in starting().training_info[0].algorithm.initializer}
    given["count"] = numpy_helper.from_array(first["count"], "count")
    for each in plain.training_info[0].algorithm.initializer:
        each.CopyFrom(given[each.name])
    onnx.save(plain, tmp_path / "plain.onnx")
    for path in (saved(starting(*bound), tmp_path), tmp_path / "plain.onnx"):
        options = SplitOptions(trainers=1, servers=2, minimum=minimum, mode=Mode(mode), pull=PullAt(pull))
        folder = tmp_path / f"split{len(found)}"
        gopt.split(gopt.load(path), options).write(folder)
        run = gopt.run(folder, dict(np.load(samples(tmp_path))), 2, settings={"lr": "0.05"})
        last = tmp_path / f"last{len(found)}.onnx"
        gopt.merge(run, last)
        found.append({each.name: numpy_helper.to_array(each) for each in onnx.load(last).graph.initializer})
        assert mode != "sync" or gopt.verify(folder, path).equal
    for name in found[1]:
        np.testing.assert_array_equal(found[0][name], found[1][name])
    assert any(each.startup for each in read_manifest(tmp_path / "split0")[0].ranks)


@pytest.mark.parametrize(
    "layout", ["modulo", *(pytest.param(each, marks=pytest.mark.slow) for each in ("range", "columns", "whole"))]
)
def test_servers_compute_their_parts_of_a_table(layout: str, tmp_path: Path):
    step = fixture("emb_adamw")
    name = next(each for each in step.training.gradients if "emb" in each)
    type = step.training.graph.types[name]
    first = numpy_helper.from_array(np.arange(type.elements, dtype="f4").reshape(type.dims), "first")
    graph = helper.make_graph(
        [helper.make_node("Identity", ["first"], [name])], "startup", [],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, type.dims)], [first],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "s.onnx")
    step = replace(step, startup=load(tmp_path / "s.onnx"))
    options = SplitOptions(trainers=2, servers=3, tables={name: layout})
    gopt.split(step, options).write(tmp_path / "split")
    manifest, _ = read_manifest(tmp_path / "split")
    whole, found = numpy_helper.to_array(first), []
    for rank in manifest.ranks[2:]:
        values = made(tmp_path / "split" / rank.startup) if rank.startup else {}
        (state,) = [state for state in rank.state if state.pieces[0].tensor == name] or [None]
        if state is not None:
            found.append(values[state.input].reshape(-1))
            np.testing.assert_array_equal(found[-1], cut(state.pieces[0], whole))
    assert sorted(np.concatenate(found)) == sorted(whole.reshape(-1))
    assert gopt.verify(tmp_path / "split").equal
