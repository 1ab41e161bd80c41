"""Write the output folder: rank graphs, values once, manifest and report; whole or not at all (contract section 4)."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, ValueInfoProto

from gopt.analysis.spmd import Step
from gopt.errors import InputError, OptionError, RunError
from gopt.graph.model import COMM, Graph, Node, Tensor, value_info
from gopt.graph.scope import OWN
from gopt.graph.types import TensorType, dtype_code, nbytes
from gopt.phases import STEP, Phase
from gopt.seal import whole_steps
from gopt.sources.written import prepare, source_nodes
from gopt.specialise import RankGraph, RankState

VALUES = "states.bin"
SOURCE = "source.onnx"
INLINE = 1024
"""Constants of at most so many bytes stay inside the graphs."""
ALIGN = 64
CHUNK = 1 << 24


@contextmanager
def output_folder(target: Path, *, force: bool) -> Iterator[Path]:
    """A temporary sibling of ``target`` that takes its place when the block ends well, and vanishes otherwise.

    Raises OptionError when the target exists and ``force`` is not given, RunError when it cannot be written.
    """
    if target.exists() and not force:
        raise OptionError(f"{target} exists already", "choose another folder with -o, or replace it with --force")
    if whole_steps(target):
        raise OptionError(f"{target} holds checkpoints: --force does not replace them", "choose another with -o")
    if target.exists() and not _is_ours(target):
        raise OptionError(f"{target} is nothing that gopt wrote: --force does not replace it", "choose another with -o")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise RunError(f"cannot write beside {target}: {error.strerror}", "choose another folder with -o") from error
    try:
        yield draft
        draft.chmod(0o755)
        _replace(draft, target)
    except OSError as error:
        what = "the target is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error.strerror)
        raise RunError(f"cannot write {target}: {what}", "nothing was left behind") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _is_ours(target: Path) -> bool:
    """Whether this is an output folder, or an empty one."""
    return target.is_dir() and ((target / "manifest.json").is_file() or not any(target.iterdir()))


def _replace(draft: Path, target: Path) -> None:
    if not target.exists():
        draft.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(old / "old")
    try:
        draft.rename(target)
    except OSError:
        (old / "old").rename(target)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


class Values:
    """``states.bin``: every value once, in the order ranks read them; knows where each tensor starts."""

    def __init__(self) -> None:
        self.offset: dict[str, int] = {}
        self._order: list[tuple[str, Tensor, int]] = []
        self.size = 0

    def add(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Put tensors one after the other, without a gap, on an aligned start."""
        if not tensors:
            return
        self.size += -self.size % ALIGN
        for name, tensor in tensors:
            self._order.append((name, tensor, self.size))
            self.offset[name] = self.size
            self.size += tensor.nbytes

    def write(self, path: Path) -> None:
        if not self._order:
            return
        with path.open("wb") as file:
            for _, tensor, offset in self._order:
                file.write(b"\0" * (offset - file.tell()))
                for chunk in _chunks(tensor):
                    file.write(chunk)


def _chunks(tensor: Tensor) -> Iterator[bytes | memoryview]:
    if tensor.parts:
        for part in tensor.parts:
            yield from _chunks(part)
    elif tensor.path and tensor.nbytes:
        with open(tensor.path, "rb") as file:
            file.seek(tensor.offset)
            left = tensor.nbytes
            while left:
                chunk = file.read(min(left, CHUNK))
                if not chunk:
                    raise RunError(f"{tensor.path} ended while it was read")
                left -= len(chunk)
                yield chunk
    elif tensor.proto is not None and tensor.proto.HasField("raw_data"):
        yield tensor.proto.raw_data
    else:
        yield np.ascontiguousarray(tensor.numpy()).tobytes()


def plan_values(step: Step) -> Values:
    """Where every stored value goes: the buckets' states in bucket order, then the others whole."""
    source = step.training.graph
    values = Values()
    placed: set[str] = set()
    for names in step.layout:
        held = [(name, source.initializers[name]) for name in names if name in source.initializers]
        if held and len(held) < len(names):
            missing = next(name for name in names if name not in source.initializers)
            raise InputError(
                f"state {held[0][0]!r} has a value and {missing!r} has none, and ranks hold both as one tensor",
                "give values to all of them with --state FILE, or to none",
            )
        values.add(held)
        placed.update(name for name, _ in held)
    states = {state.tensor for state in step.training.states}
    for name, tensor in source.initializers.items():
        if name not in placed and (name in states or tensor.nbytes > INLINE):
            values.add([(name, tensor)])
    for parameter, copy in step.copies().items():
        if parameter in source.initializers:
            type = TensorType(copy.dtype, source.types[parameter].shape)
            values.add([(copy.input, Tensor(type, wide=source.initializers[parameter]))])
    return values


