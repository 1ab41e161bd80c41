"""Values in the memory of the host: copies are steps of the run, states stay there, and the bits are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import source

import gopt
from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_check import read_manifest
from gopt.ir.graph import Graph, Node
from gopt.ir.load import load
from gopt.ir.types import numpy_dtype
from gopt.records.host_values import HostValues
from gopt.runtime.execution_plan import plan_execution
from gopt.runtime.executor import Executor, HeldInput
from gopt.runtime.partition import CopyStep, Segment

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("unchecked")]
torch = pytest.importorskip("torch")
device = pytest.importorskip("gopt.runtime.pytorch.device")
link = pytest.importorskip("gopt.runtime.pytorch.host_link")


class CountedLink:
    """A link inside of the host's memory, whose copies arrive late."""

    def __init__(self) -> None:
        self.down = self.up = 0
        self.waits: list[Any] = []

    def _later(self, tensor):
        result = torch.full_like(tensor, 77) if tensor.dtype != torch.bool else torch.zeros_like(tensor)
        self.waits.append((result, tensor.clone()))
        return result

    def to_host(self, tensor):
        self.down += tensor.nbytes
        self._done(tensor)
        return self._later(tensor)

    def to_device(self, tensor):
        self.up += tensor.nbytes
        self._done(tensor)
        return self._later(tensor)

    def _done(self, tensor):
        """Copies run in order: the next copy has what the one before it brings."""
        for result, value in self.waits:
            if result is tensor:
                result.copy_(value)

    def arrive(self, tensor):
        self._done(tensor)
        self.waits = [pair for pair in self.waits if pair[0] is not tensor]
        return tensor

    def settle(self):
        for result, value in self.waits:
            result.copy_(value)
        self.waits.clear()

    def pin(self, tensor):
        return tensor.clone()


def fake_call(graph: Graph):
    """Results of calls that follow the operands, and are the same in every run."""

    def call(index: int, node: Node, inputs: list[Any], buffer: Any = None) -> list[Any]:
        total = sum(float(value.double().sum()) for value in inputs) % 3 if inputs else 0.5
        shapes = [graph.type_of(name).dims for name in node.outputs if name]
        kinds = [numpy_dtype(graph.type_of(name).dtype) for name in node.outputs if name]
        return [torch.from_numpy(np.full(shape, total, kind)) for shape, kind in zip(shapes, kinds)]

    return call


class Job:
    """A rank with all its files on a device, whose calls are made up."""

    def __init__(self, folder, where, host: HostValues | None = None) -> None:
        self.manifest: Manifest = read_manifest(folder)[0]
        self.rank = self.manifest.ranks[-1]
        self.where, self.host = where, host or HostValues()
        self.graphs = {phase: load(folder / file, own=True) for phase, file in self.rank.files.items()}
        following = self.manifest.next_inputs(self.rank)
        self.plans = {
            phase: plan_execution(graph, following, where, None, self.host) for phase, graph in self.graphs.items()
        }
        self.programs = {phase: Executor(plan, where.sessions()) for phase, plan in self.plans.items()}
        draw = np.random.default_rng(1)
        names = [*following.values()]
        types = {name: type for graph in self.graphs.values() for name, type in graph.inputs.items()}
        arrays = {name: draw.uniform(0.1, 1, types[name].dims).astype(numpy_dtype(types[name].dtype)) for name in names}
        self.states = {name: self.hold(name, array) for name, array in arrays.items()}
        self.types = {name: type for name, type in types.items() if name not in names}

    def hold(self, name, array):
        hosted = self.where.has_host and name in self.host.states
        return self.where.hold_on_host(array) if hosted else self.where.hold(array)

    def step(self, seed: int) -> dict[str, np.ndarray]:
        """Run all files once; returns all that the step shows."""
        draw, saved, shown = np.random.default_rng(seed), {}, {}
        kinds = {name: numpy_dtype(type.dtype) for name, type in self.types.items()}
        feeds = {
            name: draw.integers(0, 2, self.types[name].dims).astype(kind)
            if kind.kind in "iub" else draw.uniform(0.1, 1, self.types[name].dims).astype(kind)
            for name, kind in kinds.items()
        }  # fmt: skip
        for phase, program in self.programs.items():
            graph = self.graphs[phase]
            fed = {name: feeds[name] for name in graph.inputs if name in feeds}
            fed |= {name: HeldInput(value) for name, value in saved.items() if name in graph.inputs}
            results = program.advance(self.states, fed, fake_call(program.graph))
            saved |= {name: results.pop(name) for name in [value.name for value in self.rank.saved] if name in results}
            shown |= {name: np.array(self.where.to_host(value)) for name, value in results.items()}
        values = {name: np.array(self.where.to_host(self.where.view(value))) for name, value in self.states.items()}
        return shown | values


