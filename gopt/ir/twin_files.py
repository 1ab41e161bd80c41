"""Loads many files of a folder: a file is not checked whole if only stored values differ from an earlier file.

Files of ranks are alike but for the parts of states, so reading a folder takes time for the bytes, and not for checks
and inference of each file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

from onnx import GraphProto, TensorProto

from gopt.ir.external_data import DataFolder, naming
from gopt.ir.graph import Graph
from gopt.ir.graph_io import read_initializers
from gopt.ir.load import checked_graph, header_of, read_file
from gopt.ir.model_file import ModelFile
from gopt.ir.symbol_table import SymbolTable
from gopt.system.garbage import gc_paused

_KEPT = 64
"""Graphs that are held to compare with: where all files differ, memory stays bounded."""


class TwinFiles:
    """Reads gopt's own files, compared without values and without the metadata entries ``varying``.

    A twin has its own external values. Nodes, constants of the same sizes and types of inner values, which may follow
    from constants, come from the earlier file.
    """

    def __init__(self, varying: str) -> None:
        self.varying = varying
        self._seen: dict[Hashable, Graph] = {}

    def load(self, path: Path) -> Graph:
        """The graph in a file; raises as ``load`` does."""
        name = os.fspath(path)
        with naming(name), gc_paused():
            file = read_file(name)
            data, model = file.data, file.model
            header = header_of(model)
            outline = tuple(map(_outline, model.graph.initializer))
            values = GraphProto(
                initializer=[value for value in model.graph.initializer if value.data_location == TensorProto.EXTERNAL]
            )
            model.graph.ClearField("initializer")
            for entry in model.metadata_props:
                if entry.key == self.varying:
                    entry.ClearField("value")
            rest = hashlib.sha256(model.SerializeToString(deterministic=True)).digest()
            key = rest, outline
            if (twin := self._seen.get(key)) is None:
                if len(self._seen) == _KEPT:
                    del self._seen[next(iter(self._seen))]
                twin = self._seen[key] = checked_graph(ModelFile(data), name, own=True)
                return twin
            stored = read_initializers(values, dict(twin.inputs), SymbolTable(None), DataFolder(name))
            metadata = {entry.key: entry.value for entry in header.metadata_props}
            return replace(twin, initializers={**twin.initializers, **stored}, header=header, metadata=metadata)


def _outline(tensor: TensorProto) -> Hashable:
    """Return a stored tensor without values and offset."""
    about = tensor.name, tensor.data_type, tuple(tensor.dims)
    if tensor.data_location == TensorProto.EXTERNAL:
        return *about, tuple((entry.key, entry.value) for entry in tensor.external_data if entry.key != "offset")
    raw = tensor.raw_data
    return *about, len(raw) if raw else tensor.SerializeToString(deterministic=True)
