"""A transformers model through gopt and back: ``python examples/end_to_end.py``.

Random weights -> gopt export -> shard for two ranks -> verify -> train -> merge -> PyTorch again. Eager PyTorch trains
the same model on the same samples beside it; the exit code is 1 where losses, weights or logits differ by more than
rounding. Needs ``pip install '.[torch]' transformers safetensors``.

The bias of the attention's key is compared with nothing: it adds the same number to all scores of a query, which
softmax does not see, so that its exact gradient is zero. What float32 computes is rounding, and Adam divides it by
itself. The gradient in float64 shows it: such elements are printed with it, and all others are compared.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

import gopt
from gopt.frontends.pytorch.options import ExportOptions
from gopt.offline.inference.write import merge_inference
from gopt.offline.state_values import save_state_dict

RANKS, BATCH, TOKENS, WORDS, RATE = 2, 4, 12, 64, 3e-3
ROUNDING = 2e-5
"""Of a loss, and of weights and logits as a share of their norm: float32 sums in another order, over all steps."""
NO_GRADIENT = 1e-13
"""A gradient in float64 that is zero but for its rounding, beside others of 1e-4 and above."""


def model():
    """A GPT-2 of two layers with random weights, always the same ones."""
    torch.manual_seed(0)
    size = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": WORDS, "n_positions": TOKENS}
    plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**size, **plain, **ends, attn_implementation="eager"))


def make():
    """What ``gopt export examples/end_to_end.py:make`` takes."""
    net = model()
    words = torch.randint(0, WORDS, (BATCH, TOKENS))
    return net, None, torch.optim.AdamW(net.parameters(), RATE), {"input_ids": words, "labels": words.clone()}


def sentences(count):
    """Sequences to learn: each word is the one before plus a step of its sentence."""
    random = np.random.default_rng(0)
    start, step = random.integers(0, WORDS, (count, 1)), random.integers(1, 4, (count, 1))
    return (start + step * np.arange(TOKENS)) % WORDS


def eager(words, steps, dtype=torch.float32):
    """The same training in PyTorch alone, all ranks' samples in one batch.

    Returns losses, the module, and by weight the largest gradient that each element had.
    """
    net, losses = model().to(dtype), []
    optimizer = torch.optim.AdamW(net.parameters(), RATE)
    largest = {name: torch.zeros_like(each) for name, each in net.named_parameters()}
    for batch in torch.from_numpy(words).split(RANKS * BATCH)[:steps]:
        loss = net(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        for name, each in net.named_parameters():
            largest[name] = torch.maximum(largest[name], each.grad.abs())
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, net, largest


def weights(mine, theirs, gradients, exact):
    """The largest difference of a weight as a share of its norm, over elements that the loss determines.

    ``exact``: the largest gradient of each element in float64. Prints the names of weights with others.
    """
    worst = 0.0
    for name, value in theirs.items():
        free = (exact[name] < NO_GRADIENT) & (gradients[name] > 0)
        if free.any():
            noise, zero = float(gradients[name][free].max()), float(exact[name][free].max())
            print(
                f"  not determined: {name}, {int(free.sum())} of {free.numel()} elements: the largest gradient is "
                f"{noise:.0e} in float32, {zero:.0e} in float64"
            )
        if not free.all():
            worst = max(worst, share(mine[name][~free], value[~free]))
    return worst


def share(mine, other):
    """The norm of a difference as a share of the norm."""
    return float(torch.linalg.vector_norm(mine - other) / torch.linalg.vector_norm(other))


def run(folder, steps):
    """All steps; the largest differences from eager PyTorch by what they are of."""
    print("export: module, loss, backward and AdamW as one ONNX file, compared with eager PyTorch")
    exported = gopt.export(make, folder / "step.onnx", options=ExportOptions(outputs=True))
    print(f"  {exported.nodes} nodes, {exported.parameters} parameters, {exported.states} states")
    print(f"shard: {RANKS} ranks, and verify")
    gopt.shard(folder / "step.onnx", RANKS).write(folder / "ranks")
    assert gopt.verify(folder / "ranks").equal
    words = sentences(steps * RANKS * BATCH)
    print(f"train: {steps} steps")
    data = {"input_ids": words, "labels": words}
    trained = gopt.run(folder / "ranks", data, steps, settings={"lr": RATE}, checkpoint=folder / "ckpt")
    losses, other, gradients = eager(words, steps)
    for step in sorted({0, steps // 2, steps - 1}):
        print(f"  step {step + 1}: loss {trained.losses[step]:.6f}, eager PyTorch {losses[step]:.6f}")
    print("merge: into PyTorch again, and into a model for inference")
    save_state_dict(trained.path, folder / "trained.safetensors")
    net = model()
    left = net.load_state_dict(load_file(folder / "trained.safetensors"), strict=False)
    assert not left.unexpected_keys and set(left.missing_keys) <= {"lm_head.weight"}, left  # which is tied
    merge_inference(trained.path, folder / "model.onnx")
    probe = torch.from_numpy(words[:BATCH])
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    answers = dict(zip(names, session.run(None, {"input_ids": probe.numpy()})))
    with torch.no_grad():
        expected = net.eval()(input_ids=probe).logits
        theirs = other.eval()(input_ids=probe).logits
    mine, expected_weights = ({name: each.detach() for name, each in one.named_parameters()} for one in (net, other))
    *_, exact = eager(words, steps, torch.float64)
    return {
        "loss": max(abs(a - b) for a, b in zip(trained.losses, losses)),
        "weights that the loss determines": weights(mine, expected_weights, gradients, exact),
        "logits of the trained module": share(expected, theirs),
        "logits of the model for inference": share(torch.from_numpy(answers["logits"]), theirs),
    }


def main():
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--steps", type=int, default=60)
    steps = reader.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), steps)
    for name, value in found.items():
        print(f"{name}: {value:.1e} from eager PyTorch{'' if value <= ROUNDING else ', MORE THAN ROUNDING'}")
    return int(any(not value <= ROUNDING for value in found.values()))


if __name__ == "__main__":
    sys.exit(main())
