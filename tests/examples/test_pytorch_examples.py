"""The scripts of ``examples/pytorch``, each from script to sharded, verified, trained, merged and loaded strictly. By
hand, ``pytest -m torch``."""

from __future__ import annotations

import sys

import pytest
from helpers import ROOT

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

sys.path.insert(0, str(ROOT / "examples/pytorch"))
import run as example  # noqa: E402

NAMES = {
    "resnet": (("x",), ("logits",)),
    "nanogpt": (("idx",), ("logits",)),
    "autocast": (("x",), ("logits",)),
    "huggingface": (
        ("input_ids", "attention_mask"),
        ("logits", "hidden_states.0", "hidden_states.1", "hidden_states.2", "encoder.layer.0"),
    ),
    "lora": (("ids",), ("logits",)),
    "lstm": (("letters",), ("logits",)),
    "diffusion": (("x", "t"), ("noise",)),
    "plain": (("input",), ("output",)),
}
"""Script -> inputs and outputs of its model for inference, by the names of the script."""


def test_every_script_is_here():
    scripts = {path.stem for path in (ROOT / "examples/pytorch").glob("*.py")} - {"run"}
    assert scripts == NAMES.keys() == example.OPTIONS.keys()
    text = (ROOT / "examples/pytorch/README.md").read_text()
    assert all(f"`{name}.py`" in text and f"run.py {name}" in text for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_becomes_a_trained_module(name, tmp_path):
    found = example.bring_through(name, tmp_path)
    assert found.equal and len(found.losses) == example.STEPS
    assert (found.inputs, found.outputs) == NAMES[name], "names of the user, and no draws"
    assert found.difference < (3e-2 if name == "autocast" else 1e-4)
    assert found.saved["step"] == example.STEPS
    assert ("ema" in found.saved) == (name == "diffusion") and ("scheduler" in found.saved) == (name == "resnet")
