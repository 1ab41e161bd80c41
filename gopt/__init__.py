"""gopt: shard a training step on disk, prove the ranks equal to it, and look at every step of the way.

>>> import gopt
>>> source = gopt.load("fixtures/mlp_adamw.onnx")
>>> sharded = gopt.shard(source, 3)
>>> report = sharded.write("mlp_adamw.ranks", force=True)
>>> gopt.verify("mlp_adamw.ranks").equal
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gopt.api import Sharded, Source, Split, load, shard, split
    from gopt.mesh import Mesh
    from gopt.parameter_server.options import SplitOptions
    from gopt.verification.verify import verify

__version__ = "0.1.0"
__all__ = ["Mesh", "Sharded", "Source", "Split", "SplitOptions", "__version__", "load", "shard", "split", "verify"]

_HOME = {
    "Mesh": "gopt.mesh", "Sharded": "gopt.api", "Source": "gopt.api", "load": "gopt.api", "shard": "gopt.api",
    "split": "gopt.api", "Split": "gopt.api", "SplitOptions": "gopt.parameter_server.options",
    "verify": "gopt.verification.verify",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a verb on first use, so that ``import gopt`` and ``gopt --help`` stay quick."""
    if name not in _HOME:
        raise AttributeError(f"module 'gopt' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