def write_ranks(
    folder: Path, step: Step, values: Values, common: Sequence[RankState], ranks: Iterable[RankGraph]
) -> dict[str, int]:
    """Write one file per rank and phase; returns bytes by file. What all ranks share is turned into bytes once."""
    writers: dict[str, _RankWriter] = {}
    sizes = {}
    for rank in ranks:
        if rank.phase.name not in writers:
            writers[rank.phase.name] = _RankWriter(step, rank.phase, values, common)
        data = writers[rank.phase.name].model(rank)
        name = rank_file(rank.rank, rank.phase)
        (folder / name).write_bytes(data)
        sizes[name] = len(data)
    return sizes


def rank_file(rank: int, phase: Phase) -> str:
    return f"rank_{rank:04d}.onnx" if phase.name == STEP else f"rank_{rank:04d}.{phase.name}.onnx"


class _RankWriter:
    """Builds rank files from parts that are serialised once: a protobuf message is the sum of its fields."""

    def __init__(self, step: Step, phase: Phase, values: Values, common: Sequence[RankState]) -> None:
        self.step, self.values, self.graph = step, values, phase.graph
        self._nodes: dict[int, bytes] = {}
        graph, types = phase.graph, step.training.graph.types
        self._spmd = {id(node) for node in graph.nodes}
        header = onnx.ModelProto()
        header.CopyFrom(graph.header)
        header.ClearField("graph")
        if not any(opset.domain == COMM for opset in header.opset_import):
            header.opset_import.append(onnx.helper.make_opsetid(COMM, 1))
        self._header = header
        body = onnx.GraphProto(name=graph.name)
        held = {state.input: state.type for state in common if state.input in graph.inputs}
        given = [name for name in (*step.training.batch, *step.training.hyper) if name in graph.inputs]
        frozen = [name for name in step.training.graph.inputs if name in graph.initializers]
        inputs = {name: types[name] for name in (*given, *frozen)} | held
        shown = [name for name in (step.training.loss, *step.training.metrics) if name in graph.outputs]
        outputs = {name: types[name] for name in shown}
        outputs |= {state.output: state.type for state in common if state.output in graph.outputs}
        for names, table, border in (
            (step.training.graph.inputs, inputs, body.input),
            (step.training.graph.outputs, outputs, body.output),
        ):
            # What the source has keeps the source's order; what a pass made comes behind it.
            order = {name: place for place, name in enumerate(names)}
            for name in sorted(table, key=lambda name: order.get(name, len(order))):
                border.append(value_info(name, table[name]))
        used = {name for node in graph.nodes for name in node.reads} | set(given) | set(frozen)
        used.update(graph.outputs)
        for name, tensor in graph.initializers.items():
            if name in used:
                body.initializer.append(self._constant(name, tensor))
        for state in common:
            if state.input in held and state.pieces[0].tensor in values.offset:
                body.initializer.append(self._initial(state))
        body.value_info.extend(self._opaque())
        self._body = body.SerializeToString(deterministic=True)

    def _opaque(self) -> Iterator[ValueInfoProto]:
        """Types that no standard rule can infer: what calls and unknown operators make."""
        types = self.graph.types
        for node in self.graph.nodes:
            if node.domain not in ("", "ai.onnx"):
                for name in node.outputs:
                    if name in types and types[name].static and name not in self.graph.outputs:
                        yield value_info(name, types[name])

    def _constant(self, name: str, tensor: Tensor) -> TensorProto:
        if name in self.values.offset:
            return external(name, tensor.type, self.values.offset[name])
        return named_tensor(name, tensor)

    def _initial(self, state: RankState) -> TensorProto:
        piece = state.pieces[0]
        start = self.values.offset[state.stored] + nbytes(state.type.dtype, piece.start)
        return external(state.input, state.type, start)

    def _node(self, node: Node) -> bytes:
        data = self._nodes.get(id(node))
        if data is None:
            data = _field(1, node.to_proto().SerializeToString(deterministic=True))
            if id(node) in self._spmd:
                self._nodes[id(node)] = data
        return data

    def model(self, rank: RankGraph) -> bytes:
        own = onnx.GraphProto()
        for state in rank.own:
            if state.input in self.graph.inputs:
                own.input.append(value_info(state.input, state.type))
            if state.output in self.graph.outputs:
                own.output.append(value_info(state.output, state.type))
        for held in rank.states:
            if held.input in self.graph.inputs and held.stored in self.values.offset:
                own.initializer.append(self._initial(held))
        for name in sorted(rank.constants):
            own.initializer.append(onnx.numpy_helper.from_array(rank.constants[name], name))
        borders = {name for each in rank.sums for name in (each.input, each.output)}
        for name in sorted(rank.types):
            if name not in rank.constants and name not in borders:
                own.value_info.append(value_info(name, rank.types[name]))
        nodes = b"".join(map(self._node, rank.nodes))
        graph = nodes + self._body + own.SerializeToString(deterministic=True)
        header = onnx.ModelProto()
        header.CopyFrom(self._header)
        entries = {"gopt.format": "gopt-rank/1", "gopt.mesh": str(self.step.mesh), "gopt.rank": str(rank.rank)}
        for key, value in entries.items():
            entry = header.metadata_props.add()
            entry.key, entry.value = key, value
        prepare(header, rank.functions)
        head: bytes = header.SerializeToString(deterministic=True)
        return head + _field(7, graph)


