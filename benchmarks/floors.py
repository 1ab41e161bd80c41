"""What no tool can beat: load a model and save it once per rank, untouched.

``python benchmarks/floors.py raw|ir MODEL FOLDER RANKS``, through protobuf alone or through onnx-ir.
"""

from __future__ import annotations

import sys
from pathlib import Path


def raw(model: Path, folder: Path, ranks: int) -> None:
    from onnx import ModelProto

    proto = ModelProto.FromString(model.read_bytes())
    for rank in range(ranks):
        (folder / f"rank_{rank:04d}.onnx").write_bytes(proto.SerializeToString())


def ir(model: Path, folder: Path, ranks: int) -> None:
    import onnx_ir

    loaded = onnx_ir.load(model)
    for rank in range(ranks):
        onnx_ir.save(loaded, folder / f"rank_{rank:04d}.onnx")


if __name__ == "__main__":
    way, source, target, count = sys.argv[1:]
    Path(target).mkdir(parents=True, exist_ok=True)
    {"raw": raw, "ir": ir}[way](Path(source), Path(target), int(count))
