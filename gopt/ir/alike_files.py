"""Loads files that begin alike, as rank files do: the nodes and types that they have in common are read once.

A rank's file has the nodes of all ranks in front, and behind them nodes on parts that only this rank has."""

from __future__ import annotations

import os
from dataclasses import dataclass

from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
from onnx import ModelProto

from gopt.ir.alike_graphs import FileBytes, LoadedFile, RankFile, graph_beside, with_header, without_metadata
from gopt.ir.chunked_inference import KnownTypes
from gopt.ir.external_data import naming
from gopt.ir.graph import Graph
from gopt.ir.load import load, load_first, uncounted_bytes
from gopt.ir.wire_format import GRAPH, check_parts, field, split_fields

_MOST = 16
"""Files that a file is compared with."""
_STEP = 251
"""Distance of the bytes of a graph by which a file with the same graph is looked for."""


class AlikeFiles:
    """A loader of gopt's own files. Graphs of files that are alike share nodes and types: neither may be edited."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[bytes, bytes], list[LoadedFile]] = {}
        """By nodes and fields of the graph, for several stored values."""
        self._bodies: dict[tuple[int, bytes], list[_Twin]] = {}
        """By length and some bytes of the graph, to compare all bytes: replicas differ in the metadata alone."""
        self._leaders: list[LoadedFile] = []
        """Files that began unlike all before, the last one first."""

    def load(self, path: str) -> Graph:
        """The graph in a file. Raises the errors of ``gopt.ir.load.load``."""
        with naming(path):
            data = uncounted_bytes(path)
            header, body = _split(data)
            twin = self._twin(body)
            like = self._like(body) if twin is None else None
            new = body[like[0].ends[like[1] - 1] :] if like is not None else body
            check_parts(header + field(GRAPH >> 3, new if twin is None else b"") if body else data)
        try:
            return self._beside(path, header, body, twin, like)
        except DecodeError:
            return load(path, own=True)  # says what is wrong

    def _like(self, body: bytes) -> tuple[FileBytes, int] | None:
        """The file to compare first, and the number of common nodes in front."""
        leader = self._leaders[0].parts if self._leaders else None
        count = leader.common(body) if leader is not None else 0
        return (leader, count) if leader is not None and count else None

    def _beside(
        self, path: str, header: bytes, body: bytes, twin: _Twin | None, like: tuple[FileBytes, int] | None
    ) -> Graph:  # fmt: skip
        """The graph in a file, beside earlier files. Raises DecodeError for damaged bytes."""
        if twin is not None and os.path.dirname(path) == twin.folder:
            model = ModelProto.FromString(header)
            if without_metadata(model) == without_metadata(twin.graph.header):
                with naming(path):
                    return with_header(model, twin.graph)
        graph = self._load(path, FileBytes.of(header, body, like))
        if body:
            twins = self._bodies.setdefault(_some_of(body), [])
            twins[:] = [_Twin(os.path.dirname(path), body, graph), *(old for old in twins if old.body != body)]
        return graph

    def _twin(self, body: bytes) -> _Twin | None:
        """An earlier file with the same bytes of the graph."""
        return next((twin for twin in self._bodies.get(_some_of(body), ()) if twin.body == body), None)

    def _load(self, path: str, parts: FileBytes | None) -> Graph:
        if parts is None:
            return load(path, own=True)
        file, equal = RankFile(path, parts), self._loaded.setdefault((parts.nodes, parts.rest), [])
        for like in equal:
            graph = graph_beside(file, like, len(parts.ends))
            if graph is not None:
                return graph
        graph = None
        for number, like in enumerate(self._leaders):
            graph = graph_beside(file, like, parts.shared_with(like.parts))
            if graph is not None:
                self._leaders.insert(0, self._leaders.pop(number))
                break
        if graph is None:
            types = KnownTypes()
            graph = load_first(path, types)
            if len(parts.ends) == len(graph.nodes):
                self._leaders = [LoadedFile(file, graph, types), *self._leaders[: _MOST - 1]]
        if len(parts.ends) == len(graph.nodes):
            equal.insert(0, LoadedFile(file, graph, KnownTypes()))
            del equal[_MOST:]
        return graph


@dataclass(frozen=True, slots=True)
class _Twin:
    """A graph, the bytes, and the folder of the file, beside the values."""

    folder: str
    body: bytes
    graph: Graph


def _some_of(body: bytes) -> tuple[int, bytes]:
    """The length and some bytes of a graph: hashing all bytes takes longer than comparing two files."""
    return len(body), body[::_STEP]


def _split(data: bytes) -> tuple[bytes, bytes]:
    """A file without the graph, and the graph; no graph unless it is a single field."""
    fields = split_fields(data, 0, len(data))
    bodies = [data[at:end] for tag, _, at, end in fields if tag == GRAPH]
    header = b"".join([data[start:stop] for tag, start, _, stop in fields if tag != GRAPH])
    return header, bodies[0] if len(bodies) == 1 else b""


def shared_parts(graph: Graph) -> tuple[int, int, int]:
    """The nodes, types and stored values of a graph, by identity: ``AlikeFiles`` loads equal ones once."""
    return id(graph.nodes), id(graph.types), id(graph.initializers)
