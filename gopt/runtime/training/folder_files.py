"""Compares the files that ranks read with recorded digests: each rank compares the rank's files, and one rank on each
host the rest."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from gopt.artifact.integrity import check_files
from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_entries import RankEntry


class FolderAgreement(Protocol):
    """A rank among others: the number, and a gather of small objects among all ranks."""

    @property
    def rank(self) -> int: ...

    def gather(self, item: Any) -> list[Any]: ...


def check_own(folder: Path, manifest: Manifest, rank: int) -> None:
    """Raise InputError where a rank's graph is not as gopt wrote it; the first rank alone notes a folder without
    digests."""
    if manifest.files is not None or rank == 0:
        check_files(folder, manifest.files, _graphs([manifest.ranks[rank]]))


def check_shared(folder: Path, manifest: Manifest, engine: FolderAgreement) -> None:
    """Raise InputError where a shared file is not as gopt wrote it; all ranks call this function, and the first of all
    ranks with one folder on one host reads the files."""
    status = folder.stat()
    homes = engine.gather(f"{socket.gethostname()}:{status.st_dev}:{status.st_ino}")
    if manifest.files is not None and homes.index(homes[engine.rank]) == engine.rank:
        check_files(folder, manifest.files, manifest.files.keys() - _graphs(manifest.ranks))


def _graphs(ranks: Sequence[RankEntry]) -> set[str]:
    files = {file for rank in ranks for file in rank.files.values()}
    return files | {rank.startup for rank in ranks if rank.startup is not None}
