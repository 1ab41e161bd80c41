"""The operators' arithmetic once more, in NumPy and float64, written from the documents and not from the bodies.

``old`` and the result map slots of one weight to arrays; ``scalars`` those of the node.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Values = dict[str, Any]


def f32(value: float) -> float:
    return float(np.float32(value))


def bias(base: float, count: int, guarded: bool = True) -> float:
    return 1.0 - f32(base) ** count if count > 0 or not guarded else 1.0


def gradient_of(old: Values, s: Values, a: Values) -> np.ndarray:
    factor = s.get("loss_scale", 1.0)
    norm = s.get("gradient_norm")
    if norm is not None and norm > factor * a["max_norm_clip"]:
        factor = norm / a["max_norm_clip"]
    return old["gradient"] / factor


def adam_optimizer(old: Values, s: Values, a: Values) -> Values:
    w, g = old["weight"], gradient_of(old, s, a)
    m = a["alpha"] * old["moment_1"] + (1 - a["alpha"]) * g
    v = a["beta"] * old["moment_2"] + (1 - a["beta"]) * g * g
    c1, c2 = (bias(a["alpha"], s["count"]), bias(a["beta"], s["count"])) if a["do_bias_correction"] else (1, 1)
    if a["weight_decay_mode"] == 0:
        delta = -s["rate"] * (m / c1 / (np.sqrt(v / c2) + a["epsilon"]) + a["lambda"] * w)
    else:
        step = s["rate"] * np.sqrt(c2) / c1 * m / (np.sqrt(v) + a["epsilon"])
        delta = -step - s["rate"] * a["lambda"] * (w - step)
    new = {"new_weight": w + delta, "new_gradient": delta, "new_moment_1": m, "new_moment_2": v}
    return new | {"new_count": s["count"] + 1}


def lamb_optimizer(old: Values, s: Values, a: Values) -> Values:
    w, g = old["weight"], gradient_of(old, s, a)
    m = a["alpha"] * old["moment_1"] + (1 - a["alpha"]) * g
    v = a["beta"] * old["moment_2"] + (1 - a["beta"]) * g * g
    c1 = c2 = 1.0
    if "count" in s and a["do_bias_correction"]:
        c1, c2 = bias(a["alpha"], s["count"]), bias(a["beta"], s["count"])
    d = a["lambda"] * w + m / c1 / (np.sqrt(v / c2) + a["epsilon"])
    good = np.isfinite(d)
    d = np.where(good, d, 0)
    up, down = np.linalg.norm(w), np.linalg.norm(d)
    ratio = s["rate"]
    if up and down:
        ratio = s["rate"] * min(max(up / down, a["ratio_min"]), a["ratio_max"])
    delta = -ratio * d
    new = {"new_weight": w + delta, "new_gradient": delta}
    new |= {"new_moment_1": np.where(good, m, old["moment_1"]), "new_moment_2": np.where(good, v, old["moment_2"])}
    return new | ({"new_count": s["count"] + 1} if "count" in s else {})


def sgd_optimizer(old: Values, s: Values, a: Values) -> Values:
    delta = -s["rate"] * old["gradient"]
    return {"new_weight": old["weight"] + delta, "new_gradient": delta}


def adamw_optimizer(old: Values, s: Values, a: Values) -> Values:
    w, g, rate = old["weight"], old["gradient"], s["rate"]
    m = a["alpha"] * old["moment_1"] + (1 - a["alpha"]) * g
    v = a["beta"] * old["moment_2"] + (1 - a["beta"]) * g * g
    c1, c2 = (1.0, 1.0)
    if a["correct_bias"] == 1:
        c1, c2 = bias(a["alpha"], s["count"], False), bias(a["beta"], s["count"], False)
    if a["adam_mode"] == 0:
        new = w * (1 - rate * a["weight_decay"]) - rate * m / c1 / (np.sqrt(v / c2) + a["epsilon"])
    else:
        new = w - rate * np.sqrt(c2) / c1 * m / (np.sqrt(v) + a["epsilon"])
        new = new - rate * a["weight_decay"] * new
    return {"new_weight": new, "new_moment_1": m, "new_moment_2": v}


def preview_adam(old: Values, s: Values, a: Values) -> Values:
    w = old["weight"]
    g = a["norm_coefficient"] * w + old["gradient"]
    m = a["alpha"] * old["moment_1"] + (1 - a["alpha"]) * g
    v = a["beta"] * old["moment_2"] + (1 - a["beta"]) * g * g
    t, rate = s["count"], s["rate"]
    if t > 0:
        rate = rate * np.sqrt(bias(a["beta"], t)) / bias(a["alpha"], t)
    new = (1 - a["norm_coefficient_post"]) * (w - rate * m / (np.sqrt(v) + a["epsilon"]))
    return {"new_weight": new, "new_moment_1": m, "new_moment_2": v}


def preview_momentum(old: Values, s: Values, a: Values) -> Values:
    g = a["norm_coefficient"] * old["weight"] + old["gradient"]
    m = a["alpha"] * old["moment_1"] + (a["beta"] if s["count"] > 0 else 1.0) * g
    along = m if a["mode"] == "standard" else g + a["alpha"] * m
    return {"new_weight": old["weight"] - s["rate"] * along, "new_moment_1": m}


def preview_adagrad(old: Values, s: Values, a: Values) -> Values:
    g = a["norm_coefficient"] * old["weight"] + old["gradient"]
    total = old["moment_1"] + g * g
    rate = s["rate"] / (1 + s["count"] * a["decay_factor"])
    return {"new_weight": old["weight"] - rate * g / (np.sqrt(total) + a["epsilon"]), "new_moment_1": total}


FORMULAS = {
    ("com.microsoft", "AdamOptimizer"): adam_optimizer,
    ("com.microsoft", "LambOptimizer"): lamb_optimizer,
    ("com.microsoft", "SGDOptimizer"): sgd_optimizer,
    ("com.microsoft", "SGDOptimizerV2"): sgd_optimizer,
    ("com.microsoft", "AdamWOptimizer"): adamw_optimizer,
    ("ai.onnx.preview.training", "Adam"): preview_adam,
    ("ai.onnx.preview.training", "Momentum"): preview_momentum,
    ("ai.onnx.preview.training", "Adagrad"): preview_adagrad,
}
