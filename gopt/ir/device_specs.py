"""Device configurations and sharding specs of a file (ONNX IR 11): read, appended to nodes, taken off them.

``onnx.checker`` ignores specs, so everything is checked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import ModelProto, NodeDeviceConfigurationProto, NodeProto, ShardingSpecProto

from gopt.errors import InputError
from gopt.ir.external_data import show
from gopt.ir.graph import Graph, Node
from gopt.ir.model_file import refill
from gopt.ir.symbol_table import text
from gopt.ir.wire_format import field

IR_VERSION = 11
"""The first version of the format that has them."""
OWN = "gopt:"
"""Prefix of the device configurations that gopt writes: ``gopt:dp=2,tp=4``."""
_SPECS = NodeProto.DEVICE_CONFIGURATIONS_FIELD_NUMBER


@dataclass(frozen=True, slots=True)
class ShardedDim:
    """A dimension of a tensor, seen as a product of ``factors``: (elements, shards), outermost first. Elements are None
    for a symbol or nothing in the file."""

    axis: int
    factors: tuple[tuple[int | None, int], ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Sharding spec of a value of a node. ``groups``: for each shard in order, the devices with the shard."""

    tensor: str
    node: str
    groups: tuple[tuple[int, ...], ...]
    dims: tuple[ShardedDim, ...]

    @property
    def devices(self) -> frozenset[int]:
        """All devices with a part."""
        return frozenset(device for group in self.groups for device in group)


@dataclass(frozen=True, slots=True)
class Configuration:
    """A device configuration with the nodes' specs for it; ``stages``: nodes naming a pipeline stage."""

    name: str
    devices: int
    specs: tuple[TensorSpec, ...] = ()
    stages: int = 0


def read_configurations(graph: Graph) -> list[Configuration]:
    """The device configurations of a file in order, with the specs; [] at once for a file of an older version.

    Raises InputError for violations of the format: a missing or repeated name, a spec for an unknown configuration,
    value, axis or device.
    """
    devices: dict[str, int] = {}
    for conf in graph.header.configuration:
        if not text(conf.name) or conf.name in devices:
            raise InputError(f"the device configuration {show(conf.name)} has no name of its own")
        if conf.num_devices < 1 or len(conf.device) not in (0, conf.num_devices):
            raise InputError(
                f"device configuration {show(conf.name)} says {conf.num_devices} devices and names {len(conf.device)}"
            )
        devices[conf.name] = conf.num_devices
    specs: dict[str, list[TensorSpec]] = {name: [] for name in devices}
    stages = dict.fromkeys(devices, 0)
    may_have = devices or graph.header.ir_version >= IR_VERSION
    for node in graph.file_nodes or graph.nodes if may_have else ():
        for entry in _entries(node):
            if text(entry.configuration_id) not in devices:
                raise InputError(
                    f"node {show(node.label)} has a device configuration {show(entry.configuration_id)}, which the "
                    "model does not have"
                )
            stages[entry.configuration_id] += entry.HasField("pipeline_stage")
            count = devices[entry.configuration_id]
            specs[entry.configuration_id] += [_spec(spec, node, graph, count) for spec in entry.sharding_spec]
    return [Configuration(name, count, tuple(specs[name]), stages[name]) for name, count in devices.items()]


def read_stages(graph: Graph) -> dict[str, int]:
    """First output of a node -> its pipeline stage in the file, for nodes with one.

    Raises InputError for a node with two stages, or with a negative one."""
    stages: dict[str, int] = {}
    for node in graph.nodes if graph.header.ir_version >= IR_VERSION else ():
        named = {entry.pipeline_stage for entry in _entries(node) if entry.HasField("pipeline_stage")}
        if len(named) > 1 or min(named, default=0) < 0:
            raise InputError(
                f"node {show(node.label)} is of the pipeline stages {', '.join(map(str, sorted(named)))}",
                "a node has one stage, counted from 0",
            )
        stages.update((node.first_output, stage) for stage in named)
    return stages


def _entries(node: Node) -> Sequence[NodeDeviceConfigurationProto]:
    # The tag of the field is one byte: most nodes need not be parsed.
    if node.encoded is None or _tag() not in node.encoded:
        return ()
    proto = node.proto
    return () if proto is None else proto.device_configurations


