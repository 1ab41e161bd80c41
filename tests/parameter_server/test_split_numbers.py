"""Splits in numbers: a simulator without code of gopt runs trainers and servers; the source alone is the truth.

Every fixture, generated steps, and numbers that tell a right split from a wrong one. ``python -m split_gen`` has more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers import FIXTURES, NAMES, Builder, Network, perceptron, sgd
from onnx import ModelProto, numpy_helper
from products import part
from rank_files import Block, Values, has_halves
from split_gen.compare import differences, draw_like
from split_gen.drawn import renamed, tried, with_identities
from split_gen.judge import EXACT, REDUCED, Draw, Setting, judge, start_values, written
from split_gen.simulator import Simulation
from steps_gen.make import make
from steps_gen.plan import Plan

from gopt.analysis.role_map import RoleMap

FAMILIES = ("llama_adamw_clip", "moe_adamw", "t5_adamw", "vit_mom")
WAYS = (
    Setting(1, 2, "classic", 16, "round-robin", "end"),
    Setting(1, 5, "balanced", 1, "bytes", "start", cap=64),
    Setting(2, 1, "off", 16, "hash", "start"),
    Setting(2, 3, "balanced", 16, "bytes", "end"),
    Setting(3, 2, "classic", 1, "hash", "start", reduce="sum"),
    Setting(3, 5, "balanced", 5, "round-robin", accumulate=3),
)
REDUCING = ("clip", "lamb", "t5_")


def path_of(name: str) -> Path:
    return FIXTURES / ("families" if name in FAMILIES else "") / f"{name}.onnx"


@pytest.mark.parametrize("name", part([*NAMES, *FAMILIES], 6))
def test_a_split_is_its_source(name: str, tmp_path: Path) -> None:
    place = [*NAMES, *FAMILIES].index(name)
    allow = REDUCED if any(part in name for part in REDUCING) else EXACT
    found = judge(path_of(name), WAYS[place % len(WAYS)], tmp_path, allow=lambda _: allow, steps=2)
    assert (found.outcome, found.why) == ("equal", "")


@pytest.mark.parametrize("setting", WAYS, ids=Setting.told)
def test_how_a_step_is_split_does_not_matter(setting: Setting, tmp_path: Path) -> None:
    """V8: bit for bit where no reduction is cut."""
    found = judge(path_of("mlp_adamw"), setting, tmp_path, steps=2)
    assert (found.outcome, found.why) == ("equal", "")


TABLES = (
    ("dlrm_adam", Setting(3, 2, tables="modulo", rows="lazy", reduce="sum")),
    ("tree_softmax_momentum", Setting(2, 3, tables="columns", pull="end")),
)  # fmt: skip


@pytest.mark.parametrize(("name", "setting"), TABLES, ids=[f"{name} {setting.told()}" for name, setting in TABLES])
def test_tables_are_their_source(name: str, setting: Setting, tmp_path: Path) -> None:
    """A sum of the rows of one number has another order than the source's."""
    found = judge(FIXTURES / f"sparse/{name}.onnx", setting, tmp_path, allow=lambda _: REDUCED, steps=2)
    assert (found.outcome, found.why) == ("equal", "")


@pytest.mark.parametrize("name", ["mlp_adamw", "emb_adamw"])
def test_one_trainer_is_one_device(name: str, tmp_path: Path) -> None:
    """V4: the source as one graph, cut nowhere."""
    simulation, _ = written(path_of(name), Setting(1, 3), tmp_path)
    model = onnx.load(path_of(name))
    states = {each["tensor"]: each["updated"] for each in simulation.manifest["states"]}
    values = start_values(model, simulation.manifest)
    whole = Block(model, list(model.graph.node), states.values(), has_halves(tmp_path / "out"))
    draw = draw_like(simulation.manifest, 4, 1)
    for step in range(3):
        ((batch,),), hyper = draw(step)
        simulation.round([[batch]], hyper)
        new = whole.run({**values, **batch, **hyper})
        values.update({tensor: new[updated] for tensor, updated in states.items()})
    found = simulation.states()
    assert all(found[tensor].tobytes() == values[tensor].tobytes() for tensor in states)


