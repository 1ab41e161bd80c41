"""Files that ranks read, compared with their digests: each rank compares its own, and one on each host the rest."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from gopt.artifact.integrity import check_files
from gopt.artifact.manifest import Manifest, RankEntry


class FolderAgreement(Protocol):
    """A rank among others: its number, and a gather of small objects among all."""

    @property
    def rank(self) -> int: ...

    def gather(self, item: Any) -> list[Any]: ...


def check_own(folder: Path, manifest: Manifest, rank: int) -> None:
    """Raise InputError where a graph of a rank is not what gopt wrote; the first rank alone notes a folder without
    digests."""
    if manifest.files is not None or rank == 0:
        check_files(folder, manifest.files, _graphs([manifest.ranks[rank]]))


def check_shared(folder: Path, manifest: Manifest, engine: FolderAgreement) -> None:
    """Raise InputError where a file that ranks share is not what gopt wrote; all ranks call it, and of those that have
    one folder on one host the first reads them."""
    found = folder.stat()
    homes = engine.gather(f"{socket.gethostname()}:{found.st_dev}:{found.st_ino}")
    if manifest.files is not None and homes.index(homes[engine.rank]) == engine.rank:
        check_files(folder, manifest.files, manifest.files.keys() - _graphs(manifest.ranks))


def _graphs(ranks: Sequence[RankEntry]) -> set[str]:
    files = {file for each in ranks for file in each.files.values()}
    return files | {each.startup for each in ranks if each.startup is not None}
