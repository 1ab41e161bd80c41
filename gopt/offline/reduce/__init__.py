"""Makes a smaller model on which a command fails in the same way (docs/reproducers.md).

``search`` tries candidates and keeps those that fail so; ``steps`` are the ways to make a graph smaller; ``chunks``
halves what a step removes at a time; ``cut`` builds a candidate, ``sizes`` and ``values`` shrink what it holds.
"""
