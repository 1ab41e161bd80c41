"""From a training script to a trained module: exported, sharded, verified, trained on 4 ranks, merged, loaded strictly.

python examples/pytorch/run.py resnet nanogpt
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

import gopt
from gopt.frontends.pytorch.factory import Recipe, call_factory, load_factory
from gopt.frontends.pytorch.options import ExportOptions
from gopt.offline.inference.write import merge_inference

HERE = Path(__file__).parent
OPTIONS = {
    "resnet": ExportOptions(outputs=True), "nanogpt": ExportOptions(), "autocast": ExportOptions(),
    "huggingface": ExportOptions(outputs=True, outputs_of=("encoder.layer.0",)), "lora": ExportOptions(),
    "lstm": ExportOptions(clip_norm=1.0), "diffusion": ExportOptions(ema=0.9), "plain": ExportOptions(),
}  # fmt: skip
"""Script -> the options of its export."""
RANKS, STEPS, STAGE = 4, 3, 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """The way of one script. ``difference``: the largest between the loaded module in PyTorch and the merged model for
    inference, as a share of the largest value; ``inputs``, ``outputs``: of that model."""

    losses: tuple[float, ...]
    equal: bool
    difference: float
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    saved: Mapping[str, Any]


def recipe_of(name: str, seed: int = 0) -> Recipe:
    """The recipe that ``gopt export NAME.py`` traces."""
    torch.manual_seed(seed)
    return call_factory(load_factory(str(HERE / f"{name}.py")), name)


def samples(name: str, batches: int) -> dict[str, np.ndarray]:
    """Rows for a number of batches: the example batches of as many calls of the factory."""
    found = [recipe_of(name, seed).batch for seed in range(batches)]
    return {each: np.concatenate([batch[each].numpy() for batch in found]) for each in found[0]}


def bring_through(name: str, folder: Path, check: int = 2) -> Outcome:
    """Take a script all the way; raises GoptError and RuntimeError where a part refuses."""
    script, step, ranks = HERE / f"{name}.py", folder / "step.onnx", folder / "step.ranks"
    gopt.export(str(script), step, options=replace(OPTIONS[name], check=check))
    gopt.shard(step, RANKS, stage=STAGE).write(ranks)
    verified = gopt.verify(ranks)
    data = samples(name, RANKS * STEPS)
    trained = gopt.run(ranks, data, STEPS, checkpoint=folder / "checkpoints")
    saved = gopt.save_state_dict(trained, folder / "trained.pt", all_states=True)
    model = merge_inference(trained.path, folder / "model.onnx")

    fresh = recipe_of(name, seed=1)  # other first values
    content = torch.load(saved.file, weights_only=True)
    fresh.module.load_state_dict(content["model"], strict=True)
    for optimizer in fresh.optimizers:
        optimizer.load_state_dict(content["optimizer"])
    if fresh.scheduler is not None:
        fresh.scheduler.load_state_dict(content["scheduler"])
    difference = _difference(fresh, folder / "model.onnx")
    losses = tuple(float(each.loss) for each in trained.steps)
    return Outcome(losses, verified.equal, difference, model.inputs, model.outputs, content)


def _difference(recipe: Recipe, model: Path) -> float:
    """Hold a module in evaluation mode against a model, on inputs of the example batch, or on random ones."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(2)
    feeds = {}
    for each in session.get_inputs():
        given = recipe.batch.get(each.name)
        if given is None:
            integers = "int" in each.type
            made = torch.randint(0, 8, each.shape, generator=generator)
            given = made if integers else torch.randn(each.shape, generator=generator)
        feeds[each.name] = given
    found = session.run(None, {name: value.numpy() for name, value in feeds.items()})
    with torch.no_grad():
        wanted = list(_tensors(recipe.module.eval()(**feeds)))
    if len(wanted) > len(found):
        raise RuntimeError(f"the module returns {len(wanted)} tensors, the model {len(found)}")
    return max(float(np.abs(a - b.numpy()).max() / max(np.abs(a).max(), 1e-9)) for a, b in zip(found, wanted))


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    """The tensors of what a module returns, in order."""
    if isinstance(result, torch.Tensor):
        yield result
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        for field in dataclasses.fields(result):
            yield from _tensors(getattr(result, field.name))
    elif isinstance(result, Mapping):
        for each in result.values():
            yield from _tensors(each)
    elif isinstance(result, Sequence):
        for each in result:
            yield from _tensors(each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*OPTIONS, []], metavar="NAME", help=", ".join(OPTIONS))
    for name in parser.parse_args().names or OPTIONS:
        with tempfile.TemporaryDirectory() as folder:
            start = time.monotonic()
            found = bring_through(name, Path(folder))
        losses = " ".join(f"{each:.4f}" for each in found.losses)
        print(
            f"{name}: {'equal' if found.equal else 'NOT EQUAL'} to one process, loss {losses}, loaded strictly; "
            f"{', '.join(found.inputs)} -> {', '.join(found.outputs)} within {found.difference:.1e} of PyTorch "
            f"({time.monotonic() - start:.0f} s)"
        )


if __name__ == "__main__":
    main()
