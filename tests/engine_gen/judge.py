"""A chain in a session of gopt's, held against a session without rewrites and against onnx's reference evaluator."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
from draws import Verdict
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

from gopt.errors import RunError
from gopt.runtime.fallback_kernels import operators
from gopt.runtime.session import CPU, SessionCache, make_session

TOLERANCE = 1e-3
"""Share of the largest element: chains are short, and their numbers below 60. Of a half that a chain casts to, one
unit is as large."""


def judge(model: ModelProto, feeds: Mapping[str, np.ndarray]) -> Verdict:
    """``rewritten``: a rewrite computes something else; ``kernel``: the operators themselves do, in one of both
    engines; ``refused``: no session is made of it."""
    data = model.SerializeToString()
    try:
        plain = make_session(data, [CPU], rewrites=False).run(None, feeds)[0]
    except Exception as error:  # the runtime's have no common base
        return Verdict("refused", str(error))
    try:
        own = SessionCache().get(data).run(None, feeds)[0]
    except RunError as error:
        return Verdict("rewritten", f"refused with rewrites alone: {error.message}")
    except Exception as error:  # the runtime's have no common base
        return Verdict("rewritten", f"fails with rewrites alone: {error}")
    if not near(own, plain):
        return Verdict("rewritten", f"{distance(own, plain):.2g} off")
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            wanted = ReferenceEvaluator(model, new_ops=list(operators())).run(None, dict(feeds))[0]
    except Exception as error:  # it raises whatever NumPy does
        return Verdict("alone", str(error))
    return Verdict("right") if near(own, wanted) else Verdict("kernel", f"{distance(own, wanted):.2g} off")


def near(one: np.ndarray, two: np.ndarray) -> bool:
    return distance(one, two) <= TOLERANCE


def distance(one: np.ndarray, two: np.ndarray) -> float:
    """The largest difference as a share of the largest element; infinite where shapes or not-finite elements differ."""
    first, second = np.asarray(one, np.float64), np.asarray(two, np.float64)
    sound = np.isfinite(first)
    if first.shape != second.shape or not np.array_equal(sound, np.isfinite(second)):
        return float("inf")
    return float(np.abs(first - second)[sound].max(initial=0) / max(np.abs(second)[sound].max(initial=0), 1e-2))
