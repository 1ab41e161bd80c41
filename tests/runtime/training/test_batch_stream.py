"""Batches out of Python's iterables."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from helpers import FIXTURES
from option_gen.make import written

import gopt
from gopt.errors import GoptError
from gopt.ir.types import TensorType
from gopt.runtime.training.array_source import MicroStep
from gopt.runtime.training.batch_stream import BatchStream, StreamSource
from gopt.schedules.schedule_file import read_schedule
from gopt.verification import sampling

TYPES = {"x": TensorType("float32", (2,)), "y": TensorType("int64", ())}


def element(number: int) -> dict[str, np.ndarray]:
    return {"x": np.full(2, number, "f4"), "y": np.array(number)}


class Loader:
    """What can be iterated again, as a loader of data can."""

    def __iter__(self):
        return map(element, range(5))


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("first", [0, 4])
def test_ranks_take_every_element_once_in_any_order_of_threads(readers, first):
    stream, seen, lock = BatchStream(Loader()), [], threading.Lock()
    for _ in range(2 * readers):
        stream.note_reader()

    def rank(part: int) -> None:
        source = StreamSource(stream, TYPES)
        for number in range(first, first + 6):
            batch = source.batch(MicroStep(number, part, 2))
            with lock:
                seen.append((number, part, int(batch["y"]), batch["x"].tolist()))

    threads = [threading.Thread(target=rank, args=(part,)) for part in (0, 1) for _ in range(readers)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    whole = [(number, part, (2 * number + part) % 5) for number in range(first, first + 6) for part in (0, 1)]
    assert sorted(seen) == sorted([(n, p, v, [v, v]) for n, p, v in whole] * readers) and not stream._pending


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (iter([element(0)]), "the data ended after 1 batches"),
        (iter([]), "the data ended after 0 batches"),
        ([], "the data ended after 0 batches"),
        ([(np.zeros(2, "f4"),)], "batch 0 of the data is a tuple of 1, and the step takes x, y"),
        ([{"x": np.zeros(2, "f4")}], "the data has no 'y'"),
        ([(np.zeros(3, "f4"), np.array(1))], "the data's 'x' has shape [3]"),
        (3, "the data is of type int, and no batches"),
    ],
)
def test_what_is_no_batch_is_named(values, said):
    source = StreamSource(BatchStream(values), TYPES)
    with pytest.raises(GoptError) as caught:
        for number in range(2):
            source.batch(MicroStep(number, 0, 1))
    assert said in caught.value.message


@pytest.mark.parametrize("mesh", [2, "dp=2,tp=2"])
def test_a_run_reads_the_batches_that_it_is_given(mesh):
    random = np.random.default_rng(0)
    given = [{"x": random.standard_normal((8, 32), dtype=np.float32), "y": random.integers(0, 10, 8)} for _ in range(6)]
    folder = gopt.shard(FIXTURES / "mlp_sgd.onnx", mesh)
    whole = {name: np.concatenate([each[name] for each in given]) for name in ("x", "y")}
    asked = gopt.run(folder, whole, 4, settings={"lr": 0.1}).losses
    assert asked == gopt.run(folder, given, 4, settings={"lr": 0.1}).losses
    assert asked[:3] == gopt.run(folder, ((each["x"], each["y"]) for each in given), 3, settings={"lr": 0.1}).losses


FUNCTION = """
import numpy as np

def batches(part, parts):
    stored = np.load({path!r})
    for number in range(part, len(next(iter(stored.values()))), parts):
        yield {{key: stored[key][number] for key in stored}}
"""


@pytest.mark.parametrize("name", ["mlp_sgd", "sparse/towers_adam"])
@pytest.mark.parametrize(("mesh", "parts"), [("pp=2", 1), ("pp=2,dp=2", 2)])
def test_a_rank_of_several_stages_reads_each_batch_once(name, mesh, parts, tmp_path):
    """The gradients of the first stage's weights need the batch when the last stage is done with it."""
    step, generator = gopt.load(FIXTURES / f"{name}.onnx"), np.random.default_rng(0)
    ranges = sampling.integer_ranges(step.training)
    drawn = [sampling.draw_inputs(step.training, step.training.batch, generator, ranges) for _ in range(9 * parts)]
    np.savez(tmp_path / "batches.npz", **{key: np.stack([batch[key] for batch in drawn]) for key in drawn[0]})
    (tmp_path / "data.py").write_text(FUNCTION.format(path=str(tmp_path / "batches.npz")))
    own = Path(written("drawn 21 2 3", tmp_path))
    assert read_schedule(own).forwards[0] != 0
    made = {each: gopt.shard(step, mesh, accumulate=3, schedule=each) for each in ("gpipe", "zb-v", str(own))}
    runs = [
        gopt.run(ranks, data, 3, settings={"lr": 0.1})
        for ranks in made.values() for data in (iter(drawn), f"{tmp_path}/data.py:batches")
    ]  # fmt: skip
    assert len({*runs[0].losses}) == 3
    for run in runs[1:]:
        assert np.allclose(run.losses, runs[0].losses, rtol=1e-4)
        assert all(np.allclose(value, run.states[key], atol=1e-4) for key, value in runs[0].states.items())
