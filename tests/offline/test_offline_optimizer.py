"""Every optimizer of torch.optim, as PyTorch itself writes it into a graph: the right name and constants, or none.

``fixtures/torch_optim.py`` made the files and compared each with eager PyTorch; ``index.json`` holds the arguments.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from offline_graphs import Step, inspected, saved, scrambled, step_with
from steps_gen.make import make
from steps_gen.plan import Plan

from gopt import api
from gopt.analysis.role_map import RoleMap
from gopt.offline.inspect import Inspection, OptimizerEntry, inspect_model

FOLDER = Path(__file__).parents[2] / "fixtures" / "optim"
INDEX = json.loads((FOLDER / "index.json").read_text(encoding="utf-8"))
NAMES = {"SGD": ("SGD", "momentum"), "RMSprop": ("RMSProp",)}
UNKNOWN = {  # not elementwise: said so, and no more
    "Adafactor": {"non-elementwise update with 2 states", "elementwise update with 1 state and norms of its own",
                  "non-elementwise update with 1 state"},
    "Muon": {"non-elementwise update with 1 state"},
}  # fmt: skip
NAMED = ("ASGD", "Adafactor")
"""Optimizers whose data flow may leave open which output replaces which input: the states are named."""


def roles(path: Path) -> RoleMap:
    """Every output NAME_out replaces NAME."""
    return RoleMap(states={o.name[:-4]: o.name for o in onnx.load(path).graph.output if o.name.endswith("_out")})


@functools.cache
def seen(name: str) -> Inspection:
    path = FOLDER / f"{name}.onnx"
    return inspect_model(api.load(path, roles=roles(path) if INDEX[name]["optimizer"] in NAMED else RoleMap()))


def constants(settings: dict[str, object], found: OptimizerEntry) -> dict[str, object]:
    """What gopt must say of an optimizer of these settings, by its own keys; None where nothing can be said."""
    due = dict(settings)
    lr, decoupled = due.pop("lr"), due.pop("decoupled_weight_decay", False)
    assert lr == 0.01
    if "betas" in due:
        due["beta1"], due["beta2"] = due.pop("betas")  # type: ignore[misc]
    if "etas" in due:
        due["etaminus"], due["etaplus"] = due.pop("etas")  # type: ignore[misc]
        due["step_size_min"], due["step_size_max"] = due.pop("step_sizes")  # type: ignore[misc]
    if found.name == "SGD":
        due = {key: due[key] for key in ("weight_decay", "maximize")}
    if due.pop("initial_accumulator_value", 0) or due.get("dampening"):
        due["dampening"] = None  # as well a scale of the loss, and then so is the decay
        due["weight_decay"] = None if due["weight_decay"] else 0
    for key in ("amsgrad", "centered", "maximize", "lr_decay", "momentum"):
        if key in due and not due[key]:
            del due[key]
    if due.get("weight_decay") and found.name not in ("SGD", "ASGD"):
        due["decoupled"] = bool(decoupled)
    if found.name in ("Adam", "AdamW", "Adamax"):
        due["bias_correction"] = True
    return due


def test_the_index_names_every_file() -> None:
    assert sorted(INDEX) == sorted(path.stem for path in FOLDER.glob("*.onnx"))
    made = {row["optimizer"] for row in INDEX.values()}
    assert made == {
        "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
        "Adafactor", "Muon",
    }  # fmt: skip


@pytest.mark.parametrize("name", INDEX)
def test_every_optimizer_of_torch(name: str) -> None:
    row, found = INDEX[name], seen(name)
    if row["optimizer"] in UNKNOWN:
        assert {each.name for each in found.optimizers} <= UNKNOWN[row["optimizer"]]
        assert not any(each.recognised or each.hyper for each in found.optimizers)
        return
    (optimizer,) = found.optimizers
    assert optimizer.recognised and len(optimizer.parameters) == 4
    assert optimizer.name in NAMES.get(row["optimizer"], (row["optimizer"],))
    due = constants(row["settings"], optimizer)
    assert {key: float(value) if type(value) is int else value for key, value in due.items()} == dict(optimizer.hyper)


@pytest.mark.parametrize("name", [name for name, row in INDEX.items() if row["optimizer"] not in UNKNOWN])
def test_the_learning_rate(name: str) -> None:
    rate = seen(name).controls.learning_rate
    if INDEX[name]["optimizer"] == "Rprop":  # lr made the first step sizes, and stands in no step
        assert rate is None
    else:
        assert rate is not None
        assert (rate.input or rate.value) == INDEX[name]["lr"]


@pytest.mark.parametrize("name", INDEX)
def test_clips(name: str) -> None:
    """The bound that was asked for, over all gradients; no clip where there is none."""
    found = [(clip.kind, clip.bound, clip.norm_type, clip.gradients, clip.of) for clip in seen(name).controls.clips]
    if INDEX[name]["clip"] is None:
        assert not found
        return
    how, bound = INDEX[name]["clip"]
    kinds = {"global": ("global norm", "2"), "inf": ("global norm", "inf"), "each": ("norm of each parameter", "2"),
             "value": ("value", "")}  # fmt: skip
    kind, norm = kinds[how]
    assert found == [(kind, bound, norm, 4, 4)]


@pytest.mark.parametrize("name", ["nadam", "radam_decoupled", "rmsprop_centered_momentum", "clip_inf", "adam_hand"])
def test_names_do_not_matter(name: str, tmp_path: Path) -> None:
    plain, found = seen(name), inspected(scrambled(onnx.load(FOLDER / f"{name}.onnx")), tmp_path)
    assert [(each.name, each.hyper) for each in found.optimizers] == [
        (each.name, each.hyper) for each in plain.optimizers
    ]
    assert [(each.kind, each.bound) for each in found.controls.clips] == [
        (each.kind, each.bound) for each in plain.controls.clips
    ]


# --- near misses: rules that look like a known one, and are not -----------------------------------------------------


def corrected(s: Step, beta1: float = 0.9, beta2: float = 0.99) -> tuple[str, str]:
    """1 - beta^t for both moments."""
    later = s.op("Add", "t", s.number(1.0))
    s.state("t", later, [])
    one = s.number(1.0)
    return tuple(s.op("Sub", one, s.op("Pow", s.number(beta), later)) for beta in (beta1, beta2))  # type: ignore[return-value]


def adam_like(
    s: Step, *, square: Callable[[str, str], str] | None = None, power: float = 0.5,
    above: Callable[[str], str] = lambda m: m, step: Callable[[str], str] = lambda x: x, rate: str = "lr",
) -> None:  # fmt: skip
    """Adam with one of its parts exchanged."""
    g = s.gradient
    c1, c2 = corrected(s)
    m = s.mean("m", g, 0.9)
    v = square(m, "v") if square else s.mean("v", s.mul(g, g), 0.99)
    below = s.op("Add", s.op("Pow", s.op("Div", v, c2), s.number(power)), s.number(1e-4))
    s.state("w", s.op("Sub", "w", step(s.mul(rate, s.op("Div", s.op("Div", above(m), c1), below)))))
    s.state("m", m)
    s.state("v", v)


def belief(s: Step) -> None:
    """AdaBelief: the square of what the mean did not expect."""

    def square(m: str, v: str) -> str:
        apart = s.op("Sub", s.gradient, m)
        return s.mean(v, s.mul(apart, apart), 0.99)

    adam_like(s, square=square)


def yogi(s: Step) -> None:
    def square(m: str, v: str) -> str:
        g2 = s.mul(s.gradient, s.gradient)
        return s.op("Sub", v, s.mul(s.number(0.01), s.op("Sign", s.op("Sub", v, g2)), g2))

    adam_like(s, square=square)


def padam(s: Step) -> None:
    adam_like(s, power=0.25)


def quasi(s: Step) -> None:
    """QHAdam: a fixed share of the gradient itself."""
    adam_like(s, above=lambda m: s.op("Add", s.mul(s.number(0.7), m), s.mul(s.number(0.3), s.gradient)))


def bounded(s: Step) -> None:
    """Steps of at most 0.1."""
    adam_like(s, step=lambda x: s.op("Clip", x, s.number(-0.1), s.number(0.1)))


def cautious(s: Step) -> None:
    """Only where the step goes down the gradient."""

    def step(x: str) -> str:
        agrees = s.op("Greater", s.mul(x, s.gradient), s.number(0.0))
        return s.op("Where", agrees, x, s.number(0.0))

    adam_like(s, step=step)


def half_rectified(s: Step) -> None:
    """Another function of the count of steps than any that is known."""
    adam_like(s, step=lambda x: s.mul(x, s.op("Sqrt", s.op("Div", "t", s.op("Add", "t", s.number(3.0))))))


def signum(s: Step) -> None:
    m = s.mean("m", s.gradient, 0.9)
    s.state("w", s.op("Sub", "w", s.mul("lr", s.op("Tanh", m))))
    s.state("m", m)


def positive_part(s: Step) -> None:
    """Momentum that forgets what is negative: right on all positive states."""
    m = s.op("Add", s.mul(s.number(0.9), s.op("Abs", "m")), s.gradient)
    s.state("w", s.op("Sub", "w", s.mul("lr", m)))
    s.state("m", m)


def averaged_weights(s: Step) -> None:
    """Gradient descent and an average of the weights, whose share follows no count of steps."""
    new = s.op("Sub", "w", s.mul("lr", s.gradient))
    s.state("w", new)
    s.state("ema", s.mean("ema", new, 0.99))


def mirror(s: Step) -> None:
    """Multiplicative: no gradient descent."""
    s.state("w", s.mul("w", s.op("Exp", s.op("Neg", s.mul("lr", s.gradient)))))


def normalised(s: Step) -> None:
    """Gradient over its own root mean square."""
    g = s.gradient
    size = s.op("Sqrt", s.op("ReduceMean", s.mul(g, g), keepdims=0))
    s.state("w", s.op("Sub", "w", s.mul("lr", s.op("Div", g, s.op("Add", size, s.number(1e-6))))))


def centred(s: Step) -> None:
    """The gradient less its mean: nothing is taken away from a gradient without a mean."""
    mean = s.op("ReduceMean", s.gradient, keepdims=0)
    s.state("w", s.op("Sub", "w", s.mul("lr", s.op("Sub", s.gradient, mean))))


def shrunk(s: Step) -> None:
    """The gradient times its norm, up to 1: no clip, and without an effect where the norm is large."""
    norm = s.op("ReduceL2", s.gradient, keepdims=0)
    factor = s.op("Min", s.number(1.0), s.mul(s.number(0.98), s.op("Add", norm, s.number(1e-6))))
    m = s.mean("m", s.mul(s.gradient, factor), 0.9)
    s.state("w", s.op("Sub", "w", s.mul("lr", m)))
    s.state("m", m)


def rprop_back(s: Step) -> None:
    """Rprop that takes a step back where the sign turns."""
    turn = s.op("Sign", s.mul(s.gradient, "prev"))
    up, down = (s.op(kind, turn, s.number(0.0)) for kind in ("Greater", "Less"))
    factor = s.op("Where", up, s.number(1.2), s.op("Where", down, s.number(0.5), s.number(1.0)))
    size = s.op("Clip", s.mul("size", factor), s.number(1e-6), s.number(50.0))
    step = s.op("Where", down, s.op("Neg", s.mul("size", s.op("Sign", "prev"))), s.mul(size, s.op("Sign", s.gradient)))
    s.state("w", s.op("Sub", "w", step))
    s.state("prev", s.op("Where", down, s.number(0.0), s.gradient))
    s.state("size", size)


NEAR_MISSES = (
    belief, yogi, padam, quasi, bounded, cautious, half_rectified, signum, positive_part, averaged_weights, mirror,
    normalised, centred, shrunk, rprop_back,
)  # fmt: skip


@pytest.mark.parametrize("update", NEAR_MISSES, ids=lambda update: update.__name__)
def test_a_near_miss_has_no_name(update: Callable[[Step], None], tmp_path: Path) -> None:
    path = saved(step_with(update), tmp_path)
    (found,) = inspect_model(api.load(path, roles=roles(path))).optimizers
    assert not found.recognised and not found.hyper and "update with" in found.name


# --- clips, spelled in other ways -----------------------------------------------------------------------------------


def clipped(spelling: str) -> Callable[[Step], None]:
    """Momentum behind a clip of the one gradient's norm at 0.25, or of its elements."""

    def update(s: Step) -> None:
        g, bound, one = s.gradient, s.number(0.25), s.number(1.0)
        norm = s.op("ReduceL2", g, keepdims=0)
        if spelling == "where":  # only where it is too large
            over = s.op("Greater", norm, bound)
            g = s.op("Where", over, s.op("Div", s.mul(g, bound), norm), g)
        elif spelling == "if_coefficient":
            g = s.mul(g, s.op("Where", s.op("Greater", norm, bound), s.op("Div", bound, norm), one))
        elif spelling == "tensorflow":
            least = s.op("Min", s.op("Reciprocal", norm), s.op("Reciprocal", bound))
            g = s.mul(g, s.mul(bound, least))
        elif spelling == "divided":
            g = s.op("Div", g, s.op("Max", one, s.op("Div", norm, bound)))
        elif spelling == "elements":
            g = s.op("Max", s.op("Min", g, bound), s.number(-0.25))
        buffer = s.op("Add", s.mul("m", s.number(0.9)), g)
        s.state("w", s.op("Sub", "w", s.mul("lr", buffer)))
        s.state("m", buffer)

    return update