def _tag() -> bytes:
    return field(_SPECS, b"")[:1]


def _spec(proto: ShardingSpecProto, node: Node, graph: Graph, devices: int) -> TensorSpec:
    name = text(proto.tensor_name)
    where = f"the sharding spec of {show(name)} in node {show(node.label)}"
    if name not in (*node.inputs, *node.outputs) or not name:
        raise InputError(f"{where}: the node has no such value")
    named = {entry.key: tuple(entry.value) for entry in proto.index_to_device_group_map}
    groups = tuple(named.get(device, (device,)) for device in proto.device)
    for device in (device for group in groups for device in group):
        if not 0 <= device < devices:
            raise InputError(f"{where} names device {device}: there are {devices}")
    if not groups or not all(groups):
        raise InputError(f"{where} names no device")
    shape, dims = graph.type_of(name).shape, []
    for dim in proto.sharded_dim:
        rank = None if shape is None else len(shape)
        if rank is not None and not -rank <= dim.axis < rank:
            raise InputError(f"{where} has axis {dim.axis}: the value has {rank} dimensions")
        factors = tuple(
            (part.dim_value if part.HasField("dim_value") else None, part.num_shards) for part in dim.simple_sharding
        )
        if any(shards < 1 or (size is not None and size < 1) for size, shards in factors):
            raise InputError(f"{where} divides axis {dim.axis} into {[shards for _, shards in factors]} shards")
        dims.append(ShardedDim(dim.axis % rank if rank else dim.axis, factors))
    if len({dim_spec.axis for dim_spec in dims}) < len(dims):
        raise InputError(f"{where} names an axis twice")
    return TensorSpec(name, node.label, groups, tuple(dims))


# --- writing --------------------------------------------------------------------------------------------------------


def spec_message(spec: TensorSpec) -> ShardingSpecProto:
    """Convert a record to the protobuf message; groups of several devices are numbered -1, -2, ... in the map."""
    proto = ShardingSpecProto(tensor_name=spec.tensor)
    for number, group in enumerate(spec.groups, 1):
        if len(group) == 1:
            proto.device.append(group[0])
        else:
            proto.device.append(-number)
            proto.index_to_device_group_map.add(key=-number, value=group)
    for dim in spec.dims:
        dim_proto = proto.sharded_dim.add(axis=dim.axis)
        for size, shards in dim.factors:
            part = dim_proto.simple_sharding.add(num_shards=shards)
            if size is not None:
                part.dim_value = size
    return proto


def with_specs(node: Node, specs: Mapping[str, Sequence[TensorSpec]], dropped: Iterable[str] = ()) -> bytes:
    """Return a serialized node with specs, by configuration; specs of ``dropped`` configurations are left out."""
    gone, data = set(dropped), node.to_bytes()
    if any(entry.configuration_id in gone for entry in _entries(node)):
        proto = NodeProto.FromString(data)
        refill(
            proto.device_configurations,
            [entry for entry in proto.device_configurations if entry.configuration_id not in gone],
        )
        data = proto.SerializeToString(deterministic=True)
    for name, entries in specs.items():
        entry = NodeDeviceConfigurationProto(configuration_id=name, sharding_spec=map(spec_message, entries))
        data += field(_SPECS, entry.SerializeToString(deterministic=True))
    return data


def without_specs(data: bytes) -> bytes:
    """Return a serialized node without the device specs; a rank's file is a program of one device."""
    if _tag() not in data:
        return data
    proto = NodeProto.FromString(data)
    if not proto.device_configurations:
        return data
    proto.ClearField("device_configurations")
    bare: bytes = proto.SerializeToString(deterministic=True)
    return bare


def drop_configurations(header: ModelProto) -> None:
    """Take device configurations off a model without a graph, and the specs off its functions."""
    header.ClearField("configuration")
    for function in header.functions:
        for node in function.node:
            node.ClearField("device_configurations")


def add_configuration(header: ModelProto, name: str, devices: Sequence[str]) -> None:
    """Add a device configuration to a model, replacing a configuration of the same name."""
    refill(header.configuration, [config for config in header.configuration if config.name != name])
    header.configuration.append(
        onnx.DeviceConfigurationProto(name=name, num_devices=len(devices), device=list(devices))
    )
    header.ir_version = max(header.ir_version, IR_VERSION)
