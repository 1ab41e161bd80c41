"""What ``gopt doctor`` looks at: packages, ONNX Runtime's wheels, launchers, GPUs."""

from __future__ import annotations

import subprocess
from importlib import metadata

import pytest

from gopt.offline import environment
from gopt.offline.environment import Environment, examine


def found(result: Environment, name: str) -> environment.Finding:
    return next(each for each in result.findings if each.name == name)


def test_this_installation_is_sound():
    result = examine()
    assert result.sound and not any(each.get for each in result.findings if each.required)
    assert found(result, "onnx").found == metadata.version("onnx")
    assert all(bool(each.found) != bool(each.get) for each in result.findings)


@pytest.mark.parametrize(
    ("wheels", "get"),
    [
        ({"onnxruntime": "1", "onnxruntime-gpu": "2"}, "pip uninstall -y onnxruntime onnxruntime-gpu"),
        ({}, "pip install 'gopt[run]'"),
        ({"onnxruntime-gpu": "2"}, "pip uninstall -y onnxruntime"),
    ],
    ids=["two wheels", "none", "one that cannot be imported"],
)
def test_a_runtime_that_is_not_whole_is_told(wheels, get, monkeypatch):
    monkeypatch.setattr(environment, "_version", lambda name: wheels.get(name, "" if "onnxruntime" in name else "1"))
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    result = examine()
    assert result.sound is not bool(wheels)
    assert found(result, "ONNX Runtime").get.startswith(get)


def test_gpus_are_those_of_the_driver(monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda name, path=None: f"/bin/{name}")
    said = subprocess.CompletedProcess([], 0, "NVIDIA H100, 580.1, 81559 MiB\n")
    assert environment._gpu(lambda *words, **how: said).found == "NVIDIA H100, 580.1, 81559 MiB"

    def fails(*words, **how):
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    assert environment._gpu(fails).get
