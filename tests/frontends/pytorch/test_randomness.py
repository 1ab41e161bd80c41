"""Random numbers of exported steps: what the file says of them, and runs that draw them. ``pytest -m torch``."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import onnx
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import export_recipes as recipes  # noqa: E402
from gopt.cli.main import main  # noqa: E402

import gopt  # noqa: E402
from gopt.artifact.manifest_check import read_manifest  # noqa: E402
from gopt.documents.draws import Distribution, Draw  # noqa: E402
from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.options import Draws, Dynamic, ExportOptions  # noqa: E402
from gopt.frontends.pytorch.randomness import ReplayedDraws  # noqa: E402
from gopt.runtime.training.draws import DrawnInputs  # noqa: E402

STEPS, NOISE_LEVELS = 4, 2000


class Denoiser(torch.nn.Module):
    """A diffusion step: noise at a random timestep, predicted; dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.times = torch.nn.Embedding(NOISE_LEVELS, 8)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Dropout(0.25), torch.nn.Linear(16, 8)
        )
        self.register_buffer("share", torch.linspace(1.0, 0.01, NOISE_LEVELS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise, t = torch.randn_like(x), torch.randint(10, NOISE_LEVELS, (len(x),))
        share = self.share[t][:, None]
        seen = x * share.sqrt() + noise * (1 - share).sqrt()
        return (self.body(seen + self.times(t)) - noise).square().mean()


def denoiser():
    net = Denoiser()
    return net, None, torch.optim.AdamW(net.parameters(), 1e-2), {"x": torch.randn(4, 8)}


def mixed():
    """Samples are mixed with others of the batch; dropout by rows."""
    net = torch.nn.Linear(6, 3)

    def loss(module, batch):
        x, y = batch["x"], batch["y"]
        other, keep = torch.randperm(len(x)), torch.bernoulli(torch.full((len(x), 1), 0.75))
        share = torch.empty(1).uniform_(0.25, 0.75)
        out = module((x * share + x[other] * (1 - share)) * keep)
        losses = [torch.nn.functional.cross_entropy(out, each) for each in (y, y[other])]
        return losses[0] * share.squeeze() + losses[1] * (1 - share.squeeze())

    return net, loss, torch.optim.SGD(net.parameters(), 0.1), {"x": torch.randn(5, 6), "y": torch.randint(0, 3, (5,))}


def dropout():
    """As in ``export_recipes``, with a name for the input."""
    net, _, optimizer, (x, y) = recipes.dropout()
    return net, lambda module, batch: torch.nn.functional.cross_entropy(module(batch["x"]), batch["y"]), optimizer, {
        "x": x, "y": y,
    }  # fmt: skip


INTEGERS = Draw(Distribution.INTEGERS, low=10, high=NOISE_LEVELS)
UNIFORM, NORMAL, PERMUTATION = map(Draw, (Distribution.UNIFORM, Distribution.NORMAL, Distribution.PERMUTATION))
MODELS = {
    "diffusion": (denoiser, [NORMAL, INTEGERS, UNIFORM], {}),
    "dropout": (dropout, [UNIFORM, UNIFORM], {"y": 4}),
    "mixed": (mixed, [PERMUTATION, UNIFORM, UNIFORM], {"y": 3}),
}


def data(path: Path, batch: dict[str, torch.Tensor], classes: dict[str, int]) -> Path:
    random, count = np.random.default_rng(0), len(batch["x"]) * 6
    arrays = {"x": random.standard_normal((count, *batch["x"].shape[1:])).astype("f4")}
    np.savez(path, **arrays, **{name: random.integers(0, bound, count) for name, bound in classes.items()})
    return path


@pytest.mark.parametrize("name", MODELS)
def test_a_run_draws_as_eager_pytorch_is_fed(name, tmp_path):
    """Exported, sharded, verified, and run without a draw in the data; eager PyTorch on the draws of the run has the
    same losses."""
    factory, wanted, classes = MODELS[name]
    torch.manual_seed(0)
    net, loss, optimizer, batch = factory()
    found = export((net, loss, optimizer, batch), tmp_path / "step.onnx")
    assert [*found.draws.values()] == wanted and found.to_json()["draws"]["draw_0"]["distribution"]
    gopt.shard(found.model, 2).write(tmp_path / "ranks")
    result = gopt.verify(tmp_path / "ranks")
    assert result.equal, result.to_json()
    file = data(tmp_path / "d.npz", batch, classes)
    ran = gopt.run(tmp_path / "ranks", file, STEPS, settings={"lr": optimizer.param_groups[0]["lr"]}, draws=9)

    source, arrays = DrawnInputs.of(read_manifest(tmp_path / "ranks")[0], 9), np.load(file)
    rows = len(batch["x"])
    for step in range(STEPS):
        losses = []
        optimizer.zero_grad()
        for part in range(2):
            turn = 2 * step + part
            fed = {each: torch.tensor(np.resize(arrays[each], (STEPS * 2 * rows, *arrays[each].shape[1:]))[
                turn * rows : (turn + 1) * rows]) for each in batch}  # fmt: skip
            with ReplayedDraws([torch.tensor(each) for each in source.batch(step, part).values()]):
                value = net(**fed) if loss is None else loss(net, fed)
            (value / 2).backward()
            losses.append(float(value.detach()))
        optimizer.step()
        assert ran.losses[step] == pytest.approx(np.mean(losses), rel=1e-4), step


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("outputs", [False, True])
def test_random_nodes_with_outputs_are_sharded(name, outputs, tmp_path, capsys):
    """The roles of the file are those of its own graph: its draws are no inputs."""
    factory = MODELS[name][0]
    outputs = outputs and factory is not denoiser  # which returns the loss alone
    found = export(factory, tmp_path / "step.onnx", options=ExportOptions(draws=Draws.NODES, outputs=outputs))
    assert not found.draws and not any(each.startswith("draw_") for each in found.inputs)
    assert main(["shard", found.model, "--ranks", "2", "-o", str(tmp_path / "ranks")]) == 0, capsys.readouterr().err
    result = gopt.verify(tmp_path / "ranks")
    assert result.equal, result.to_json()


def test_inspect_shows_draws(tmp_path, capsys):
    export(denoiser, tmp_path / "step.onnx")
    assert main(["inspect", str(tmp_path / "step.onnx")]) == 0
    assert "draw_1 from integers [10, 2000)" in " ".join(capsys.readouterr().out.split())
    assert main(["inspect", str(tmp_path / "step.onnx"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["draws"]["draw_1"] == {"distribution": "integers", "low": 10, "high": NOISE_LEVELS}
    assert {each["name"]: each["dtype"] for each in shown["batch"]}["draw_1"] == "int64"


def test_permutations_hold_for_any_size_and_other_bounds_of_it_are_refused(tmp_path):
    options = ExportOptions(dynamic=Dynamic.BATCH)
    found = export(mixed, tmp_path / "step.onnx", options=options)
    assert found.draws["draw_0"] == PERMUTATION

    def loss(module, batch):
        return module(batch["x"][torch.randint(0, len(batch["x"]), (len(batch["x"]),))]).square().mean()

    def sized():
        net = torch.nn.Linear(6, 3)
        return net, loss, torch.optim.SGD(net.parameters(), 0.1), {"x": torch.randn(5, 6)}

    with pytest.raises(UnsupportedError, match="draw_0 is drawn from integers"):
        export(sized, tmp_path / "sized.onnx", options=options)
    assert export(sized, tmp_path / "fixed.onnx").draws == {"draw_0": Draw(Distribution.INTEGERS, low=0, high=5)}
    assert onnx.load(tmp_path / "fixed.onnx").graph.input[1].type.tensor_type.elem_type == onnx.TensorProto.INT64


OWN = random.Random(4)


@pytest.mark.parametrize(
    "draw", [lambda: np.random.default_rng().random(), lambda: OWN.random()], ids=["NumPy", "Python"]
)
def test_numbers_of_a_generator_of_its_own_are_no_constants(draw, tmp_path):
    class Noisy(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * (0.5 + draw())

    def make():
        net = Noisy(4, 3)
        batch = torch.randn(8, 4), torch.randint(0, 3, (8,))
        return net, torch.nn.functional.cross_entropy, torch.optim.SGD(net.parameters(), 0.1), batch

    with pytest.raises(UnsupportedError, match="another one when it runs again") as caught:
        export(make, tmp_path / "step.onnx")
    assert "put them into the batch" in caught.value.hints[0]
