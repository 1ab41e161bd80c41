"""Folders of artifacts as functional steps: on the stock runtime they give what the recordings hold."""

from __future__ import annotations

import json

import pytest
from recordings import FOLDERS, MORE, NAMES, RECORDED, STEPS, Running, copied, known_to_onnx, moments, moved, recorded

from gopt.importers.load import load_step


def step(folder):
    graph = load_step(folder)
    return graph, Running(graph, json.loads(graph.metadata["gopt.roles"]))


def compare(name, running, start, stop):
    """Losses, parameters and statistics after each step, in tolerances."""
    wanted = recorded(name)
    first = {key: value.astype("float64") for key, value in running.states.items()}
    worst, seen = 0.0, set()
    for place in range(start, stop):
        loss = running(wanted[f"input.{place}"], wanted[f"labels.{place}"])
        assert loss == pytest.approx(float(wanted[f"loss.{place}"]), rel=1e-5)
        for key, value in running.states.items():
            if f"{key}.{place}" in wanted:
                seen.add(key)
                worst = max(worst, moved(value, wanted[f"{key}.{place}"], first[key]))
    assert (
        seen == {key.removesuffix(f".{start}") for key in wanted if key.endswith(f".{start}")} & running.states.keys()
    )
    assert len(seen) >= 2
    return worst


@pytest.mark.parametrize("name", NAMES)
def test_a_step_equals_the_recording(name):
    """Losses, parameters, statistics and moments of three steps from the checkpoint as it was generated."""
    graph, running = step(FOLDERS / name)
    assert known_to_onnx(graph) == []
    first = {key: value.astype("float64") for key, value in running.states.items()}
    assert compare(name, running, 0, STEPS) <= 1
    held = moments(RECORDED / f"{name}.checkpoint")
    for key in running.states.keys() & held.keys():
        assert moved(running.states[key], held[key], first[key]) <= 1, key
    assert "step" not in running.states or running.states["step"].tolist() == [STEPS]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_goes_on_from_a_checkpoint_with_optimizer_states(name, tmp_path):
    _, running = step(copied(name, tmp_path, RECORDED / f"{name}.checkpoint"))
    assert "step" not in running.states or running.states["step"].tolist() == [STEPS]
    assert compare(name, running, STEPS, STEPS + MORE) <= 1
