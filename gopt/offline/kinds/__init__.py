"""What a file or a folder is, by its content: see ``registry`` for the kinds that are known."""

from __future__ import annotations

from gopt.offline.kinds.registry import KINDS, Kind, inspect_path, kind_of

__all__ = ["KINDS", "Kind", "inspect_path", "kind_of"]
