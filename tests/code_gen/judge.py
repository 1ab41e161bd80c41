"""Exports code of a seed and says how it compares."""

from __future__ import annotations

import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

from code_gen.codes import Code, draw_code
from code_gen.oracle import differences
from code_gen.ranks import differences_on_ranks, may_run
from gopt.errors import GoptError
from gopt.frontends.pytorch.export import export

NO_DOUBLE = ("cannot be run", "not implemented")


@dataclass(frozen=True, slots=True)
class Verdict:
    """``outcome``: equal, equal on ranks, refused, WRONG or CRASH."""

    outcome: str
    told: str
    why: str = ""


def judge(seed: int, ranks: bool = False) -> Verdict:
    """Export the code of a seed and compare; in float32 where ONNX Runtime has no kernel of it for float64."""
    code = draw_code(seed)
    found = _judge(code, ranks)
    if code.double and found.outcome == "refused" and any(each in found.why.lower() for each in NO_DOUBLE):
        found = _judge(draw_code(seed, double=False), ranks)
    return found


def _judge(code: Code, ranks: bool) -> Verdict:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "step.onnx"
        try:
            export(code.make, path, options=code.options)
        except GoptError as error:
            return Verdict("refused", code.told, error.message)
        except Exception:
            return Verdict("CRASH", code.told, traceback.format_exc())
        try:
            wrong = differences(code, path)
            if wrong:
                return Verdict("WRONG", code.told, "; ".join(wrong[:5]))
            if not ranks or not may_run(code):
                return Verdict("equal", code.told)
            wrong = differences_on_ranks(code, path, Path(folder))
        except GoptError as error:
            return Verdict("refused", code.told, f"on ranks: {error.message}")
        except Exception:
            return Verdict("CRASH", code.told, traceback.format_exc())
        return Verdict("WRONG" if wrong else "equal on ranks", code.told, "on ranks: " + "; ".join(wrong[:5]))
