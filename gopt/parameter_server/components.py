"""Parameters whose updates belong together: they share a gradient, or a node mixes them."""

from __future__ import annotations

from gopt.analysis.updates import UpdateMode, Updates


def components(updates: Updates) -> dict[str, tuple[str, ...]]:
    """Return parameter -> all parameters that are updated together with it, in order, itself included. Linear in the
    nodes."""
    owner: dict[str, str] = {}
    replicated = {name: each for name, each in updates.subgraphs.items() if each.mode is UpdateMode.REPLICATED}
    first: dict[str, str] = {}

    def root(name: str) -> str:
        while first.get(name, name) != name:
            first[name] = first.get(first[name], first[name])
            name = first[name]
        return name

    for name, subgraph in replicated.items():
        for value in (subgraph.gradient, *(state.tensor for state in subgraph.states)):
            other = owner.setdefault(value, name)
            if other != name:
                first[root(name)] = root(other)
        owner.update((value, name) for node in subgraph.nodes for value in node.outputs if value)
    for name, subgraph in replicated.items():
        for node in subgraph.nodes:
            for value in node.reads:
                other = owner.get(value, name)
                if root(other) != root(name):
                    first[root(name)] = root(other)
    groups: dict[str, list[str]] = {}
    for name in replicated:
        groups.setdefault(root(name), []).append(name)
    return {name: tuple(members) for members in groups.values() if len(members) > 1 for name in members}