def test_two_trainers_are_one_device_with_both_batches(tmp_path: Path) -> None:
    """V3, with a batch-mean loss: sums are in another order."""
    paths = [saved(stepped(batch=size), tmp_path / f"{size}.onnx") for size in (4, 8)]
    simulation, _ = written(paths[0], Setting(2, 2, minimum=1), tmp_path)
    big, reference = written(paths[1], Setting(1, 1, minimum=1), tmp_path / "big")
    draw = draw_like(simulation.manifest, 3, 1)
    for step in range(3):
        batches, hyper = draw(step)
        simulation.round(batches, hyper)
        both = {name: np.concatenate([mine[0][name] for mine in batches]) for name in batches[0][0]}
        reference.step([[both]], hyper)
    for name, wanted in reference.states.items():
        np.testing.assert_allclose(simulation.states()[name], wanted, rtol=1e-5, atol=1e-6)
    assert big.states().keys() == reference.states.keys()


def test_when_trainers_pull_does_not_matter(tmp_path: Path) -> None:
    ends = []
    for pull in ("start", "end"):
        simulation, _ = written(path_of("mlp_adamw"), Setting(pull=pull, wire="float16"), tmp_path / pull)
        draw = draw_like(simulation.manifest, 1, 1)
        for step in range(3):
            simulation.round(*draw(step))
        ends.append({name: value.tobytes() for name, value in simulation.states().items()})
    assert ends[0] == ends[1]


def test_three_micro_batches_are_three_trainers(tmp_path: Path) -> None:
    """--accumulate 3 of one trainer: the same sums in the same order."""
    path = path_of("mlp_adamw")
    one, _ = written(path, Setting(1, 2, accumulate=3), tmp_path / "one")
    three, _ = written(path, Setting(3, 2, pull="end"), tmp_path / "three")
    draw = draw_like(three.manifest, 1, 1)
    for step in range(2):
        batches, hyper = draw(step)
        three.round(batches, hyper)
        one.round([[mine[0] for mine in batches]], hyper)
    assert same(one.states(), three.states())


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_halves_travel_and_masters_stay(wire: str, tmp_path: Path) -> None:
    path = path_of("mlp_adamw")
    assert judge(path, Setting(wire=wire), tmp_path / "exact", steps=2).outcome == "equal"
    plain, _ = written(path, Setting(), tmp_path / "plain")
    narrow, _ = written(path, Setting(wire=wire), tmp_path / "narrow")
    draw = draw_like(plain.manifest, 1, 1)
    for simulation in (plain, narrow):
        simulation.round(*draw(0))
    assert {dtype for dtype, _ in narrow.pushed + narrow.pulled} == {wire}
    assert {key["wire"] for key in narrow.keys} == {wire}
    assert not same(plain.states(), narrow.states())
    for name, value in plain.states().items():
        assert value.dtype == narrow.states()[name].dtype
        np.testing.assert_allclose(narrow.states()[name], value, rtol=0.05, atol=0.02)


def test_a_loss_scale_travels_in_its_own_type(tmp_path: Path) -> None:
    """65536 is infinite in float16."""
    path = saved(edited(path_of("mlp_adamw_fp16_scaler"), "loss_scale", np.float32(2**17)), tmp_path / "scaled.onnx")
    setting = Setting(wire="float16")
    assert judge(path, setting, tmp_path, steps=1, allow=lambda _: REDUCED).outcome == "equal"