CASES = [
    ("gpt_adamw", "shard=2", {"stage": 2}), ("gpt_adamw", "dp=1", {"stage": 0}),
    ("gpt_adamw", "shard=2", {"stage": 3, "accumulate": 2, "recompute": "full"}),
    ("mlp_mom_clip_sched", "shard=2", {"stage": 1, "partition": "whole"}),
    ("gpt_adamw_clip_sched_fp16", "shard=2", {"stage": 2}),
    ("gpt_adamw", "pp=2", {"accumulate": 2, "schedule": "zb-h1"}), ("mlp_muon", "dp=2", {"stage": 0}),
]  # fmt: skip


@pytest.mark.parametrize("what", ["states", "activations", "states,activations"])
@pytest.mark.parametrize(("fixture", "mesh", "options"), CASES)
def test_steps_over_a_link_have_the_bits_of_steps_without(fixture, mesh, options, what, tmp_path):
    passes = {"offload": {"least": "1B"}}
    result = gopt.shard(source(fixture), mesh, offload=what, passes=passes, **options)
    result.write(tmp_path / "ranks")
    over, host = CountedLink(), result.program.host
    plain = Job(tmp_path / "ranks", device.TorchDevice("cpu"))
    moved = Job(tmp_path / "ranks", device.TorchDevice("cpu", link=over), host)
    assert not any(isinstance(step, CopyStep) for plan in plain.plans.values() for step in plan.steps)
    steps = [step for plan in moved.plans.values() for step in plan.steps]
    if "states" in what:
        assert any(isinstance(step, Segment) and step.on_host for step in steps)
    for seed in range(3):
        due, got = plain.step(seed), moved.step(seed)
        assert due.keys() == got.keys()
        for name, value in due.items():
            np.testing.assert_array_equal(got[name], value, err_msg=f"{name} of step {seed}")
    assert over.down and over.up


def test_what_a_step_copies_is_what_the_report_says(tmp_path):
    passes = {"offload": {"least": "1B"}}
    result = gopt.shard(source("gpt_adamw"), "shard=2", offload="states,activations", passes=passes)
    result.write(tmp_path / "ranks")
    over = CountedLink()
    job = Job(tmp_path / "ranks", device.TorchDevice("cpu", link=over), result.program.host)
    job.step(0)
    figures = result.program.passes[-1].result.facts
    assert abs(over.down - figures.to_host) <= 0.02 * figures.to_host
    assert abs(over.up - figures.to_device) <= 0.02 * figures.to_device


def test_a_copy_that_has_not_arrived_is_waited_for():
    """The planted error: without ``arrive`` and ``settle`` the tests above would read 77."""
    over = CountedLink()
    tensor = over.to_device(torch.ones(3))
    assert tensor.tolist() == [77, 77, 77]
    assert over.arrive(tensor).tolist() == [1, 1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("what", ["states", "activations", "states,activations"])
def test_a_gpu_with_values_on_its_host_trains_as_without(what, tmp_path):
    """Not run so far: no GPU was lent."""
    passes = {"offload": {"least": "1B"}}
    result = gopt.shard(source("gpt_adamw"), "shard=2", offload=what, passes=passes)
    result.write(tmp_path / "ranks")
    where = torch.device("cuda", 0)
    plain = Job(tmp_path / "ranks", device.TorchDevice("cuda:0"))
    moved = Job(tmp_path / "ranks", device.TorchDevice("cuda:0", link=link.PinnedLink(where)), result.program.host)
    for name in result.program.host.states:
        assert moved.states[name].is_pinned()
    for seed in range(3):
        due, got = plain.step(seed), moved.step(seed)
        for name, value in due.items():
            if what == "activations":
                np.testing.assert_array_equal(got[name], value, err_msg=name)
            else:  # the update rounds as the CPU does
                np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
