"""The cases that a derived step is compared with PyTorch in, and how the derived side runs them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from gopt.frontends.derive.derive import derive
from gopt.frontends.derive.options import DeriveOptions

STEPS, BATCH, INPUTS, HIDDEN, CLASSES = 5, 6, 4, 5, 3
LR = 0.05
RECORDED = Path(__file__).parent / "recorded"
MODELS = ("mlp", "cnn", "embedding", "gpt", "lstm", "batchnorm")
NAMED_MODELS = ("depthwise", "unet", "wave", "recurrent", "rotary")
"""Models that keep the names of their parameters."""


@dataclass(frozen=True)
class Case:
    """``options`` of the derivation; ``torch``: the optimizer's class and its arguments; ``around``: what the training
    loop of PyTorch does beside it; ``overflow``: the step whose batch is infinite, or -1."""

    options: dict[str, Any]
    torch: tuple[str, dict[str, Any]]
    around: dict[str, Any] = field(default_factory=dict)
    overflow: int = -1


def _case(name: str, kind: str, around: dict[str, Any] | None = None, overflow: int = -1, **given: Any) -> Case:
    options = {"optimizer": name, **{key: value for key, value in given.items() if key != "torch"}}
    return Case(options, (kind, given.get("torch", {})), around or {}, overflow)


CASES = {
    "sgd": _case("sgd", "SGD"),
    "sgd_decay": _case("sgd", "SGD", weight_decay=0.1, torch={"weight_decay": 0.1}),
    "momentum": _case("momentum", "SGD", torch={"momentum": 0.9}),
    "nesterov": _case(
        "nesterov", "SGD", optimizer_options={"momentum": 0.8}, torch={"momentum": 0.8, "nesterov": True}
    ),
    "adam": _case("adam", "Adam"),
    "adam_decay": _case("adam", "Adam", weight_decay=0.1, torch={"weight_decay": 0.1}),
    "adamw": _case("adamw", "AdamW"),
    "adamw_knobs": _case(
        "adamw", "AdamW", weight_decay=0.3, optimizer_options={"beta1": 0.7, "beta2": 0.95, "eps": 1e-5},
        torch={"weight_decay": 0.3, "betas": (0.7, 0.95), "eps": 1e-5},
    ),
    "adagrad": _case("adagrad", "Adagrad"),
    "rmsprop": _case("rmsprop", "RMSprop", optimizer_options={"alpha": 0.9}, torch={"alpha": 0.9}),
    "adamax": _case("adamax", "Adamax"),
    "nadam": _case("nadam", "NAdam"),
    "lion": _case("lion", "Lion", weight_decay=0.1, torch={"weight_decay": 0.1}),
    "clip_norm": _case("sgd", "SGD", {"clip_norm": 0.1}, clip_norm=0.1),
    "clip_value": _case("sgd", "SGD", {"clip_value": 0.02}, clip_value=0.02),
    "loss_scale": _case("adam", "Adam", {"scale": 1024.0}, loss_scale=1024.0),
    "dynamic_scale": _case("adamw", "AdamW", {"scale": 65536.0}, overflow=2, loss_scale="dynamic"),
    "linear": _case("sgd", "SGD", {"schedule": ("LinearLR", {"start_factor": 0.25, "total_iters": 3})},
                    schedule="linear", schedule_options={"start_factor": 0.25, "total_steps": 3}),
    "cosine": _case("adamw", "AdamW", {"schedule": ("CosineAnnealingLR", {"T_max": 4, "eta_min": 0.001})},
                    schedule="cosine", schedule_options={"total_steps": 4, "min_lr": 0.001}),
    "step": _case("momentum", "SGD", {"schedule": ("StepLR", {"step_size": 2, "gamma": 0.5})}, schedule="step",
                  schedule_options={"step_size": 2, "gamma": 0.5}, torch={"momentum": 0.9}),
}  # fmt: skip

_ADAM_LIKE = {
    "optimizer_options": {"beta1": 0.8, "beta2": 0.97, "eps": 1e-3},
    "torch": {"betas": (0.8, 0.97), "eps": 1e-3},
}
KNOBS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sgd": ("SGD", {}, {}),
    "momentum": ("SGD", {"momentum": 0.5}, {"momentum": 0.5}),
    "nesterov": ("SGD", {"momentum": 0.5}, {"momentum": 0.5, "nesterov": True}),
    "adam": ("Adam", _ADAM_LIKE["optimizer_options"], _ADAM_LIKE["torch"]),
    "adamw": ("AdamW", _ADAM_LIKE["optimizer_options"], _ADAM_LIKE["torch"]),
    "adagrad": ("Adagrad", {"eps": 1e-2}, {"eps": 1e-2}),
    "rmsprop": ("RMSprop", {"alpha": 0.7, "eps": 1e-2}, {"alpha": 0.7, "eps": 1e-2}),
    "adamax": ("Adamax", _ADAM_LIKE["optimizer_options"], _ADAM_LIKE["torch"]),
    "nadam": (
        "NAdam", {**_ADAM_LIKE["optimizer_options"], "momentum_decay": 0.02},
        {**_ADAM_LIKE["torch"], "momentum_decay": 0.02},
    ),
    "lion": ("Lion", {"beta1": 0.7, "beta2": 0.9}, {"betas": (0.7, 0.9)}),
}  # fmt: skip
"""Optimizer -> PyTorch's class, and other knobs than the usual ones for both."""
for _name, (_kind, _knobs, _torch) in KNOBS.items():
    _usual = {"momentum": 0.9, **({"nesterov": True} if _name == "nesterov" else {})} if "momentum" in _knobs else {}
    CASES[f"{_name}, no decay"] = _case(_name, _kind, weight_decay=0.0, torch={"weight_decay": 0.0, **_usual})
    CASES[f"{_name}, all knobs"] = _case(
        _name, _kind, weight_decay=0.2, optimizer_options=_knobs, torch={**_torch, "weight_decay": 0.2}
    )

