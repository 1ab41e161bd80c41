"""The cut of least capacity between a source and a sink."""

# Own code, since no library of the project has flows: scipy's takes integers alone, where prices are fractions and some
# edges have no bound, and a dependency for 60 exact lines, tested against all cuts of small networks, is too much.

from __future__ import annotations

from collections import deque

SOURCE, SINK = 0, 1


class Network:
    """A network of vertices 0, 1, …; edges with capacities. ``SOURCE`` and ``SINK`` exist from the start."""

    def __init__(self) -> None:
        self._edges: list[list[int]] = [[], []]
        """Vertex -> edges; edge ``i ^ 1`` is edge ``i`` in reverse."""
        self._ends: list[int] = []
        self._room: list[float] = []

    def vertex(self) -> int:
        self._edges.append([])
        return len(self._edges) - 1

    def edge(self, start: int, end: int, capacity: float) -> None:
        self._edges[start].append(len(self._ends))
        self._edges[end].append(len(self._ends) + 1)
        self._ends += [end, start]
        self._room += [capacity, 0.0]

    def behind_cut(self) -> set[int]:
        """The vertices on the side of the sink, after a maximal flow."""
        while (depth := self._depths())[SINK] >= 0:
            self._push_all(depth)
        return {vertex for vertex, at in enumerate(depth) if at < 0}

    def _depths(self) -> list[int]:
        """Vertex -> edges with room on the shortest path from the source; -1: no path."""
        depth = [-1] * len(self._edges)
        depth[SOURCE] = 0
        queue = deque([SOURCE])
        while queue:
            vertex = queue.popleft()
            for edge in self._edges[vertex]:
                end = self._ends[edge]
                if self._room[edge] > 0 and depth[end] < 0:
                    depth[end] = depth[vertex] + 1
                    queue.append(end)
        return depth

    def _push_all(self, depth: list[int]) -> None:
        """Fill the shortest paths."""
        following = [iter(edges) for edges in self._edges]
        path: list[int] = []
        vertex = SOURCE
        while True:
            if vertex == SINK:
                amount = min(self._room[edge] for edge in path)
                for edge in path:
                    self._room[edge] -= amount
                    self._room[edge ^ 1] += amount
                full = next(number for number, edge in enumerate(path) if self._room[edge] <= 0)
                vertex = self._ends[path[full] ^ 1]
                del path[full:]
                following[vertex] = iter(self._edges[vertex])
                continue
            for edge in following[vertex]:
                end = self._ends[edge]
                if self._room[edge] > 0 and depth[end] == depth[vertex] + 1:
                    path.append(edge)
                    vertex = end
                    break
            else:
                if vertex == SOURCE:
                    return
                depth[vertex] = -2
                vertex = self._ends[path.pop() ^ 1]