def _field(number: int, payload: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return bytes([number << 3 | 2]) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def external(name: str, type: TensorType, offset: int, location: str = VALUES) -> TensorProto:
    """A tensor whose bytes lie in a file beside the model."""
    tensor = TensorProto(name=name, data_type=dtype_code(type.dtype), dims=type.dims)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(type.nbytes))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return tensor


def named_tensor(name: str, tensor: Tensor) -> TensorProto:
    """A constant inside the graph, under its name."""
    if tensor.proto is not None and not tensor.external:
        proto = TensorProto()
        proto.CopyFrom(tensor.proto)
    else:
        proto = onnx.numpy_helper.from_array(np.ascontiguousarray(tensor.numpy()).reshape(tensor.type.dims))
    proto.name = name
    return proto


def source_model(step: Step, values: Values, roles: str) -> bytes:
    """The source graph without state values: what merge, reshard and verify start from. Roles travel as metadata."""
    source: Graph = step.training.graph
    states = {state.tensor for state in step.training.states}
    inputs = {**source.inputs, **{name: source.types[name] for name in sorted(states) if name not in source.inputs}}
    own = {name for name in source.initializers if name.startswith(OWN)}  # what the file does not have
    kept = {name: tensor for name, tensor in source.initializers.items() if name not in states | own}
    whole = replace(source, inputs=inputs, initializers=kept)
    metadata = {"gopt.format": "gopt-source/1", "gopt.roles": roles}
    return model_bytes(whole, values.offset, VALUES, metadata)


def model_bytes(graph: Graph, offsets: Mapping[str, int], location: str, metadata: Mapping[str, str]) -> bytes:
    """A graph as a model file; initializers that have an offset lie there in the file ``location``, all else inside."""
    body = onnx.GraphProto(name=graph.name)
    body.input.extend(value_info(name, type) for name, type in graph.inputs.items())
    body.output.extend(value_info(name, type) for name, type in graph.outputs.items())
    for name, tensor in graph.initializers.items():
        at = offsets.get(name)
        body.initializer.append(named_tensor(name, tensor) if at is None else external(name, tensor.type, at, location))
    nodes, functions = source_nodes(graph)
    body.node.extend(node.to_proto() for node in nodes)
    for node in nodes:
        if node.domain not in ("", "ai.onnx"):
            known = [name for name in node.outputs if graph.type_of(name).static]
            body.value_info.extend(value_info(name, graph.types[name]) for name in known)
    model = onnx.ModelProto()
    model.CopyFrom(graph.header)
    prepare(model, functions)
    model.graph.CopyFrom(body)
    for key, value in metadata.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Stable JSON that reads and diffs well: one line a key, and one line a record in a list of records."""
    path.write_text(_pretty(record) + "\n", encoding="utf-8")


def _pretty(record: Mapping[str, Any]) -> str:
    lines = []
    for key, value in record.items():
        if isinstance(value, dict):
            text = _pretty(value) if any(isinstance(each, list) and each for each in value.values()) else _line(value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(map(_line, value)) + "\n]"
        else:
            text = _line(value)
        lines.append(f"{_line(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
