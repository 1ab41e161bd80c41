"""Values of training checkpoints, and checkpoints that are damaged."""

from __future__ import annotations

import random

import numpy as np
import pytest
from recordings import FOLDERS, NAMES, RECORDED, STEPS, recorded

from gopt.errors import InputError, UnsupportedError
from gopt.importers.artifacts.checkpoint import read_checkpoint

FILE = FOLDERS / "mlp_adamw" / "checkpoint"


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_training_api(name):
    """The parameters that ``CheckpointState`` gave when the checkpoint was saved, bit for bit."""
    held, wanted = read_checkpoint(RECORDED / f"{name}.checkpoint"), recorded(name)
    for each in (*held.trainable, *held.frozen):
        np.testing.assert_array_equal(held.value(each).numpy(), wanted[f"{each.name}.{STEPS - 1}"])
    (group,) = held.groups
    assert (group.step, group.learning_rate) == (STEPS, pytest.approx(1e-3))  # that of the start, whatever was set
    assert {each.parameter for each in group.parameters} == {each.name for each in held.trainable}


def test_a_truncated_checkpoint_is_refused(tmp_path):
    """At every length: either the loss is seen, or all that is left is whole."""
    data, file = FILE.read_bytes(), tmp_path / "checkpoint"
    seen = 0
    for size in range(0, len(data), 7):
        file.write_bytes(data[:size])
        try:
            held = read_checkpoint(file)
            for each in held.trainable:
                held.value(each)
        except InputError as error:
            assert str(file) in error.message and "\n" not in error.message
            seen += 1
    assert seen > len(data) / 7 * 0.9


def test_no_damage_is_more_than_refused(tmp_path):
    """One to four bytes changed, 400 times: an InputError or a checkpoint, and no value beyond the file."""
    data, file, refused = FILE.read_bytes(), tmp_path / "checkpoint", 0
    draw = random.Random(5)
    for _ in range(400):
        bad = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            bad[draw.randrange(8, min(len(bad), 600))] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
        file.write_bytes(bad)
        try:
            held = read_checkpoint(file)
            for each in (*held.trainable, *held.frozen):
                value = held.value(each)
                assert value is None or value.offset + value.nbytes <= len(bad)
        except (InputError, UnsupportedError):
            refused += 1
    assert refused > 100


def test_a_value_of_another_length_is_refused():
    held = read_checkpoint(FILE)
    first = held.trainable[0]
    from dataclasses import replace

    from gopt.ir.types import TensorType

    with pytest.raises(InputError, match=r"512 bytes in the checkpoint, and float32\[4,8\] takes 128"):
        held.value(replace(first, type=TensorType("float32", (4, 8))))
    with pytest.raises(UnsupportedError, match="in a file beside the checkpoint"):
        replace(held, external=True).value(replace(first, byte_range=None))
