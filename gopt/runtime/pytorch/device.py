"""Segments computed by PyTorch: a device of a rank, of the host or a GPU.

A segment is traced once for each shape of the operands, into a module of ATen calls. Where a result's shape or a branch
follows the values of a step, nodes are computed in turn instead."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from gopt.errors import GoptError, OptionError, RunError
from gopt.ir.graph import Graph
from gopt.ir.host_copies import TO_HOST
from gopt.ir.opset import opset_of
from gopt.ir.types import TensorType
from gopt.runtime.partition import CopyStep, OverwritingSegment, Segment
from gopt.runtime.planner.assignment import BufferAssignment, MemberIndex
from gopt.runtime.planner.buffers import Buffers
from gopt.runtime.planner.memory_planner import BufferViews
from gopt.runtime.proto import is_constant
from gopt.runtime.pytorch.engine import local_rank
from gopt.runtime.pytorch.hoisting import compiled
from gopt.runtime.pytorch.host_link import HostLink, PinnedLink
from gopt.runtime.pytorch.interpreter import NOT_DETERMINISTIC, Body, Interpreter, Scope, UntraceableError, check_known
from gopt.runtime.pytorch.overwriting import Overwrites, StateViews, plan_overwrites
from gopt.runtime.pytorch.tensors import array_over, tensor_over
from gopt.runtime.session import Array, SessionCache, first_line
from gopt.runtime.shared_memory import SharedMemory
from gopt.runtime.tuning.tuning import NoTuning, Tuning

Tensors = Sequence[torch.Tensor]
NOTHING: Mapping[str, str] = MappingProxyType({})
Program = Callable[..., Sequence[torch.Tensor]]
_UNTRACEABLE = (
    UntraceableError, DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode,
)  # fmt: skip


class Execution(Enum):
    """How nodes become calls of PyTorch."""

    NODES = "nodes"
    """In turn, in every run."""
    TRACE = "trace"
    """As a module of ATen calls."""
    COMPILED = "compiled"
    """As a module of ATen calls, compiled by Inductor."""


class TorchSegment:
    """A segment with results in new memory in every run; ``aliases``: a result -> the overwritten operand;
    ``views``: of operands of all segments of the device."""

    def __init__(
        self, segment: Segment, graph: Graph, device: torch.device, execution: Execution,
        aliases: Mapping[str, str], views: StateViews, link: HostLink | None,
    ) -> None:  # fmt: skip
        check_known(segment.nodes)
        self._overwritten, self._views = frozenset(aliases.values()), views
        self._link, self._on_host = link, segment.on_host
        names = [name for name in segment.inputs if is_constant(graph, name)]
        self.inputs = tuple(name for name in segment.inputs if name not in set(names))
        self.outputs = segment.outputs
        self.title = segment.title
        index_of = {name: index for index, name in enumerate(self.inputs)}
        self._targets = {index: index_of[aliases[name]] for index, name in enumerate(self.outputs) if name in aliases}
        """A result -> the overwritten operand."""
        self._surviving = {index for index, name in enumerate(self.outputs) if name in graph.outputs}
        constants = {name: tensor_over(graph.initializers[name].numpy()) for name in names}
        self._body = Body(segment.nodes, self.inputs, self.outputs, constants)
        self._opset, self._device, self._execution = opset_of(graph.header), device, execution
        self._programs: dict[Any, Program] = {}
        """By the shapes, strides and types of the operands."""

    @property
    def overwrites(self) -> frozenset[str]:
        """The overwritten operands, and the views of them: a call on its way may read one."""
        return self._overwritten.union(self._views.of(self._overwritten))

    @overwrites.setter
    def overwrites(self, names: frozenset[str]) -> None:
        self._overwritten = names

    def run(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The results, and copies of values that this run would change. Raises RunError where PyTorch fails."""
        operands = [values[name] for name in self.inputs]
        if self._link is not None and self._on_host:
            self._link.settle()
        elif self._link is not None:
            operands = [*map(self._link.arrive, operands)]
        key = tuple((operand.shape, operand.stride(), operand.dtype) for operand in operands)
        try:
            with torch.no_grad(), torch.autocast(self._device.type, enabled=False):  # the file says each type
                is_new = key not in self._programs
                if is_new:
                    self._programs[key] = self._program(operands)
                copies = {
                    name: values[name].clone() for name in self._views.of(self._overwritten) if name in values
                }  # fmt: skip
                results = dict(zip(self.outputs, self._programs[key](*operands), strict=True))
        except GoptError:
            raise
        except Exception as error:  # its exceptions have no common base
            if NOT_DETERMINISTIC in str(error):  # of a trace: nodes in turn name the operator
                with torch.no_grad():
                    self._computed(Interpreter(self._opset, self._device, traced=False), [])(*operands)
            raise RunError(f"PyTorch fails in {self.title}: {first_line(error)}") from error
        if is_new:
            shown = {name: value for index, (name, value) in enumerate(results.items()) if index not in self._targets}
            self._views.add(dict(zip(self.inputs, operands)), shown)
        return copies | results

    def _program(self, operands: Tensors) -> Program:
        interpreter = Interpreter(self._opset, self._device, traced=self._execution is not Execution.NODES)
        plans: list[Overwrites] = []
        try:
            compute = self._compiled(self._computed(interpreter, plans), operands)
        except _UNTRACEABLE:
            compute = self._computed(Interpreter(self._opset, self._device, traced=False), plans)

        def run(*operands: torch.Tensor) -> list[torch.Tensor]:
            results = [*compute(*operands)]
            for index in plans[-1].cloned:
                results[index] = results[index].clone()
            for index, operand in plans[-1].after_program:
                results[index] = operands[operand].copy_(results[index])
            return results

        return run

    def _compiled(self, compute: Program, operands: Tensors) -> Program:
        if self._execution is Execution.NODES:
            return compute
        module = make_fx(compute, tracing_mode="fake", _allow_non_fake_inputs=True)(*operands)
        module.graph.eliminate_dead_code()
        module.recompile()
        if self._execution is Execution.COMPILED:
            return compiled(module, operands)
        return module

    def _computed(self, interpreter: Interpreter, plans: list[Overwrites]) -> Program:
        """The nodes, and the stores within the program; ``plans`` gets all stores, in each run and in a trace."""

        def compute(*operands: torch.Tensor) -> list[torch.Tensor]:
            scope = Scope(dict(zip(self.inputs, operands, strict=True)), {})
            results = interpreter.run(self._body, scope)
            plan = plan_overwrites(
                results, operands, targets=self._targets, surviving=self._surviving,
                fixed={index for index, name in enumerate(self.outputs) if name in scope.fixed},
            )  # fmt: skip
            plans[:] = [plan]
            for index, operand in plan.in_program:
                results[index] = operands[operand].copy_(results[index])
            return results

        return compute


