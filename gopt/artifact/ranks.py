"""A file per rank and phase; common content is turned into bytes once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import count

import onnx
from onnx import TensorProto, ValueInfoProto

from gopt import limits
from gopt.artifact.integrity import Inventory
from gopt.artifact.serialize import external_tensor, named_tensor
from gopt.artifact.states_file import StatesFile
from gopt.collectives.messages import AGGREGATE_ROWS
from gopt.documents.torch_record import KEY as TORCH_NAMES
from gopt.errors import OptionError
from gopt.ir.device_specs import drop_configurations, without_specs
from gopt.ir.graph import COMM
from gopt.ir.opaque.function_export import prepare
from gopt.ir.tensor import Tensor
from gopt.ir.type_proto import encoded_values, value_info
from gopt.ir.wire_format import field, head
from gopt.lower.phases import STEP, LoweredPhase
from gopt.lower.rank_graph import RankBlock, RankGraph, RankState, alike
from gopt.spmd.program import SpmdProgram
from gopt.system.progress import ProgressCallback, no_progress


def write_ranks(
    files: Inventory,
    program: SpmdProgram,
    values: StatesFile,
    common: Sequence[RankState],
    ranks: Sequence[RankGraph],
    names: RankFiles | None = None,
    advance: ProgressCallback = no_progress,
) -> None:
    """Write a file per rank and phase. Raises OSError."""
    names = names or RankFiles()
    writers: dict[int, _RankWriter] = {}
    for rank in ranks:
        if id(rank.phase) not in writers:
            writers[id(rank.phase)] = _RankWriter(program.of(rank.rank), rank.phase, values, common, names)
    _check_bytes(ranks, writers)
    written = count(1)
    for twins in alike(ranks):
        graph = writers[id(twins[0].phase)].graph_of(twins[0])
        for rank in twins:
            with files.create(names.of(rank.rank, rank.phase)) as file:
                file.writelines([*writers[id(rank.phase)].front(rank, graph), graph])
            advance("writing files of ranks", next(written), len(ranks))
    for name in (names.of(rank.rank, rank.phase) for rank in ranks):
        files.files[name] = files.files.pop(name)


def write_kinds(
    files: Inventory, program: SpmdProgram, values: StatesFile, common: Sequence[RankState],
    ranks: Mapping[int, Sequence[RankGraph]],
) -> dict[int, dict[str, str]]:  # fmt: skip
    """Write a file for each kind of graphs; returns, by rank, phase -> file. ``ranks``: the kinds, by rank. Ranks of a
    kind differ in the numbers of peers, and in the manifest's pieces of states. Raises OSError."""
    names, writers = KindFiles(), dict[int, _RankWriter]()
    name_of: dict[Hashable, str] = {}
    file_of: dict[int, str] = {}
    for number, parts in ranks.items():
        for part in parts:
            if part.kind in file_of:
                continue
            if id(part.phase) not in writers:
                writers[id(part.phase)] = _RankWriter(program.of(number), part.phase, values, common, names)
            writer = writers[id(part.phase)]
            local = writer.local(part)
            key = id(part.phase), tuple(map(id, part.blocks)), local
            if key not in name_of:
                name_of[key] = f"kind_{len(name_of):04d}.{part.phase.name}.onnx"
                graph = writer.graph_of(part)
                with files.create(name_of[key]) as file:
                    file.writelines([*writer.front(part, graph), graph])
            file_of[part.kind] = name_of[key]
    return {number: {part.phase.name: file_of[part.kind] for part in parts} for number, parts in ranks.items()}


def _check_bytes(ranks: Sequence[RankGraph], writers: Mapping[int, _RankWriter]) -> None:
    """Raise OptionError for too many bytes, before any is written: the files of a phase are about as large."""
    firsts = {id(rank.phase): rank for rank in reversed(ranks)}
    sizes = {phase: len(writers[phase].graph_of(rank)) for phase, rank in firsts.items()}
    total = sum(sizes[id(rank.phase)] for rank in ranks)
    if total > limits.RANK_FILES:
        raise OptionError(
            f"the graphs of {len(ranks)} files of ranks take {total} bytes, more than {limits.RANK_FILES} (RANK_FILES)",
            "give the ranks a mesh of two axes, such as --mesh dp=64,shard=1024, or write some with --only-ranks",
            limits.hint("RANK_FILES", total),
        )


@dataclass(frozen=True, slots=True)
class RankFiles:
    """Names and metadata of rank files: ``role`` and a number, unless ``alone``."""

    role: str = "rank"
    alone: bool = False

    def of(self, rank: int, phase: LoweredPhase) -> str:
        """The file of a phase of a rank."""
        stem = self.role if self.alone else f"{self.role}_{rank:04d}"
        return f"{stem}.onnx" if phase.name == STEP else f"{stem}.{phase.name}.onnx"

    def metadata(self, program: SpmdProgram, rank: int) -> dict[str, str]:
        """Entries of a file's metadata."""
        if self.role == "rank":
            return {"gopt.format": "gopt-rank/1", "gopt.mesh": str(program.mesh), "gopt.rank": str(rank)}
        entries = {"gopt.format": "gopt-rank/1", "gopt.role": self.role}
        return entries if self.alone else entries | {"gopt.server": str(rank)}


class KindFiles(RankFiles):
    """Files of several ranks together."""

    def metadata(self, program: SpmdProgram, rank: int) -> dict[str, str]:
        return {"gopt.format": "gopt-rank/1", "gopt.mesh": str(program.mesh)}


