"""The lines of docs/adding-an-operator.md add an operator: in a copy of the sources its facts hold by numbers."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = (
    "conftest.py",
    "products.py",
    "helpers.py",
    "node_models.py",
    "operator_forms.py",
    "operator_probes.py",
    "other_shapes.py",
    "operators",
    "laws/test_coupling_rules.py",
)


def put(path: Path, before: str, text: str) -> None:
    """Insert lines in front of the only line that begins so."""
    source = path.read_text(encoding="utf-8")
    assert source.count(f"\n{before}") == 1
    path.write_text(source.replace(f"\n{before}", f"\n{text}{before}"), encoding="utf-8")


def test_the_operator_of_the_page_passes_the_tests_of_records(tmp_path):
    page = (ROOT / "docs/adding-an-operator.md").read_text(encoding="utf-8")
    record, kernel, use = re.findall(r"```python\n(.*?)```", page, re.S)
    shutil.copytree(ROOT / "gopt", tmp_path / "gopt", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "cli", tmp_path / "gopt/cli", ignore=shutil.ignore_patterns("__pycache__"))
    for name in TESTS:
        target = tmp_path / "tests" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / "tests" / name).is_dir() else shutil.copy
        copy(ROOT / "tests" / name, target)
    put(tmp_path / "gopt/operators/moves.py", "OPERATORS = (", f"{kernel}\n\n")
    put(tmp_path / "gopt/operators/moves.py", '    Operator("CumSum"', record)
    put(tmp_path / "tests/operator_forms.py", '    "Compress": [', use)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "CumProd", "tests"]
    result = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(re.findall(r"(\d+) passed", result.stdout)[0]) >= 4
