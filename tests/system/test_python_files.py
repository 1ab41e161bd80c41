"""Python files of the user, run as modules."""

from __future__ import annotations

import os
import sys

import pytest

from gopt.system.python_files import module_of, run_file


def test_files_of_one_name_are_two_modules(tmp_path):
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "json.py").write_text(f"VALUE = {name!r}")
        found.append(module_of(tmp_path / name / "json.py").VALUE)
    assert found == ["one", "two"] and hasattr(sys.modules["json"], "loads")


def test_a_file_runs_once_for_each_version(tmp_path):
    file = tmp_path / "counted_here.py"
    file.write_text("import os\nos.environ['RUNS'] = str(int(os.environ.get('RUNS', 0)) + 1)")
    try:
        assert module_of(file) is module_of(file) and os.environ["RUNS"] == "1"
        os.utime(file, ns=(1, 1))
        assert module_of(file) is not run_file(file) and os.environ["RUNS"] == "3"
    finally:
        del os.environ["RUNS"]


def test_a_module_beside_the_file_can_be_imported_when_a_function_is_called(tmp_path):
    (tmp_path / "beside_the_file.py").write_text("VALUE = 3")
    (tmp_path / "late_import.py").write_text(
        "def value():\n    import beside_the_file\n    return beside_the_file.VALUE"
    )
    assert module_of(tmp_path / "late_import.py").value() == 3


def test_a_file_that_is_no_module_is_said(tmp_path):
    (tmp_path / "text.txt").write_text("VALUE = 3")
    with pytest.raises(ImportError, match="is not a Python module"):
        run_file(tmp_path / "text.txt")
