"""Makes a smaller model with the same failure of a command (docs/reproducers.md).

``search`` tries candidates and keeps those with the same failure; ``steps`` are the ways to make a graph smaller;
``chunks`` halves a step's removals; ``cut`` builds a candidate, ``sizes`` and ``values`` shrink the contents."""
