"""Sharding specs of ONNX IR 11 on fixtures, made as a user would make them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from helpers import FIXTURES
from onnx import ModelProto

Factors = Sequence[tuple[int | None, int]]


def model(name: str = "mlp_sgd", *, ir: int = 11, **devices: int) -> ModelProto:
    """A fixture with device configurations: name -> number of devices."""
    found = onnx.load(FIXTURES / f"{name}.onnx")
    found.ir_version = ir
    for each, count in devices.items():
        found.configuration.add(name=each, num_devices=count)
    return found


def say(
    model: ModelProto, tensor: str, dims: dict[int, Factors], *, devices: Sequence[int] = (0, 1), node: str = "",
    configuration: str = "two", groups: dict[int, Sequence[int]] | None = None,
) -> ModelProto:  # fmt: skip
    """Let the first node that has a value (or that makes the value ``node``) say how it is sharded."""
    found = next(each for each in model.graph.node if (node or tensor) in (*(() if node else each.input), *each.output))
    entry = found.device_configurations.add(configuration_id=configuration)
    spec = entry.sharding_spec.add(tensor_name=tensor, device=devices)
    for key, group in (groups or {}).items():
        spec.index_to_device_group_map.add(key=key, value=group)
    for axis, factors in dims.items():
        dim = spec.sharded_dim.add(axis=axis)
        for size, shards in factors:
            part = dim.simple_sharding.add(num_shards=shards)
            if size is not None:
                part.dim_value = size
    return model


def save(model: ModelProto, folder: Path) -> Path:
    """The file of a model, which ``onnx.checker`` accepts."""
    onnx.checker.check_model(model, full_check=True)
    path = folder / "step.onnx"
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path
