"""Random networks with random elementwise updates: the ranks are equal to the source, or gopt refuses in one line."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
from helpers import FIXTURES, Builder, Network, calls, folder_bytes, op_counts, perceptron, rank_path
from hypothesis import event, given, settings
from hypothesis import strategies as st

import gopt
from gopt.errors import GoptError, UnsupportedError
from gopt.mesh import Mesh
from gopt.pipeline import build_pipeline
from gopt.runtime.verify import Verifier

NORMS = [
    "none", "sumsquare-chain", "mulsum-sum", "pow-concat", "l2-stack", "l2-concat-keepdims", "abs-max", "mean-square",
    "sqrt-then-square", "per-tensor", "l1-chain",
]  # fmt: skip
CHECKS = ["none", "isinf-any", "times-zero", "max-below-inf", "isnan-min", "concat-flags"]
DIRECTIONS = ["gradient", "momentum", "nesterov", "sign", "adam", "amsgrad", "adagrad", "rms-momentum", "adamax"]


@dataclass(frozen=True)
class Recipe:
    """A training step in a few words."""

    widths: tuple[int, ...] = (3, 5, 2)
    batch: int = 4
    bias: bool = True
    tied: bool = False
    half: bool = False
    loss_scale: bool = False
    frozen: int = -1
    """Number of the parameter that no update touches; -1 for none."""
    passed_on: bool = False
    """The frozen parameter has an output all the same."""
    norm: str = "none"
    check: str = "none"
    direction: tuple[str, ...] = ("adam",)
    """Update rules, dealt out to the parameters in turn."""
    clip_value: bool = False
    decay: str = "none"
    mask: bool = False
    ema: bool = False
    own_constants: bool = False
    """Every parameter has a learning rate of its own."""
    schedule: bool = False
    accumulate: bool = False
    lr_input: bool = True
    second_clip: bool = False
    """The finished directions are clipped by their global norm: a second level of scalar calls."""
    metric: bool = False
    """The norm of all gradients is an output."""
    trust: bool = False
    """A ratio of norms per tensor, as in LAMB."""
    rows: bool = False
    """A second moment per row: no elementwise update."""
    dynamic: bool = False
    """The loss scale follows the finite check."""


recipes = st.builds(
    Recipe,
    widths=st.lists(st.sampled_from([1, 2, 3, 4, 7, 17]), min_size=2, max_size=4).map(tuple),
    batch=st.sampled_from([1, 4]),
    bias=st.booleans(),
    tied=st.booleans(),
    half=st.sampled_from([False, False, False, True]),
    loss_scale=st.booleans(),
    frozen=st.sampled_from([-1, -1, -1, 0, 1]),
    passed_on=st.booleans(),
    norm=st.sampled_from(NORMS),
    check=st.sampled_from(["none", *CHECKS]),
    direction=st.lists(st.sampled_from(DIRECTIONS), min_size=1, max_size=2).map(tuple),
    clip_value=st.booleans(),
    decay=st.sampled_from(["none", "coupled", "decoupled"]),
    mask=st.booleans(),
    ema=st.booleans(),
    own_constants=st.booleans(),
    schedule=st.booleans(),
    accumulate=st.sampled_from([False, False, True]),
    lr_input=st.booleans(),
    second_clip=st.sampled_from([False, False, True]),
    metric=st.booleans(),
    trust=st.sampled_from([False, False, True]),
    rows=st.sampled_from([False, False, True]),
    dynamic=st.booleans(),
)


@dataclass
class Writer:
    """Writes the update of a recipe behind a network's gradients."""

    recipe: Recipe
    b: Builder
    net: Network
    states: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    """Name, new value and shape of every optimizer state."""
    gate: str = ""
    scale: str = ""

    def write(self) -> None:
        b, recipe = self.b, self.recipe
        frozen = recipe.frozen if len(self.net.params) > 1 else -1
        trained = [name for place, name in enumerate(self.net.params) if place != frozen]
        gradients = {name: self.net.gradients[name] for name in trained}
        rate = b.input("lr", ()) if recipe.lr_input else b.const(0.01)
        if recipe.schedule:
            step = b.state("step", np.float32(1))
            new = b.op("Add", step, b.const(1.0))
            rate = b.op("Mul", rate, b.op("Min", b.const(1.0), b.op("Div", new, b.const(10.0))))
            self.states.append((step, new, ()))
        if recipe.accumulate:
            gradients = self._accumulated(gradients)
        if recipe.check != "none":
            fine = self._finite(list(gradients.values()))
            self.gate = b.op("And", self.gate, fine) if self.gate else fine
        if self.scale:
            grown = b.op("Mul", self.scale, b.const(1.125))
            if recipe.dynamic and recipe.check != "none":
                grown = b.op("Where", fine, grown, b.op("Mul", self.scale, b.const(0.5)))
            self.states.append((self.scale, grown, ()))
        if recipe.norm != "none":
            gradients = self._clipped(gradients)
        b.output("loss", self.net.loss, ())
        if recipe.metric:
            squares = [b.op("ReduceSumSquare", g, keepdims=0) for g in gradients.values()]
            b.output("norm", b.op("Sqrt", squares[0] if len(squares) == 1 else b.op("Sum", *squares)), ())
        ways = {name: self._way(place, name, gradients[name]) for place, name in enumerate(trained)}
        if recipe.second_clip:
            ways = self._second_clip(ways)
        for place, name in enumerate(trained):
            self._update(place, name, ways[name], rate)
        if recipe.passed_on and 0 <= frozen < len(self.net.params):
            name = list(self.net.params)[frozen]
            b.output(f"{name}_out", b.op("Identity", name), self.net.params[name])
        for name, new, shape in self.states:
            b.output(f"{name}_out", new, shape)

    def _accumulated(self, gradients: dict[str, str]) -> dict[str, str]:
        b = self.b
        micro = b.state("micro", np.float32(1))
        count = b.op("Add", micro, b.const(1.0))
        self.gate = b.op("GreaterOrEqual", count, b.const(2.0))
        self.states.append((micro, b.op("Where", self.gate, b.const(0.0), count), ()))
        used = {}
        for name, gradient in gradients.items():
            shape = self.net.params[name]
            held = b.small(f"{name}.acc", shape)
            total = b.op("Add", held, gradient)
            zero = b.const(np.zeros(shape))
            self.states.append((held, b.op("Where", self.gate, zero, total), shape))
            used[name] = b.op("Mul", total, b.const(0.5))
        return used

    def _finite(self, gradients: list[str]) -> str:
        b, way = self.b, self.recipe.check
        if way == "times-zero":
            parts = [b.op("ReduceSum", b.op("Mul", g, b.const(0.0)), keepdims=0) for g in gradients]
            total = parts[0]
            for part in parts[1:]:
                total = b.op("Add", total, part)
            return b.op("Equal", total, b.const(0.0))
        if way == "max-below-inf":
            parts = [b.op("ReduceMax", b.op("Abs", g), keepdims=0) for g in gradients]
            top = parts[0] if len(parts) == 1 else b.op("Max", *parts)
            return b.op("Less", top, b.const(np.inf))
        if way == "isnan-min":
            fine = None
            for g in gradients:
                good = b.op("Not", b.op("Or", b.op("IsNaN", g), b.op("IsInf", g)))
                least = b.op("Cast", b.op("ReduceMin", b.op("Cast", good, to=1), keepdims=0), to=9)
                fine = least if fine is None else b.op("And", fine, least)
            assert fine is not None
            return fine
        flags = [b.op("ReduceMax", b.op("Cast", b.op("IsInf", g), to=1), keepdims=0) for g in gradients]
        if way == "concat-flags":
            rows = [b.op("Unsqueeze", flag, b.const([0], "int64")) for flag in flags]
            total = b.op("ReduceSum", b.op("Concat", *rows, axis=0), keepdims=0)
        else:
            total = flags[0] if len(flags) == 1 else b.op("Sum", *flags)
        return b.op("Equal", total, b.const(0.0))

    def _clipped(self, gradients: dict[str, str]) -> dict[str, str]:
        b, way = self.b, self.recipe.norm
        values = list(gradients.values())
        bound, one, tiny = b.const(0.3), b.const(1.0), b.const(1e-6)

        def chain(parts: list[str], start: str) -> str:
            for part in parts:
                start = b.op("Add", start, part)
            return start

        def stack(parts: list[str]) -> str:
            return b.op("Concat", *(b.op("Unsqueeze", part, b.const([0], "int64")) for part in parts), axis=0)

        def coefficient(norm: str) -> str:
            return b.op("Min", one, b.op("Div", bound, b.op("Add", norm, tiny)))

        if way == "per-tensor":
            return {name: b.op("Mul", g, coefficient(b.op("ReduceL2", g, keepdims=0))) for name, g in gradients.items()}
        if way == "sumsquare-chain":
            norm = b.op("Sqrt", chain([b.op("ReduceSumSquare", g, keepdims=0) for g in values], b.const(0.0)))
        elif way == "mulsum-sum":
            norm = b.op("Sqrt", b.op("Sum", *(b.op("ReduceSum", b.op("Mul", g, g), keepdims=0) for g in values)))
        elif way == "pow-concat":
            squares = [b.op("ReduceSum", b.op("Pow", g, b.const(2.0)), keepdims=0) for g in values]
            norm = b.op("Sqrt", b.op("ReduceSum", stack(squares), keepdims=0))
        elif way == "l2-stack":
            norm = b.op("ReduceL2", stack([b.op("ReduceL2", g, keepdims=0) for g in values]), keepdims=0)
        elif way == "l2-concat-keepdims":
            one_d = b.const([1], "int64")
            rows = [b.op("Reshape", b.op("ReduceL2", g, keepdims=1), one_d) for g in values]
            norm = b.op("ReduceL2", b.op("Concat", *rows, axis=0), keepdims=0)
        elif way == "abs-max":
            tops = [b.op("ReduceMax", b.op("Abs", g), keepdims=0) for g in values]
            norm = tops[0]
            for top in tops[1:]:
                norm = b.op("Max", norm, top)
        elif way == "mean-square":
            norm = b.op("Sqrt", chain([b.op("ReduceMean", b.op("Mul", g, g), keepdims=0) for g in values], tiny))
        elif way == "sqrt-then-square":
            norms = [b.op("Sqrt", b.op("ReduceSumSquare", g, keepdims=0)) for g in values]
            norm = b.op("Sqrt", chain([b.op("Mul", n, n) for n in norms], b.const(0.0)))
        else:
            norm = chain([b.op("ReduceL1", g, keepdims=0) for g in values], b.const(0.0))
        scale = coefficient(norm)
        return {name: b.op("Mul", g, scale) for name, g in gradients.items()}

    def _second_clip(self, ways: dict[str, str]) -> dict[str, str]:
        b = self.b
        total = b.const(np.zeros((1, 1)))
        for way, shape in zip(ways.values(), (self.net.params[name] for name in ways)):
            axes = b.const(list(range(len(shape))), "int64")
            square = b.op("ReduceSum", b.op("Mul", way, way), axes, keepdims=1)
            total = b.op("Add", total, square if len(shape) == 2 else b.op("Reshape", square, b.const([1, 1], "int64")))
        scale = b.op("Reciprocal", b.op("Max", b.const(1.0), b.op("Sqrt", total)))
        flat = b.op("Reshape", scale, b.const([1], "int64"))
        return {name: b.op("Mul", way, flat) for name, way in ways.items()}

    def _kept(self, name: str, new: str, shape: tuple[int, ...]) -> None:
        """A state's new value, gated."""
        self.states.append((name, self._gated(new, name), shape))

    def _gated(self, new: str, old: str) -> str:
        return self.b.op("Where", self.gate, new, old) if self.gate else new

    def _way(self, place: int, name: str, gradient: str) -> str:
        """Where a parameter is to go, before its learning rate."""
        b, recipe, shape = self.b, self.recipe, self.net.params[name]
        if recipe.clip_value:
            gradient = b.op("Clip", gradient, b.const(-0.1), b.const(0.1))
        if recipe.decay == "coupled":
            gradient = b.op("Add", gradient, b.op("Mul", name, b.const(0.02)))
        if recipe.rows and len(shape) == 2:
            square = b.op("ReduceMean", b.op("Mul", gradient, gradient), b.const([1], "int64"), keepdims=1)
            held = b.small(f"{name}.row", (shape[0], 1))
            new = b.op("Add", b.op("Mul", held, b.const(0.9)), b.op("Mul", square, b.const(0.1)))
            self._kept(held, new, (shape[0], 1))
            way = b.op("Div", gradient, b.op("Sqrt", b.op("Add", new, b.const(1e-3))))
        else:
            way = self._direction(recipe.direction[place % len(recipe.direction)], name, gradient, shape)
        if recipe.mask:
            way = b.op("Mul", way, b.const((b.generator.random(shape) < 0.7).astype(np.float32)))
        if recipe.trust:
            norms = b.op("ReduceL2", name, keepdims=0), b.op("ReduceL2", way, keepdims=0)
            way = b.op("Mul", way, b.op("Div", norms[0], b.op("Add", norms[1], b.const(1e-2))))
        return way

    def _update(self, place: int, name: str, way: str, rate: str) -> None:
        b, recipe, shape = self.b, self.recipe, self.net.params[name]
        if recipe.own_constants:
            rate = b.op("Mul", rate, b.const(1.0 + 0.25 * place))
        held = name
        if recipe.decay == "decoupled":
            held = b.op("Mul", name, b.op("Sub", b.const(1.0), b.op("Mul", rate, b.const(0.1))))
        new = self._gated(b.op("Sub", held, b.op("Mul", way, rate)), name)
        b.output(f"{name}_out", new, shape)
        if recipe.ema:
            copy = b.parameter(f"{name}.ema", shape)
            mixed = b.op("Add", b.op("Mul", copy, b.const(0.9)), b.op("Mul", new, b.const(0.1)))
            self.states.append((copy, mixed, shape))

    def _direction(self, way: str, name: str, gradient: str, shape: tuple[int, ...]) -> str:
        b = self.b
        if way == "gradient":
            return gradient
        if way == "adagrad":
            total = b.small(f"{name}.sum", shape)
            new = b.op("Add", total, b.op("Mul", gradient, gradient))
            self._kept(total, new, shape)
            return b.op("Div", gradient, b.op("Add", b.op("Sqrt", new), b.const(1e-3)))
        first = b.small(f"{name}.m", shape)
        if way in ("momentum", "nesterov"):
            new = b.op("Add", b.op("Mul", first, b.const(0.9)), gradient)
            self._kept(first, new, shape)
            return new if way == "momentum" else b.op("Add", gradient, b.op("Mul", new, b.const(0.9)))
        mixed = b.op("Add", b.op("Mul", first, b.const(0.9)), b.op("Mul", gradient, b.const(0.1)))
        if way == "sign":
            self._kept(first, mixed, shape)
            # A soft sign: one that flips with the last bit would be no difference worth the name.
            return b.op("Div", mixed, b.op("Add", b.op("Abs", mixed), b.const(1e-2)))
        second = b.small(f"{name}.v", shape)
        if way == "adamax":
            top = b.op("Max", b.op("Mul", second, b.const(0.99)), b.op("Abs", gradient))
            self._kept(first, mixed, shape)
            self._kept(second, top, shape)
            return b.op("Div", mixed, b.op("Add", top, b.const(1e-2)))
        square = b.op("Mul", gradient, gradient)
        spread = b.op("Add", b.op("Mul", second, b.const(0.95)), b.op("Mul", square, b.const(0.05)))
        self._kept(second, spread, shape)
        if way == "rms-momentum":
            step = b.op("Div", gradient, b.op("Add", b.op("Sqrt", spread), b.const(1e-2)))
            new = b.op("Add", b.op("Mul", first, b.const(0.9)), step)
            self._kept(first, new, shape)
            return new
        self._kept(first, mixed, shape)
        if way == "amsgrad":
            top = b.small(f"{name}.vmax", shape)
            spread = b.op("Max", top, spread)
            self._kept(top, spread, shape)
        return b.op("Div", mixed, b.op("Add", b.op("Sqrt", spread), b.const(1e-2)))


