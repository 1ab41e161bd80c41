"""Parameters with joint updates: a shared gradient, or a node mixing parameters."""

from __future__ import annotations

from gopt.analysis.updates import UpdateMode, Updates


def components(updates: Updates) -> dict[str, tuple[str, ...]]:
    """Return parameter -> all parameters updated together with it, in order, with itself. Linear in the nodes."""
    owner: dict[str, str] = {}
    replicated = {name: update for name, update in updates.subgraphs.items() if update.mode is UpdateMode.REPLICATED}
    parents: dict[str, str] = {}

    def root(name: str) -> str:
        while parents.get(name, name) != name:
            parents[name] = parents.get(parents[name], parents[name])
            name = parents[name]
        return name

    for name, update in replicated.items():
        for value in (update.gradient, *(state.tensor for state in update.states)):
            neighbour = owner.setdefault(value, name)
            if neighbour != name:
                parents[root(name)] = root(neighbour)
        owner.update((value, name) for node in update.nodes for value in node.outputs if value)
    for name, update in replicated.items():
        for node in update.nodes:
            for value in node.reads:
                neighbour = owner.get(value, name)
                if root(neighbour) != root(name):
                    parents[root(name)] = root(neighbour)
    groups: dict[str, list[str]] = {}
    for name in replicated:
        groups.setdefault(root(name), []).append(name)
    return {name: tuple(members) for members in groups.values() if len(members) > 1 for name in members}
