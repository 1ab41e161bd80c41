"""Loop, for onnx's reference evaluator. The evaluator's own Loop joins the results of turns; the standard stacks
them."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.ops.op_loop import Loop as ReferenceLoop


class Loop(ReferenceLoop):  # type: ignore[misc,unused-ignore]
    """Runs the body until the condition is false or the turns are done; a result of every turn is stacked in front."""

    op_domain = ""
    body: Any
    _run_body: Any

    def _run(
        self, turns: Any, go: Any, *carried: Any, context: Any = None, body: Any = None, attributes: Any = None,
        bindings: Any = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        turn_name, go_name, *names = self.body.input_names
        state, stacked = list(carried), list[list[Any]]([] for _ in range(self.K))
        turn, go = 0, go is None or bool(go)
        while go and (turns is None or turn < int(turns)):
            inputs = {
                turn_name: np.array(turn, np.int64),
                go_name: np.array(go),
                **dict(zip(names, state, strict=True)),
            }
            results = self._run_body({**(context or {}), **inputs}, attributes=attributes, bindings=bindings)
            go, state = bool(results[0]), list(results[1 : 1 + self.N])
            for values, result in zip(stacked, results[1 + self.N :], strict=True):
                values.append(result)
            turn += 1
        empty = np.zeros((0,))  # the evaluator knows no type for it
        return (*state, *(np.stack(values) if values else empty for values in stacked))