@pytest.mark.parametrize("wire", ["", "float16"])
def test_a_round_moves_every_gradient_and_parameter_once(wire: str, tmp_path: Path) -> None:
    """V11, and V9: servers hold every element once, scalars on each."""
    simulation, _ = written(path_of("mlp_adamw"), Setting(2, 3, wire=wire), tmp_path)
    simulation.round(*draw_like(simulation.manifest, 1, 1)(0))
    elements = sum(int(np.prod(each["shape"])) for each in simulation.manifest["states"] if each["kind"] == "parameter")
    assert sum(size for _, size in simulation.pushed) == sum(size for _, size in simulation.pulled) == elements
    whole = simulation.states()
    held = sum(value.nbytes for values in simulation.server for value in values.values())
    assert held == sum(value.nbytes * (1 if value.shape else 3) for value in whole.values())


# --- numbers that tell (B7.7) ---------------------------------------------------------------------------------------


def test_values_are_clipped_behind_the_merge(tmp_path: Path) -> None:
    """Gradients -1 and 3: clipped by each trainer they give 0, not clipped -0.1."""

    def update(b: Builder, name: str, g: str) -> str:
        return str(b.op("Clip", g, b.const(-0.1), b.const(0.1)))

    path = saved(linear((1, 1), update, bias=False, w0=[[0.0]]), tmp_path / "clip.onnx")
    found = run(path, Setting(2, 2, minimum=1), tmp_path, [(1.0, 0.5), (1.0, -1.5)])
    np.testing.assert_allclose(found["w0"], [[-0.01]], rtol=1e-6)


def test_a_global_norm_is_over_all_servers(tmp_path: Path) -> None:
    """Gradients 3 and 4 on two servers: norms of servers would make both 1."""
    path = saved(clipped_globally(), tmp_path / "norm.onnx")
    setting = Setting(2, 2, "off", placement="round-robin")
    simulation, _ = written(path, setting, tmp_path)
    assert len({key["server"] for key in simulation.keys}) == 2
    found = run(path, setting, tmp_path / "run", [(0.75, [-4.0, 0.0])] * 2)
    np.testing.assert_allclose([*found["w0"][0], *found["b0"]], [-0.06, 0, -0.08, 0], rtol=1e-6)


def test_a_norm_of_a_cut_tensor_is_of_the_whole(tmp_path: Path) -> None:
    """w = [3, 4] on two servers: its norm is 5, not 3 and 4."""

    def update(b: Builder, name: str, g: str) -> str:
        return str(b.op("Mul", g, b.op("ReduceL2", name, keepdims=0)))

    path = saved(linear((2, 1), update, bias=False, w0=[[3.0], [4.0]]), tmp_path / "lars.onnx")
    setting = Setting(1, 2, "classic", minimum=1)
    simulation, _ = written(path, setting, tmp_path)
    assert sorted((key["server"], key["shape"]) for key in simulation.keys) == [(0, [1]), (1, [1])]
    found = run(path, setting, tmp_path / "run", [([1.0, 1.0], 6.5)])
    np.testing.assert_allclose(found["w0"], [[2.5], [3.5]], rtol=1e-6)


def test_an_infinity_of_one_trainer_stops_the_round_on_all_servers(tmp_path: Path) -> None:
    simulation, reference = written(path_of("mlp_adamw_fp16_scaler"), Setting(3, 3), tmp_path)
    plain = draw_like(simulation.manifest, 2, 1)

    def draw(step: int) -> tuple[Any, Values]:
        batches, hyper = plain(step)
        if step == 1:
            batches[2][0]["x"].flat[0] = 1e30
        return batches, hyper

    held: list[Values] = [simulation.states()]
    for step in range(3):
        assert not list(differences(simulation, reference, lambda _, at=step: draw(at), 1))
        held.append(simulation.states())
    stopped = [same(before, after, "fc") for before, after in itertools.pairwise(held)]
    assert stopped == [False, True, False]
    assert held[2]["loss_scale"] == held[1]["loss_scale"] / 2