_CLIPS: dict[str, dict[str, Any]] = {"": {}, "norm": {"clip_norm": 0.1}, "value": {"clip_value": 0.02}}
_SCALES = {"": None, "fixed": 512.0, "dynamic": "dynamic"}
_SCHEDULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "": (None, {}),
    "linear": (("LinearLR", {"start_factor": 0.5, "end_factor": 0.8, "total_iters": 3}),
               {"start_factor": 0.5, "end_factor": 0.8, "total_steps": 3}),
    "cosine": (("CosineAnnealingLR", {"T_max": 6}), {"total_steps": 6}),
    "step": (("StepLR", {"step_size": 1, "gamma": 0.7}), {"step_size": 1, "gamma": 0.7}),
}  # fmt: skip


def _combinations() -> dict[str, Case]:
    """Every clip with every loss scale and every schedule, with the optimizers in turn. A dynamic scale meets an
    overflow."""
    found = {}
    for place, (clip, scale, schedule) in enumerate(itertools.product(_CLIPS, _SCALES, _SCHEDULES)):
        name = list(KNOBS)[place % len(KNOBS)]
        kind, knobs, torch = KNOBS[name]
        options = {
            "weight_decay": 0.1,
            "optimizer_options": knobs,
            "torch": {**torch, "weight_decay": 0.1},
            **_CLIPS[clip],
        }
        around = dict(_CLIPS[clip])
        if scale:
            options["loss_scale"] = _SCALES[scale]
            around["scale"] = 65536.0 if scale == "dynamic" else _SCALES[scale]
        if schedule:
            around["schedule"], options["schedule_options"] = _SCHEDULES[schedule]
            options["schedule"] = schedule
        label = " x ".join((name, clip or "no clip", scale or "no scale", schedule or "no schedule"))
        found[label] = _case(name, kind, around, 2 if scale == "dynamic" else -1, **options)
    return found


COMBINATIONS = _combinations()


def start_values() -> dict[str, np.ndarray]:
    """The parameters of an MLP before the first step."""
    random = np.random.default_rng(5)
    shapes = {"w1": (INPUTS, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, CLASSES), "b2": (CLASSES,)}
    return {name: (random.standard_normal(shape) * 0.5).astype(np.float32) for name, shape in shapes.items()}


def batches(case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and labels of each step."""
    random = np.random.default_rng(6)
    made = []
    for step in range(STEPS):
        x = random.standard_normal((BATCH, INPUTS)).astype(np.float32)
        if step == case.overflow:
            x[0, 0] = np.inf
        made.append((x, random.integers(0, CLASSES, BATCH)))
    return made


def forward_model() -> onnx.ModelProto:
    """tanh(x w1 + b1) w2 + b2."""
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("Gemm", ["t", "w2", "b2"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes, "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [BATCH, INPUTS])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [BATCH, CLASSES])],
        [numpy_helper.from_array(value, name) for name, value in start_values().items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


class DerivedRun:
    """A derived step that runs: its states, and the loss of each step."""

    def __init__(self, path: Path) -> None:
        model = onnx.load(path)
        values = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
        self.states = {each.name: values[each.name] for each in model.graph.input if each.name in values}
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.outputs = [each.name for each in self.session.get_outputs()]

    def step(self, **feeds: Any) -> float:
        results = dict(zip(self.outputs, self.session.run(self.outputs, {**feeds, **self.states})))
        self.states = {name: results[f"{name}_out"] for name in self.states}
        return float(results["loss"])


def derived_run(case: Case, folder: Path) -> tuple[DerivedRun, list[float]]:
    """Five steps of a case."""
    forward = folder / "forward.onnx"
    onnx.save(forward_model(), forward)
    derive(forward, folder / "step.onnx", DeriveOptions(loss="cross-entropy", **case.options))
    run = DerivedRun(folder / "step.onnx")
    lr = np.array(LR, np.float32)
    return run, [run.step(x=x, label=label, lr=lr) for x, label in batches(case)]
