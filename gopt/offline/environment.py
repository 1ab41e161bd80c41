"""The parts of an installation: versions of gopt and other packages, MPI, GPUs, and the commands to get missing
parts."""

from __future__ import annotations

import importlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import gopt
from gopt.documents.records import to_document
from gopt.text.sanitize import show

RUNTIMES = ("onnxruntime-gpu", "onnxruntime")
"""The wheels of ONNX Runtime: they share a folder, so that one of them at most may be there."""
_CONFLICT = "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu"
_SECONDS = 20
_CORE = ("onnx", "numpy", "ml_dtypes", "click", "jsonschema-rs", "rich", "flatbuffers")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Finding:
    """A part of an installation. ``found``: the version or a sentence; '' for a missing part. ``needed``: the purpose;
    ``get``: the command or the step to install the part, '' where nothing is missing."""

    name: str
    found: str
    needed: str
    get: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True)
class Environment:
    """All parts. ``sound``: whether all parts required by gopt are present."""

    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        return not any(finding.required and finding.get for finding in self.findings)

    def to_json(self) -> dict[str, object]:
        return {"format": "gopt-doctor/1", "sound": self.sound, "parts": list(map(to_document, self.findings))}


def examine() -> Environment:
    """Look at this installation. Nothing is changed; no package but ONNX Runtime is imported."""
    parts = [Finding("gopt", gopt.__version__, "all"), Finding("Python", platform.python_version(), "all")]
    parts += [_package(name, "all", f"pip install {name}", required=True) for name in _CORE]
    parts.append(_runtime())
    parts += [_extra(*extra) for extra in _EXTRAS]
    parts += [_launcher(), _gpu()]
    return Environment(tuple(parts))


_EXTRAS = (
    ("torch", "torch", "gopt export"), ("onnxscript", "torch", "gopt export"), ("onnx-ad", "derive", "gopt derive"),
    ("mpi4py", "mpi", "gopt run with processes"), ("llvmlite", "fast", "faster steps of gopt run"),
    ("nccl4py", "nccl", "gopt run --engine nccl"), ("tensorboard", "tensorboard", "gopt run --tensorboard"),
)  # fmt: skip
"""Package, the extra that brings it, and what it is for."""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _package(name: str, needed: str, get: str, *, required: bool = False) -> Finding:
    version = _version(name)
    return Finding(name, version, needed, "" if version else get, required)


def _extra(name: str, extra: str, needed: str) -> Finding:
    return _package(name, needed, f"pip install 'gopt[{extra}]'")


def _runtime() -> Finding:
    """ONNX Runtime: the wheel, and the devices it can use."""
    needed = "gopt verify, run, export and derive; not shard, diff, golden, inspect"
    wheels = [f"{name} {_version(name)}" for name in RUNTIMES if _version(name)]
    if len(wheels) > 1:
        return Finding("ONNX Runtime", f"{' and '.join(wheels)} in one folder", needed, _CONFLICT, required=True)
    try:
        module = importlib.import_module("onnxruntime")
        providers = [provider.removesuffix("ExecutionProvider") for provider in module.get_available_providers()]
    except (ImportError, AttributeError) as error:
        if wheels:
            return Finding("ONNX Runtime", f"{wheels[0]}: {show(str(error))}", needed, _CONFLICT, required=True)
        return Finding("ONNX Runtime", "", needed, "pip install 'gopt[run]'")
    version = wheels[0] if wheels else str(getattr(module, "__version__", "of an unknown version"))
    return Finding("ONNX Runtime", f"{version}: {', '.join(providers)}", needed, required=True)


def _launcher() -> Finding:
    needed = "gopt run with processes of several hosts"
    program = next(filter(None, map(_beside_or_on_path, ("mpiexec", "mpirun", "srun"))), "")
    return Finding("MPI launcher", program, needed, "" if program else "pip install 'gopt[mpi]'")


def _beside_or_on_path(name: str) -> str:
    """The path of a program, of this environment's first: present also without activation."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name) or ""


def _gpu(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> Finding:
    needed, get = "gopt run --engine nccl", "a machine with an NVIDIA GPU and its driver; ranks run on CPUs without one"
    program = shutil.which("nvidia-smi")
    if program is None:
        driver = "a driver without nvidia-smi" if _DRIVER.exists() else ""
        return Finding("NVIDIA GPU", driver, needed, "" if driver else get)
    words = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        output = run(words, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return Finding("NVIDIA GPU", "", needed, "nvidia-smi finds none: check the driver")
    return Finding("NVIDIA GPU", "; ".join(map(str.strip, output.strip().splitlines())), needed)