def test_a_schedule_counts_rounds(tmp_path: Path) -> None:
    """B6.2: neither trainers nor keys multiply its steps."""
    simulation, _ = written(path_of("mlp_mom_clip_sched"), Setting(3, 2, minimum=1, cap=1), tmp_path)
    name = next(each["tensor"] for each in simulation.manifest["states"] if each["kind"] == "scalar")
    before, draw = simulation.states()[name], draw_like(simulation.manifest, 1, 1)
    for step in range(5):
        simulation.round(*draw(step))
    assert simulation.states()[name] == before + 5


def test_statistics_stay_with_their_trainers(tmp_path: Path) -> None:
    simulation, reference = written(path_of("cnn_sgd"), Setting(2, 2), tmp_path)
    assert not list(differences(simulation, reference, draw_like(simulation.manifest, 1, 1), 2))
    name = next(name for name in reference.own if "running" in name)
    one, other = (simulation.states(trainer)[name] for trainer in (0, 1))
    assert not np.array_equal(one, other)


# --- steps of odd shapes and names ----------------------------------------------------------------------------------

STEPS: dict[str, Callable[[], ModelProto]] = {
    "tied": lambda: stepped((3, 3, 3), tied=True),
    "one element": lambda: stepped((1, 1, 1)),
    "dims of 1": lambda: stepped((1, 4, 1)),
    "no elements": lambda: stepped((3, 0, 2)),
    "frozen": lambda: stepped((3, 4, 2), skip=("w0",)),
    "names": lambda: renamed(stepped((3, 4, 2)), {"w0": "a.block1", "b0": "x.trainer_0", "w1": "a", "b1": "w :0/ b"}),
    "halves": lambda: stepped((3, 4, 2), half=True),
}


@pytest.mark.parametrize("name", STEPS)
def test_odd_steps(name: str, tmp_path: Path) -> None:
    path = saved(STEPS[name](), tmp_path / "step.onnx")
    for place, setting in enumerate((Setting(2, 3, minimum=1), Setting(3, 2, "classic", 1, "hash", "end"))):
        found = judge(path, setting, tmp_path / str(place), steps=2)
        assert (found.outcome, found.why) == ("equal", "")


PLANS = (
    Plan(seed=3, network="all-scalar", rules=("adam",)),
    Plan(seed=4, network="singles", rules=("adam",), clip="global"),
    Plan(seed=5, precision="master", scale="dynamic", gate="finite", rules=("momentum",), scrambled=True),
    Plan(seed=6, rules=("lion", "muon"), schedule="if-captures", clip="norm"),
    Plan(seed=7, form="factor", layout="joined", metric=True, average="ema"),
)


@pytest.mark.parametrize("plan", PLANS, ids=Plan.told)
def test_forms_of_a_generated_step(plan: Plan) -> None:
    made = make(plan)
    for place, model in enumerate((made.model, with_identities(made.model, plan.seed))):
        found = tried(made, Setting(2 + place, 3, minimum=1), model)
        assert (found.outcome, found.why) == ("equal", "")


@pytest.mark.parametrize("trap", ["count", "batch-mean"])
def test_an_update_that_reads_a_batch_is_refused(trap: str) -> None:
    assert tried(make(Plan(seed=2, trap=trap)), Setting()).outcome == "refused"


def test_a_backward_that_ends_behind_a_join_with_another_update_is_served() -> None:
    plan = Plan(seed=1011, precision="master", scale="dynamic", rules=("centred",), layout="joined")
    found = tried(make(plan), Setting())
    assert (found.outcome, found.why) == ("equal", "")


# --- helpers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [Setting(minimum=1, accumulate=2), Setting(minimum=1, pull="end")], ids=str)
def test_the_number_of_the_step_that_trainers_compute_too(setting: Setting) -> None:
    """A schedule reads it in the gradient; what trainers pull at the end is that of the servers."""
    plan = Plan(seed=1030, tail=("wide-pair",), schedule="if-captures", rates="rows")
    assert tried(make(plan), setting).outcome == "equal"


