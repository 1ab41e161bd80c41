"""The variants of every standard operator whose derivatives are compared with difference quotients.

A new operator of onnx needs a case here, or a place in NO_FLOATS (``tests/autodiff/test_differentiate.py``).
"""

from operator_cases import control, elementwise, flat, index, layout, normalisation, product, window
from operator_cases.case import (
    CASES,
    DEPRECATED,
    EXACT,
    HISTORY,
    NEWEST,
    NO_FLOATS,
    OLDEST,
    RUNTIME,
    RUNTIMES,
    SINGLE,
    Case,
)

__all__ = [
    "CASES", "DEPRECATED", "EXACT", "HISTORY", "NEWEST", "NO_FLOATS", "OLDEST", "RUNTIME", "RUNTIMES", "SINGLE", "Case",
    "control", "elementwise", "flat", "index", "layout", "normalisation", "product", "window",
]  # fmt: skip
