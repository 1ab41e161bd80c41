"""Python files of the user, run as modules."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from pathlib import Path
from types import ModuleType

_modules: dict[tuple[Path, int], ModuleType] = {}
_lock = threading.RLock()


def run_file(path: Path) -> ModuleType:
    """A new module of a file, whatever other modules have the name; modules beside the file can be imported.

    Raises ImportError for a file of another kind, FileNotFoundError for a missing file, and what the file
    raises."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # pickles and dataclasses look there
    _search(str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def named_module(name: str) -> ModuleType:
    """A module on the path, or in the current folder. Raises ImportError, and what the module raises."""
    _search(os.getcwd())
    return importlib.import_module(name)


def _search(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def module_of(path: Path) -> ModuleType:
    """The module of a file, run once for each version of the file. Raises as ``run_file`` does."""
    key = path.resolve(), path.stat().st_mtime_ns
    with _lock:  # ranks are threads
        if key not in _modules:
            _modules[key] = run_file(path)
        return _modules[key]
