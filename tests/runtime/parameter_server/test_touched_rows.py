"""Updates on touched rows: bit for bit those of all rows where these do nothing else, and NumPy's where they do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT
from lazy_steps import expected_rows
from table_runs import batches, run_tables, split_tables, values

from gopt import api
from gopt.errors import InputError
from gopt.ir.load import load
from gopt.parameter_server.row_init import RowInit
from gopt.runtime.parameter_server.touched_rows import RowSource, RowStore, take_out


@pytest.fixture
def data(tmp_path: Path) -> str:
    return batches(tmp_path / "data.npz")