class TorchCopies:
    """Copies between the memory of a device and of the host, started in turn."""

    overwrites: frozenset[str] = frozenset()

    def __init__(self, step: CopyStep, link: HostLink) -> None:
        self.inputs, self.outputs = step.inputs, step.outputs
        down = step.op_type == TO_HOST
        self.title = f"copies of {len(step.inputs)} to the {'host' if down else 'device'}"
        self._move = link.to_host if down else link.to_device

    def run(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {new: self._move(values[old]) for old, new in zip(self.inputs, self.outputs)}


class TorchTuning(NoTuning):
    """New states overwrite old states without further readers."""

    def __init__(self, device: TorchDevice) -> None:
        self._device = device

    def split(self, segment: Segment, types: Mapping[str, TensorType]) -> Sequence[OverwritingSegment]:
        return [OverwritingSegment(segment, segment.inputs)]

    def compile_run(
        self, run: OverwritingSegment, aliases: Mapping[str, str], graph: Graph, types: dict[str, TensorType],
        cache: SessionCache, views: BufferViews,
    ) -> TorchSegment:  # fmt: skip
        return self._device.segment(run.segment, graph, aliases)


class TorchSessions(SessionCache):
    """A cache without sessions: a segment has programs instead."""

    def __init__(self, device: TorchDevice) -> None:
        super().__init__()
        self.device = device


class TorchDevice:
    """A device of PyTorch: values and views are tensors. ``link``: to the memory of the host, if that is another."""

    emulates_half = False

    def __init__(self, name: str = "cpu", execution: Execution = Execution.TRACE, link: HostLink | None = None) -> None:
        self.torch_device, self._execution, self._link = torch.device(name), execution, link
        self.has_host = link is not None
        self.tuning: Tuning = TorchTuning(self)
        self._views = StateViews()

    def sessions(self) -> SessionCache:
        return TorchSessions(self)

    def to_device(self, shown: Any) -> torch.Tensor:
        tensor = shown if isinstance(shown, torch.Tensor) else tensor_over(shown)
        return tensor.to(self.torch_device)

    def hold(self, shown: Any) -> torch.Tensor:
        """A copy, for steps to overwrite."""
        tensor = shown if isinstance(shown, torch.Tensor) else tensor_over(shown)
        return tensor.to(self.torch_device, copy=True)

    def hold_on_host(self, shown: Any) -> torch.Tensor:
        tensor = shown if isinstance(shown, torch.Tensor) else tensor_over(shown)
        return self.hold(tensor) if self._link is None else self._link.pin(tensor)

    def view(self, value: torch.Tensor) -> Any:
        return value if self._link is None else self._link.arrive(value)

    def to_host(self, shown: Any) -> Array:
        if self._link is not None:
            self._link.settle()
        return array_over(shown.cpu()) if isinstance(shown, torch.Tensor) else shown

    def assign_buffers(self, graph: Graph, replaces: Mapping[str, str], member: MemberIndex | None) -> BufferAssignment:
        return BufferAssignment(graph)

    def allocate_buffers(self, assignment: BufferAssignment, shared: SharedMemory) -> Buffers:
        return Buffers()

    def compile_segment(
        self, segment: Segment, graph: Graph, types: dict[str, TensorType], cache: SessionCache,
        views: Mapping[str, Sequence[Any]] | None, persistent: Mapping[str, Any],
    ) -> TorchSegment:  # fmt: skip
        return self.segment(segment, graph)

    def segment(self, segment: Segment, graph: Graph, aliases: Mapping[str, str] = NOTHING) -> TorchSegment:
        """A segment, with results over the operands that ``aliases`` gives them."""
        if segment.on_host:
            return TorchSegment(segment, graph, torch.device("cpu"), Execution.TRACE, aliases, self._views, self._link)
        return TorchSegment(segment, graph, self.torch_device, self._execution, aliases, self._views, self._link)

    def compile_copy(self, step: CopyStep) -> TorchCopies:
        """Copies over the link."""
        assert self._link is not None
        return TorchCopies(step, self._link)


class TorchHost(TorchDevice):
    """The host: views are arrays over the memory of tensors, so that any engine makes the calls."""

    def view(self, value: torch.Tensor) -> Array:
        return array_over(value)


def use_deterministic() -> None:
    """Compute by deterministic algorithms alone from now on, in this process, before the first work on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def device_of_rank(compiled: bool | None = None, name: str | None = None) -> TorchDevice:
    """The device of this process. ``name``: ``cpu``, ``cuda`` or ``cuda:N``; None: a GPU where there is one, by the
    process's place on its machine. ``compiled``: whether Inductor compiles segments; None: on GPUs. Raises OptionError
    for a device that is not there."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:  # an unknown name
        device = torch.device("meta")
    if (device.index or 0) >= {"cpu": 1, "cuda": torch.cuda.device_count()}.get(device.type, 0):
        raise OptionError(f"there is no device {name}", "take cpu, or install a PyTorch that sees the GPU")
    if device.type == "cuda":
        index = local_rank() % torch.cuda.device_count() if device.index is None else device.index
        torch.cuda.set_device(device := torch.device("cuda", index))
    execution = Execution.COMPILED if (device.type == "cuda" if compiled is None else compiled) else Execution.TRACE
    return TorchDevice(str(device), execution, PinnedLink(device) if device.type == "cuda" else None)
