"""Updates on touched rows: bit for bit those of all rows where these do nothing else, and NumPy's where they do."""

from __future__ import annotations

from pathlib import Path

import pytest
from table_runs import batches


@pytest.fixture
def data(tmp_path: Path) -> str:
    return batches(tmp_path / "data.npz")
