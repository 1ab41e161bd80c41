"""Models and steps drawn at random, by PyTorch: forward models as ONNX Runtime computes them, steps as their ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from derive_gen.make import make as forward
from helpers import stage_on
from steps_gen.__main__ import setting
from steps_gen.make import make as step
from steps_gen.plan import draw

import gopt
from gopt.errors import GoptError, InputError
from gopt.ir.load import load
from gopt.ir.types import numpy_dtype
from gopt.records.mesh import Mesh
from gopt.runtime.executor import Executor, no_calls
from gopt.runtime.session import NoKernelError, SessionCache

pytestmark = pytest.mark.torch
device = pytest.importorskip("gopt.runtime.pytorch.device")
FIRST, FORWARDS, STEPS = 900_000, 60, 30


def near(mine: np.ndarray, theirs: np.ndarray) -> bool:
    one, other = mine.astype("f8"), theirs.astype("f8")
    size = np.abs(one[np.isfinite(one)]).max(initial=1.0)
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-3, atol=1e-4 * size, equal_nan=True)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + FORWARDS))
def test_a_forward_model_is_what_onnxruntime_computes(seed, tmp_path):
    drawn, path = forward(seed), tmp_path / "forward.onnx"
    path.write_bytes(drawn.model.SerializeToString())
    try:
        graph = load(path)
        reads = {name: type for name, type in graph.inputs.items() if name in drawn.batches[0]}
        feeds = {
            name: np.asarray(drawn.batches[0][name]).astype(numpy_dtype(type.dtype)) for name, type in reads.items()
        }
        due = Executor(graph, SessionCache()).run(feeds, no_calls)
    except (InputError, NoKernelError):
        return  # no model, or one that ONNX Runtime lacks an operator of
    for execution in (device.Execution.NODES, device.Execution.TRACE):
        found = Executor(graph, device.TorchHost("cpu", execution).sessions()).run(feeds, no_calls)
        assert [name for name in due if not near(found[name], due[name])] == [], execution


def sharded(seed: int, folder: Path) -> tuple[object, dict[str, float]] | None:
    made, how = step(draw(seed)), setting(seed)
    path = folder / "step.onnx"
    path.write_bytes(made.model.SerializeToString())
    options = {"partition": how.partition} if how.stage else {}
    try:
        source, mesh = gopt.load(path), Mesh.parse(how.mesh)
        ranks = gopt.shard(
            source, mesh, stage=stage_on(how.mesh, how.stage), accumulate=how.micro, prove=False, **options
        )
    except GoptError:
        return None
    return ranks, {made.names.get("lr", "lr"): float(made.hyper["lr"][0])}


@pytest.mark.parametrize("seed", range(FIRST, FIRST + STEPS))
def test_ranks_of_a_step_equal_it_by_pytorch(seed, tmp_path):
    if (made := sharded(seed, tmp_path)) is None:
        return
    found = gopt.verify(made[0], steps=1, confirm=False, engine="torch", settings=made[1])
    assert found.equal or "zero against zero" in found.reason(), found.reason()
    assert not [doubt for check in found.engines for doubt in check.doubts()]
