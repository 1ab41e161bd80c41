"""Values of options beside their defaults, from which settings are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SCHEDULES = ("gpipe", "1f1b", "interleaved:2", "interleaved:3", "zb-h1", "zb-v")
PASSES: Mapping[str, Mapping[str, Sequence[object]]] = {
    "tensor-parallel": {
        "auto": (False,), "sizes": ("ceil", "floor-last"), "sequence": (True,), "regather": (True,),
    },
    "shard": {
        "partition": ("rows", "whole"), "owners": ("round-robin", "in-order", "hash"), "rule": ("ceil",),
        "min-piece": (1, 7, 64), "style": ("broadcast",), "bucket-mb": (0.0, 0.001, 0.01),
        "reduce-dtype": ("float32",), "reshard-after-forward": (False,), "persist": (100, 100000),
    },
    "statistics": {"statistics": ("mean", "root", "local", "sync")},
    "fuse-collectives": {"cap-mb": (0.0, 0.001), "max-tensors": (1, 2), "first-mb": (0.0001,)},
    "recompute": {"policy": ("full", "selective", "1KiB", "100KiB")},
    "overlap": {"prefetch": (0, 3), "limit-mb": (0.0, 0.001)},
    "offload": {"what": ("states", "activations", "states,activations", "1KiB"), "least": ("1B", "64B")},
}  # fmt: skip
"""Pass -> option -> values beside its default."""
