"""Describes a file or a folder by content; ``registry`` lists the known kinds."""

from __future__ import annotations

from gopt.offline.kinds.registry import KINDS, FileKind, inspect_path, kind_of

__all__ = ["KINDS", "FileKind", "inspect_path", "kind_of"]