@pytest.mark.parametrize("spelling", ["where", "if_coefficient", "tensorflow", "divided", "elements"])
def test_spellings_of_a_clip(spelling: str, tmp_path: Path) -> None:
    found = inspected(step_with(clipped(spelling)), tmp_path)
    assert [each.name for each in found.optimizers] == ["momentum"]
    (clip,) = found.controls.clips
    assert (clip.kind, clip.bound) == ("value" if spelling == "elements" else "global norm", 0.25)
    assert clip.norm_type == ("" if spelling == "elements" else "2")


def test_a_clip_of_single_elements_is_found(tmp_path: Path) -> None:
    """Parameters of one element are clipped like any others, and their rule begins behind the clip."""
    plan = Plan(network="all-scalar", rules=("adagrad", "momentum"), clip="value")
    found = inspected(make(plan).model, tmp_path)
    assert {each.name for each in found.optimizers} == {"Adagrad", "momentum"}
    assert [(clip.kind, clip.gradients, clip.of) for clip in found.controls.clips] == [("value", 3, 3)]


def test_a_bound_that_is_an_input_is_no_constant(tmp_path: Path) -> None:
    def update(s: Step) -> None:
        s.extra.append("most")
        norm = s.op("ReduceL2", s.gradient, keepdims=0)
        g = s.mul(s.gradient, s.op("Min", s.number(1.0), s.op("Div", "most", norm)))
        s.state("w", s.op("Sub", "w", s.mul("lr", g)))

    (clip,) = inspected(step_with(update), tmp_path).controls.clips
    assert (clip.kind, clip.bound) == ("global norm", None)


def test_a_clip_does_not_make_an_update_non_elementwise(tmp_path: Path) -> None:
    def update(s: Step) -> None:
        norm = s.op("ReduceL2", s.gradient, keepdims=0)
        g = s.mul(s.gradient, s.op("Min", s.number(1.0), s.op("Div", s.number(0.5), norm)))
        buffer = s.op("Tanh", s.op("Add", "m", g))
        s.state("w", s.op("Sub", "w", s.mul("lr", buffer)))
        s.state("m", buffer)

    assert [each.name for each in inspected(step_with(update), tmp_path).optimizers] == [
        "elementwise update with 1 state"
    ]
