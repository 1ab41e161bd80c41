"""Small GPU sessions for the arithmetic of calls, built on first use.

The sessions serve reductions in which NCCL differs from the reference: float16 and bfloat16 summed in float32, 16-bit
integers, and maxima and minima in which NaN wins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from gopt.runtime.engines.cuda import DeviceBlock
from gopt.runtime.engines.gpu import Gpu, Sessions, code


class Kernels:
    """Elementwise work on flat blocks, on the communication stream."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._sessions = gpu, Sessions(gpu.index, gpu.comm_stream)

    def cast(self, source: DeviceBlock, target: DeviceBlock) -> None:
        """Write the elements of one block into another of another type: floats are rounded, integers truncated to
        the width."""
        node = helper.make_node("Cast", ["x"], ["y"], to=code(target.dtype))
        self._run([node], [source], target)

    def mark_nan(self, source: DeviceBlock, target: DeviceBlock) -> None:
        """Write 1 where an element is NaN, else 0; ``target`` is of uint8."""
        nodes = [helper.make_node("IsNaN", ["x"], ["n"]), helper.make_node("Cast", ["n"], ["y"], to=TensorProto.UINT8)]
        self._run(nodes, [source], target)

    def put_nan(self, source: DeviceBlock, marks: DeviceBlock, target: DeviceBlock) -> None:
        """Write the elements of ``source``, and NaN where ``marks`` (uint8) is not 0."""
        nan = helper.make_tensor("v", code(source.dtype), [1], [np.nan])
        nodes = [
            helper.make_node("Constant", [], ["nan"], value=nan),
            helper.make_node("Cast", ["z"], ["b"], to=TensorProto.BOOL),
            helper.make_node("Where", ["b", "nan", "x"], ["y"]),
        ]
        self._run(nodes, [source, marks], target)

    def _run(self, nodes: Sequence[NodeProto], blocks: Sequence[DeviceBlock], target: DeviceBlock) -> None:
        if not target.size:
            return
        infos = [helper.make_tensor_value_info(n, code(b.dtype), ["rows"]) for n, b in zip("xz", blocks)]
        output = helper.make_tensor_value_info("y", code(target.dtype), ["rows"])
        graph = helper.make_graph(list(nodes), "kernel", infos, [output])
        model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
        session: Any = self._sessions.get(model.SerializeToString(deterministic=True))
        self._gpu.run(session, dict(zip("xz", blocks)), {"y": target}, ["y"])