def build(recipe: Recipe) -> onnx.ModelProto:
    b = Builder(seed=1)
    scale = ""
    if recipe.loss_scale:
        scale = b.state("scale", np.float32(8))
    net = perceptron(
        b, recipe.widths, batch=recipe.batch, bias=recipe.bias, tied=recipe.tied, half=recipe.half, scale=scale
    )
    writer = Writer(recipe, b, net)
    if scale:
        writer.scale = scale
    writer.write()
    return b.model()


def shard_and_compare(recipe: Recipe, ranks: int | Mesh, stage: int, **options: Any) -> str:
    """'equal' or why gopt refused; anything else raises."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "step.onnx")
        path.write_bytes(build(recipe).SerializeToString())
        try:
            source = gopt.load(path)
            pipeline = build_pipeline(defaults={"shard": {"stage": stage, **options}}, verify_each=True)
            sharded = gopt.shard(source, ranks, pipeline=pipeline)
        except UnsupportedError as error:
            return error.message
        sharded.write(Path(folder, "out"))
        result = Verifier(Path(folder, "out")).run(steps=2)
        bad = {name: each for name, each in result.worst.items() if not each.error <= 1}
        assert not bad, f"not equal: {bad}"
        unconfirmed = [each for each in result.gradients if not each.holds]
        assert not unconfirmed, f"no gradient: {unconfirmed}"
    return "equal"


stages = st.integers(0, 3)
ranks = st.integers(2, 5)
partitions = st.sampled_from(["flat", "flat", "rows", "whole"])
caps = st.sampled_from([None, None, 0.0, 0.0002])
wide = recipes.filter(lambda recipe: min(recipe.widths) > 1)


@settings(max_examples=60)
@given(wide, ranks, stages, partitions, caps)
def test_a_random_update_is_equal_on_all_ranks(recipe, count, stage, partition, cap):
    """Where no tensor has one element alone, nothing is refused."""
    assert shard_and_compare(recipe, count, stage, partition=partition, **{"bucket-mb": cap}) == "equal"


@settings(max_examples=40)
@given(recipes, ranks, stages, partitions)
def test_tensors_of_one_element_are_equal_or_refused(recipe, count, stage, partition):
    answer = shard_and_compare(recipe, count, stage, partition=partition)
    event(answer)
    assert answer == "equal" or "'" in answer, "a refusal names a value"


@pytest.mark.slow
@settings(max_examples=1500, derandomize=False)
@given(recipes, ranks, stages, partitions, caps)
def test_many_random_updates(recipe, count, stage, partition, cap):
    shard_and_compare(recipe, count, stage, partition=partition, **{"bucket-mb": cap})


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("norm", NORMS)
def test_every_spelling_of_a_norm(norm, stage):
    assert shard_and_compare(Recipe(norm=norm, widths=(3, 5, 2)), 3, stage) == "equal"


@pytest.mark.parametrize("check", CHECKS)
def test_every_spelling_of_a_finite_check(check):
    assert shard_and_compare(Recipe(check=check, norm="mulsum-sum", loss_scale=True, dynamic=True), 3, 2) == "equal"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_rule(direction):
    assert shard_and_compare(Recipe(direction=(direction,), ema=True), 2, 2) == "equal"


ODD = {
    "two rules in one bucket": Recipe(direction=("adam", "momentum")),
    "a row in two pieces": Recipe(widths=(3, 17, 17)),
    "tied weights": Recipe(widths=(4, 4, 4, 4), tied=True, norm="sumsquare-chain"),
    "a frozen parameter": Recipe(frozen=0),
    "a frozen parameter with an output": Recipe(frozen=1, passed_on=True, norm="l2-stack"),
    "halves": Recipe(half=True, loss_scale=True, check="isinf-any", norm="pow-concat"),
    "masks": Recipe(mask=True, own_constants=True),
    "accumulation": Recipe(accumulate=True, norm="mulsum-sum", check="times-zero"),
    "trust ratios": Recipe(trust=True, second_clip=True),
    "rows": Recipe(rows=True, norm="l2-stack", second_clip=True, metric=True),
    "weights of one column": Recipe(widths=(7, 1, 3), bias=True),
    "a bias of one element": Recipe(widths=(3, 4, 1)),
    "a weight of one element": Recipe(widths=(1, 1, 3), bias=False),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("what", ODD)
def test_odd_shapes_and_parts(what, stage):
    assert shard_and_compare(ODD[what], 3, stage) == "equal"


@pytest.mark.parametrize("mesh", ["dp=3", "dp=2,shard=2", "shard=2,dp=2"])
@pytest.mark.parametrize("what", ODD)
def test_meshes(what, mesh):
    for stage in (0, 1, 2, 3):
        assert shard_and_compare(ODD[what], Mesh.parse(mesh), stage) == "equal"


# --- what is the same, and what stays -------------------------------------------------------------------------------


def written(recipe: Recipe, folder: Path, count: int, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "step.onnx"
    path.write_bytes(build(recipe).SerializeToString())
    gopt.shard(gopt.load(path), count, **options).write(folder / "out")
    return folder / "out"


RICH = Recipe(widths=(3, 5, 5), tied=True, half=True, loss_scale=True, check="isinf-any", norm="l2-stack", rows=True)


def test_a_second_run_writes_the_same_bytes(tmp_path):
    first, second = (written(RICH, tmp_path / name, 3) for name in ("a", "b"))
    assert folder_bytes(first) == folder_bytes(second)


def test_hash_order_shows_nowhere(tmp_path):
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "gopt.cli", "shard", str(FIXTURES / "gpt_adamw_clip_sched_fp16.onnx")]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(
            [*command, "--ranks", "3", "-o", str(tmp_path / seed)], env=environment, check=True, cwd=tmp_path,
            capture_output=True,
        )  # fmt: skip
    assert folder_bytes(tmp_path / "1") == folder_bytes(tmp_path / "2")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_gives_back_the_source(tmp_path, stage):
    recipe = Recipe(norm="mulsum-sum", check="isinf-any", direction=("adam", "momentum"), ema=True)
    out = written(recipe, tmp_path, 1, stage=stage)
    source = onnx.load(tmp_path / "step.onnx")
    rank = onnx.load(rank_path(out, 0), load_external_data=False)
    assert op_counts(rank) == op_counts(source)
    assert {value.name for value in rank.graph.output} == {value.name for value in source.graph.output}
    assert not calls(rank)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_second_application_is_refused(tmp_path, stage):
    out = written(Recipe(), tmp_path, 2, stage=stage)
    with pytest.raises(GoptError) as caught:
        gopt.load(rank_path(out, 0))
    assert caught.value.exit_code in (3, 4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_ranks_than_elements(tmp_path, stage):
    """Ranks that own nothing issue every call all the same."""
    recipe = Recipe(widths=(2, 2), norm="sumsquare-chain", check="max-below-inf", schedule=True)
    out = written(recipe, tmp_path, 9, stage=stage)
    manifest = json.loads((out / "manifest.json").read_text())
    owned = [sum(len(state["pieces"]) for state in rank["state"]) for rank in manifest["ranks"]]
    assert 0 in owned
    made = [
        [(node.op_type, len(node.input), len(node.output)) for node in calls(onnx.load(path, load_external_data=False))]
        for path in (rank_path(out, rank) for rank in range(9))
    ]
    assert all(each == made[0] for each in made) and len(made[0]) >= 4
    assert Verifier(out).run(steps=2, confirm=False).equal


@settings(max_examples=25)
@given(wide, st.integers(2, 6), st.integers(1, 2))
def test_pieces_tile_every_sharded_state(recipe, count, stage):
    with TemporaryDirectory() as folder:
        out = written(recipe, Path(folder), count, stage=stage)
        manifest = json.loads((out / "manifest.json").read_text())
    shapes = {state["tensor"]: int(np.prod(state["shape"])) for state in manifest["states"]}
    common = {
        piece["tensor"]
        for state in manifest["common"]["state"] if not state.get("copy")
        for piece in state["pieces"]
    }  # fmt: skip
    held: dict[str, list[tuple[int, int]]] = {}
    for rank in manifest["ranks"]:
        for state in rank["state"]:
            if not state.get("copy"):
                for piece in state["pieces"]:
                    held.setdefault(piece["tensor"], []).append((piece["start"], piece["stop"]))
    assert not common & set(held)
    assert common | set(held) == set(shapes)
    for tensor, ranges in held.items():
        ends = sorted(ranges)
        assert ends[0][0] == 0 and ends[-1][1] == shapes[tensor]
        assert all(left[1] == right[0] for left, right in itertools.pairwise(ends))


# --- once wrong, and still wrong ----------------------------------------------------------------------------------

MENDED = {
    "one element in adagrad": Recipe(widths=(3, 2, 1), direction=("adagrad",)),
    "one element under a clip": Recipe(widths=(2, 1, 2), direction=("gradient",), norm="sumsquare-chain"),
    "a mean over a row that is all": Recipe(widths=(1, 17), rows=True),
    "means of tensors of unequal size": Recipe(widths=(3, 5, 2), norm="mean-square"),
    "adam under a mask": Recipe(widths=(3, 5), mask=True),
    "a value clip under a mask": Recipe(clip_value=True, direction=("gradient",), mask=True),
}
KNOWN = {
    "a batch of one element": Recipe(widths=(7, 1, 3), batch=1, direction=("gradient",)),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("what", MENDED)
def test_mended_defects(what, stage):
    assert shard_and_compare(MENDED[what], 3, stage) == "equal"


@pytest.mark.xfail(
    strict=True, reason="known defect: drop this mark, and the exceptions made for it above, once mended"
)
@pytest.mark.parametrize("what", KNOWN)
def test_known_defects(what):
    assert shard_and_compare(KNOWN[what], 3, 2) == "equal"
