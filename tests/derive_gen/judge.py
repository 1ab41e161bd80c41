"""Derives a step from a random forward model and holds it against the reference."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

import gopt
from gopt.errors import GoptError

from .make import Forward
from .reference import LR, RULES, Loss, Unsteady, gradients, trained


@dataclass(frozen=True)
class Verdict:
    """``outcome``: right, refused, unsteady, WRONG or CRASH; ``kind``: what refusals are counted by."""

    outcome: str
    why: str = ""
    kind: str = ""


def judge(forward: Forward, optimizer: str, folder: Path) -> Verdict:
    path, step = folder / "forward.onnx", folder / "step.onnx"
    onnx.save(forward.model, path)
    options = gopt.DeriveOptions(
        loss=forward.loss,
        optimizer=optimizer,
        optimizer_options=RULES[optimizer][1],
        dims=forward.dims,
        **forward.knobs,
    )
    try:
        gopt.derive(path, step, options)
    except GoptError as error:
        return _refusal(forward, error)
    except Exception:
        return Verdict("CRASH", traceback.format_exc())
    try:
        return _compared(forward, optimizer, step)
    except Unsteady as error:
        return Verdict("unsteady", str(error))
    except NotRun as error:
        return Verdict("not run", str(error))


class NotRun(Exception):
    """ONNX Runtime does not run the forward model."""


def _refusal(forward: Forward, error: GoptError) -> Verdict:
    """A refusal names an operator or a value, and says what helps."""
    message = error.message
    known = {node.op_type for node in forward.model.graph.node} | set(forward.weights) | {forward.loss}
    known |= {name for node in forward.model.graph.node for name in node.output}
    if "depends on no parameter" in message:
        return _independent(forward)
    named = any(name in message for name in known)
    if not named or not error.hints or "\n" in message:
        return Verdict("WRONG", f"a refusal without a name or a hint: {message} {error.hints}")
    return Verdict(
        "refused", message, f"{type(error).__name__}: {''.join(c for c in message if not c.isdigit())[:110]}"
    )


def _independent(forward: Forward) -> Verdict:
    try:
        slopes = gradients(Loss(forward), forward.weights, forward.batches[0])
    except Unsteady as error:
        return Verdict("unsteady", str(error))
    most = max(np.abs(each).max() for each in slopes.values())
    return Verdict("right") if most < 1e-7 else Verdict("WRONG", f"said to depend on no parameter: {most:g}")


def _compared(forward: Forward, optimizer: str, step: Path) -> Verdict:
    model = onnx.load(step)
    values = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    fed = {each.name for each in model.graph.input} - set(values)
    states = {each.name: values[each.name] for each in model.graph.input if each.name in values}
    names = [name for name in forward.weights if name in states]
    loss = Loss(forward)
    if not _agree(forward, loss, step.with_name("forward.onnx")):
        return Verdict("apart", "onnx's evaluator and ONNX Runtime compute different losses of the forward")
    wanted, slopes, losses = trained(forward, loss, optimizer, names)
    for name in forward.weights:
        if name not in names and np.abs(slopes[name]).max() > 1e-6:
            return Verdict("WRONG", f"{name} is not trained, and its gradient is {np.abs(slopes[name]).max():g}")
    session = _session(step)
    outputs = [each.name for each in session.get_outputs()]
    for place, batch in enumerate(forward.batches):
        feeds = {**_typed(batch, session), "lr": np.array(LR, np.float32), **states}
        made = dict(zip(outputs, session.run(outputs, {key: feeds[key] for key in (*fed, *states)})))
        states = {name: made[f"{name}_out"] for name in states}
        shown = float(
            np.asarray(made["loss" if forward.loss in ("mse", "cross-entropy") else forward.loss]).reshape(())
        )
        if not np.isclose(shown, losses[place], rtol=1e-3, atol=1e-4):
            return Verdict("WRONG", f"the loss of step {place} is {shown:g}, not {losses[place]:g}")
    narrow = {each.name for each in model.graph.initializer if each.data_type == onnx.TensorProto.FLOAT16}
    rounding = 1e-5 * max(np.abs(each).max() for each in slopes.values())
    for name in names:
        before, after, right = forward.weights[name], states[name].astype(np.float64), wanted[name]
        apart, most = np.abs(after - right).max(), np.abs(right - before).max()
        bound = (0.05 if name in narrow else 5e-3) * most + (2e-3 if name in narrow else 3e-6) * (
            1 + np.abs(before).max()
        )
        if not apart <= bound + rounding:
            return Verdict("WRONG", f"{name} differs by {apart:g} where it moves by {most:g}")
    return Verdict("right", f"{len(names)} of {len(forward.weights)} weights")


def _agree(forward: Forward, loss: Loss, path: Path) -> bool:
    """Whether both runtimes compute the same forward: onnx's evaluator is wrong about some pools."""
    try:
        session = _session(path)
        runtime = session.run(None, _typed(forward.batches[0], session))[0]
    except Exception as error:  # the runtime's have no common base
        raise NotRun(str(error)[:200]) from error
    expected = np.asarray(loss.forward_result(forward.batches[0]))
    return np.shape(runtime) == expected.shape and np.allclose(runtime, expected, rtol=1e-3, atol=1e-4)


def _typed(batch: dict[str, np.ndarray], session: onnxruntime.InferenceSession) -> dict[str, np.ndarray]:
    kinds = {each.name: each.type for each in session.get_inputs()}
    whole = ("tensor(int64)",)
    return {
        name: value.astype(np.int64 if kinds[name] in whole else np.float32)
        for name, value in batch.items()
        if name in kinds
    }


def _session(step: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    # as gopt itself runs steps: beyond, 1.31 fuses a Transpose into a product with a vector, and turns nothing
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    return onnxruntime.InferenceSession(str(step), options, providers=["CPUExecutionProvider"])