@pytest.mark.parametrize("servers", [1, 2])
def test_halves_of_micro_steps_are_summed_in_float32(servers: int, tmp_path: Path) -> None:
    """Four gradients of 30000: their sum is no half, their mean is."""
    b = Builder(seed=3)
    x, w = b.input("x", (2, 2), "float16"), b.state("w", np.ones(2, np.float16))
    b.output(
        "loss", b.op("ReduceSum", b.op("Mul", x, w), b.const(np.array([0, 1]), "int64"), keepdims=0), (), "float16"
    )
    gradient = b.op("ReduceSum", x, b.const(np.array([0]), "int64"), keepdims=0)
    rate = b.const(np.array(1e-4, np.float16), "float16")
    b.output("w_out", b.op("Sub", w, b.op("Mul", gradient, rate)), (2,), "float16")
    setting = Setting(trainers=1, servers=servers, minimum=1, accumulate=4)
    simulation, _ = written(b.save(tmp_path / "step.onnx"), setting, tmp_path, roles=RoleMap(params={"w": gradient}))
    simulation.round([[{"x": np.full((2, 2), 15000, np.float16)}] * 4], {})
    np.testing.assert_allclose(simulation.states()["w"], np.float16(-2), rtol=1e-2)


def same(one: Values, other: Values, prefix: str = "") -> bool:
    return all(one[name].tobytes() == other[name].tobytes() for name in one if name.startswith(prefix))


def saved(model: ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


def edited(path: Path, name: str, value: Any) -> ModelProto:
    """A model with another start value."""
    model = onnx.load(path)
    for each in model.graph.initializer:
        if each.name == name:
            each.CopyFrom(numpy_helper.from_array(np.asarray(value), name))
    return model


def stepped(widths: tuple[int, ...] = (3, 4, 2), skip: tuple[str, ...] = (), **given: Any) -> ModelProto:
    b = Builder(5)
    sgd(b, perceptron(b, widths, **given), skip=skip)
    return b.model()


def linear(widths: tuple[int, ...], update: Callable[[Builder, str, str], str], bias: bool, **start: Any) -> ModelProto:
    """w' = w - 0.1 ``update``(g) of one sample, from given start values."""
    b = Builder(5)
    net = perceptron(b, widths, batch=1, bias=bias)
    net.gradients = {name: update(b, name, g) for name, g in net.gradients.items()}
    return started(b, net, start)


def clipped_globally() -> ModelProto:
    b = Builder(5)
    net = perceptron(b, (1, 2), batch=1)
    squares = [b.op("ReduceSumSquare", g, keepdims=0) for g in net.gradients.values()]
    factor = b.op("Div", b.const(1.0), b.op("Max", b.op("Sqrt", b.op("Sum", *squares)), b.const(1.0)))
    net.gradients = {name: b.op("Mul", g, factor) for name, g in net.gradients.items()}
    return started(b, net, {"w0": [[0.0, 0.0]], "b0": [0.0, 0.0]})


def started(b: Builder, net: Network, start: dict[str, Any]) -> ModelProto:
    sgd(b, net)
    for each in b.stored:
        if each.name in start:
            each.CopyFrom(numpy_helper.from_array(np.asarray(start[each.name], np.float32), each.name))
    return b.model()


def run(path: Path, setting: Setting, folder: Path, samples: list[tuple[Any, Any]]) -> Values:
    """The states after one round, one sample for each trainer."""
    folder.mkdir(exist_ok=True)

    def draw(step: int) -> tuple[Any, Values]:
        return [
            [{"x": np.asarray(x, np.float32).reshape(1, -1), "y": np.asarray(y, np.float32).reshape(1, -1)}]
            for x, y in samples
        ], {}

    simulation, reference = written(path, setting, folder)
    checked: Draw = draw
    assert not list(differences(simulation, reference, checked, 1, lambda _: REDUCED))
    return last(simulation)


def last(simulation: Simulation) -> Values:
    return simulation.states()
