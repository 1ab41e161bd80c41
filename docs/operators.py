"""Write docs/operators.md from the cases of the tests and the schemas of onnx: ``python docs/operators.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
import onnx.parser
from onnx import defs

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from operator_cases import CASES, DEPRECATED, HISTORY, NEWEST, NO_FLOATS, OLDEST, RUNTIMES, Case  # noqa: E402

PAGE = HERE / "operators.md"
INTRO = f"""\
# Operators with a derivative

The operators of ONNX through which [`gopt derive`](derive.md) differentiates. `python docs/operators.py` generates this
page from `tests/operator_cases`, and `tests/autodiff/test_differentiate.py` compares each variant with central
differences of the loss, along two directions for each operand: in float64 by onnx's evaluator where it computes the
variant, else in float32, by it or by ONNX Runtime.

Older models are converted to operator set {OLDEST}. A form of an operator is named by the set that brought it. Forms
are checked up to set {NEWEST}, and up to {RUNTIMES} where ONNX Runtime computes them.

An operator or variant that is refused ends `gopt derive` with exit code 4 and a message that names it, where it stands
between a trained weight and the loss. Elsewhere it passes. "zero" says that results are steps or whole numbers, or that
there is no operand: no derivative passes. A weight that such an operator alone reads is not trained; a note says so.

| operator | forms | derivative by | variants | refused |
|---|---|---|---|---|
"""


def page(newest: int = NEWEST) -> str:
    """The page as it should stand in docs/operators.md, with the operators up to an operator set."""
    names = {
        each.name
        for each in defs.get_all_schemas_with_history()
        if each.domain == "" and each.since_version <= newest and each.name not in DEPRECATED
    }
    return INTRO + "".join(f"{row(name)}\n" for name in sorted(names))


def row(name: str) -> str:
    cases = [case for case in CASES if case.operator == name]
    smooth = [case for case in cases if not case.refused]
    versions = {each for case in cases for each in case.versions}
    forms = ", ".join(map(str, sorted({defs.get_schema(name, each).since_version for each in versions})))
    if name in NO_FLOATS:
        by = "no operand with a derivative"
    elif not cases:
        by = "no rule"
    else:
        by = ", ".join(operands(name, smooth)) if smooth else "refused"
    done = "; ".join(dict.fromkeys(case.variant for case in smooth))
    refused = "; ".join(dict.fromkeys(case.variant for case in cases if case.refused))
    return f"| {name} | {forms} | {by} | {cell(done)} | {cell(refused)} |"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def operands(name: str, cases: list[Case]) -> list[str]:
    """The operands by which cases differentiate, as the schema names them; ``zero`` where no derivative passes."""
    schema = max(HISTORY[name], key=lambda each: each.since_version)
    places: set[int] = set()
    found = []
    for case in cases:
        if case.variant in ("zero", "no operand", "no float operand"):
            found.append("zero")
            continue
        given = ", ".join(f"float {each}" for each in case.by)
        model = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["" : {OLDEST}]> g ({given}) => (y) {{ {case.text} }}'
        )
        nodes = [node for node in model.graph.node if node.op_type == name]
        direct = {place for node in nodes for place, each in enumerate(node.input) if each in case.by}
        places |= {min(place, len(schema.inputs) - 1) for place in direct}
        if any(node.attribute and node.attribute[0].type == onnx.AttributeProto.GRAPH for node in nodes):
            found.append("values that bodies read")
    return list(dict.fromkeys([*(schema.inputs[place].name for place in sorted(places)), *found]))


if __name__ == "__main__":
    PAGE.write_text(page(defs.onnx_opset_version()), encoding="utf-8")