def rank_file(rank: int, phase: LoweredPhase) -> str:
    return RankFiles().of(rank, phase)


class _RankWriter:
    """Builds rank files from parts that are serialised once: a protobuf message is the sum of the fields."""

    def __init__(
        self,
        program: SpmdProgram,
        phase: LoweredPhase,
        values: StatesFile,
        common: Sequence[RankState],
        names: RankFiles,
    ) -> None:
        self.program, self.values, self.graph, self.names = program, values, phase.graph, names
        self._blocks: dict[RankBlock, bytes] = {}
        """The bytes of blocks that several ranks may have."""
        graph, types = phase.graph, program.training.graph.types
        header = deepcopy(graph.header)
        header.ClearField("graph")
        for index in [at for at, prop in enumerate(header.metadata_props) if prop.key == TORCH_NAMES]:
            del header.metadata_props[index]  # of the whole step, and long
        self._described = bool(header.configuration)  # specs are of the whole step; a rank's file is of one device
        drop_configurations(header)
        if not any(opset.domain == COMM for opset in header.opset_import):
            header.opset_import.append(onnx.helper.make_opsetid(COMM, 1))
        self._header = header
        body = onnx.GraphProto(name=graph.name)
        types_in = {state.input: state.type for state in common if state.input in graph.inputs}
        fed = [name for name in (*program.training.batch, *program.training.hyper) if name in graph.inputs]
        frozen = [name for name in program.training.graph.inputs if name in graph.initializers]
        inputs = {name: types[name] for name in (*fed, *frozen)} | types_in
        shown = [name for name in program.training.shown if name in graph.outputs]
        outputs = {name: types[name] for name in shown}
        outputs |= {state.output: state.type for state in common if state.output in graph.outputs}
        borders = []
        for number, given_names, table in (
            (11, program.training.graph.inputs, inputs),
            (12, program.training.graph.outputs, outputs),
        ):
            # What the source has keeps the source's order; what a pass made comes behind it.
            order = {name: number for number, name in enumerate(given_names)}
            names_in_order = sorted(table, key=lambda name: order.get(name, len(order)))
            borders.append(encoded_values(number, {name: table[name] for name in names_in_order}))
        used = graph.used().union(frozen)
        for name, tensor in graph.initializers.items():
            if name in used:
                body.initializer.append(self._constant(name, tensor))
        for state in common:
            if state.input in types_in and state.pieces[0].tensor in values.offset:
                body.initializer.append(self._initial(state))
        results = onnx.GraphProto(value_info=self._opaque())
        parts = [body.SerializeToString(deterministic=True), *borders, results.SerializeToString(deterministic=True)]
        self._body = b"".join(parts)

    def _opaque(self) -> Iterator[ValueInfoProto]:
        """Types beyond standard rules: whole results of calls and unknown operators."""
        types, parts = self.graph.types, self.program.sharded
        for node in self.graph.nodes:
            if node.domain not in ("", "ai.onnx"):
                open_rows = node.domain == COMM and node.op_type == AGGREGATE_ROWS.name
                for name in node.outputs:
                    if name not in types or name in parts or name in self.graph.outputs:
                        continue
                    if types[name].static or open_rows:
                        yield value_info(name, types[name])

    def _constant(self, name: str, tensor: Tensor) -> TensorProto:
        if name in self.values.offset:
            return external_tensor(name, tensor.type, self.values.offset[name])
        return named_tensor(name, tensor)

    def _initial(self, state: RankState) -> TensorProto:
        return external_tensor(state.input, state.type, self.values.start_of(state))

    def _block(self, block: RankBlock) -> bytes:
        data = self._blocks.get(block)
        if data is None:
            encoded: Iterator[bytes] = (node.to_bytes() for node in block.nodes)
            encoded = map(without_specs, encoded) if self._described else encoded
            data = self._blocks[block] = b"".join(field(1, node_bytes) for node_bytes in encoded)
        return data

    def graph_of(self, rank: RankGraph) -> bytes:
        """The graph in the file of a rank, and of all that have its content."""
        return b"".join([*map(self._block, rank.blocks), self._body, self.local(rank)])

    def local(self, rank: RankGraph) -> bytes:
        """The inputs, outputs, stored values and types of some ranks alone."""
        local = onnx.GraphProto()
        for state in rank.own:
            if state.input in self.graph.inputs:
                local.input.append(value_info(state.input, state.type))
            if state.output in self.graph.outputs:
                local.output.append(value_info(state.output, state.type))
        for local_state in rank.states:
            if local_state.input in self.graph.inputs and self.values.has(local_state):
                local.initializer.append(self._initial(local_state))
        for name in sorted(rank.constants):
            local.initializer.append(onnx.numpy_helper.from_array(rank.constants[name], name))
        borders = {name for sums in rank.accumulators for name in (sums.input, sums.output)}
        borders.update(value.input for value in rank.saved)
        for name in sorted(rank.types):
            if name not in rank.constants and name not in borders:
                local.value_info.append(value_info(name, rank.types[name]))
        data: bytes = local.SerializeToString(deterministic=True)
        return data

    def front(self, rank: RankGraph, graph: bytes) -> tuple[bytes, bytes]:
        """The bytes before ``graph`` in the file of a rank."""
        header = deepcopy(self._header)
        for key, value in self.names.metadata(self.program, rank.rank).items():
            entry = header.metadata_props.add()
            entry.key, entry.value = key, value
        prepare(header, rank.functions)
        return header.SerializeToString(deterministic=True), head(7, len(graph))
