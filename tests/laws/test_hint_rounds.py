"""Hints of refusals work: each, followed, changes what gopt says, and all pairs are asked for at once."""

from __future__ import annotations

import random
from pathlib import Path

import onnx
import pytest
from helpers import FIXTURES
from hint_rounds import Step, faults, rounds, scrambled, ways
from laws.test_drawn_roles import Draw
from products import part
from steps_gen.make import make
from steps_gen.plan import Plan
from whole_gen import kinds
from whole_gen.odd import load_all
from whole_gen.steps import written as whole
from whole_gen.writer import Writer

from gopt.analysis.role_map import RoleMap

STEPS = load_all()
KINDS = kinds.load_all()
NAMES = [
    "mlp_adamw", "mlp_lamb", "mlp_mom_clip_sched", "mlp_adamw_accum", "mlp_adamw_fp16_scaler", "emb_adamw",
]  # fmt: skip


def written(name: str, seed: int) -> Writer:
    w = Writer(seed, 4, 1)
    STEPS[name](w)
    return w


def hold_drawn(seed: int, folder: Path) -> None:
    draw = Draw(seed, metrics=True)
    step = Step(draw.b.model())
    assert faults(step, folder) == [], seed
    assert rounds(step, draw.meant, folder) <= 3, seed


def hold_scrambled(seed: int, folder: Path) -> None:
    generator = random.Random(seed)
    name = generator.choice([*NAMES, *sorted(STEPS)])
    model = onnx.load(FIXTURES / f"{name}.onnx") if name in NAMES else written(name, seed).model()
    assert faults(Step(scrambled(model, generator)), folder) == [], f"seed {seed}: {name}"


@pytest.mark.parametrize("name", part(sorted(STEPS), 6))
def test_written_steps(name: str, tmp_path: Path) -> None:
    w = written(name, 5)
    assert faults(Step(w.model()), tmp_path) == []
    assert rounds(Step(w.model()), w.states, tmp_path) <= 2


@pytest.mark.parametrize("name, seed", part([(name, seed) for seed in range(4) for name in sorted(KINDS)], 12))
def test_steps_of_all_structures(name: str, seed: int, tmp_path: Path) -> None:
    """Rules of statistics are hints, too."""
    w = Writer(seed, 4, 1)
    KINDS[name](w)
    for states in ({}, dict(w.states)):
        assert faults(Step(w.model(), RoleMap(states=states), mesh="shard=2"), tmp_path) == []


def test_rules_of_statistics_are_followed(tmp_path: Path) -> None:
    w = Writer(1, 4, 1)
    KINDS["queue_gathered"](w)
    step = Step(w.model(), mesh="shard=2")
    error = step.refusal(tmp_path)
    assert error is not None
    (way,) = ways(step, error)
    assert way.roles.statistics == {"queue": "gather"} and way.refusal(tmp_path) is None


@pytest.mark.parametrize("name", ["exchanged_states", "kept_gradients"])
def test_names_against_the_data_flow_are_asked_for_once(name: str, tmp_path: Path) -> None:
    """Whoever follows the names, and whoever follows the data flow, has all pairs of the one message."""
    assert faults(Step(written(name, 5).model()), tmp_path) == []


@pytest.mark.parametrize("scrambled", [False, True])
@pytest.mark.parametrize("rules", [("kept",), ("momentum", "kept", "rprop")])
def test_a_relative_step_by_a_kept_gradient_is_asked_for_once(rules, scrambled: bool, tmp_path: Path) -> None:
    """The state is added, the parameter a factor: once the state got the new parameter, and the hint had the rest."""
    made = make(Plan(rules=rules, form="relative", scrambled=scrambled))
    step = Step(made.model)
    error = step.refusal(tmp_path)
    assert error is not None and "may replace any of" in error.message
    (told,) = (each.roles.states for each in ways(step, error) if each.roles.states)
    meant = {made.names.get(name, name): made.names.get(f"{name}_new", f"{name}_new") for name in made.states}
    assert told.items() <= meant.items()
    assert Step(made.model, RoleMap(states=told)).refusal(tmp_path) is None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["clipped_row", "one_row_of_all"])
def test_the_gradients_of_a_row_are_asked_for_once(name: str, seed: int, tmp_path: Path) -> None:
    """Each refusal asked for one gradient, by no name."""
    w = written(name, seed)
    step = Step(w.model(), RoleMap(batch=list(w.batch)), mesh="shard=2")
    error = step.refusal(tmp_path)
    assert error is not None and "made of several gradients" in error.message and faults(step, tmp_path) == []
    (way,) = ways(step, error)
    assert way.roles.params == {each: value.name for each, value in w.gradients.items()}
    assert way.refusal(tmp_path) is None


@pytest.mark.parametrize("seed", [*range(4), 1000, 1119, 2311, 2685])
def test_drawn_steps(seed: int, tmp_path: Path) -> None:
    hold_drawn(seed, tmp_path)


@pytest.mark.parametrize("seed", [*range(6), 2036, 3662391540])
def test_scrambled_steps(seed: int, tmp_path: Path) -> None:
    hold_scrambled(seed, tmp_path)


@pytest.mark.parametrize("seed", [59200144, 59400067, 61200084])
def test_a_state_that_is_in_no_pair_is_asked_for(seed: int, tmp_path: Path) -> None:
    """Its gradient, in a norm of all, was called a value of one rank, and nothing said why."""
    w = whole(seed, 4, 1)
    step = Step(w.model())
    error = step.refusal(tmp_path)
    assert error is not None and faults(step, tmp_path) == []
    (told,) = (way.roles.states for way in ways(step, error) if way.roles.states)
    assert told.items() <= w.states.items()
    assert Step(w.model(), RoleMap(states=told)).refusal(tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(40))
def test_fresh_steps(turn: int, tmp_path: Path) -> None:
    for hold in (hold_drawn, hold_scrambled):
        hold(random.SystemRandom().randrange(2**32), tmp_path)


def test_a_step_without_a_state_is_told_its_pairs_by_their_names(tmp_path: Path) -> None:
    """Every new value is joined from pieces with rates of their own, which no walk element by element passes."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
    f (float[4,3] x, float[3,2] w) => (float loss, float[3,2] w_new) <int64[2] halves = {1, 2}, float rate = {0.1}> {
        h = MatMul(x, w) square = Mul(h, h) loss = ReduceMean<keepdims = 0>(square)
        eighth = Constant<value = float {0.25}>() d = Mul(h, eighth) t = Transpose<perm = [1, 0]>(x) g = MatMul(t, d)
        a, b = Split<axis = 0>(w, halves) ga, gb = Split<axis = 0>(g, halves)
        sa = Mul(ga, rate) na = Sub(a, sa) nb = Sub(b, gb) w_new = Concat<axis = 0>(na, nb)
    }""")
    step = Step(model, RoleMap(loss="loss"))
    error = step.refusal(tmp_path)
    assert error is not None and "no state found" in error.message
    (told,) = (way for way in ways(step, error) if way.roles.states)
    assert told.roles.states == {"w": "w_new"} and told.refusal(tmp_path) is None
