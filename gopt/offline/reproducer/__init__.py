"""A failing command in one file: the graph, the options, the versions, and how it failed (docs/reproducers.md)."""
