"""The end-to-end example: what it compares with eager PyTorch, and what it says of weights that no loss determines.
By hand, ``pytest -m torch tests/examples``, where torch and transformers are installed."""

from __future__ import annotations

import re

import pytest
from helpers import script_of

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

STEPS = 4


@pytest.fixture(scope="module")
def example():
    return script_of("examples/end_to_end.py")


def test_losses_weights_and_logits_are_those_of_eager_pytorch(example, tmp_path, capsys, monkeypatch):
    """A comparison with training of another rate fails in every part."""
    found = example.run(tmp_path / "same", STEPS)
    assert {"loss", "weights that the loss determines", "logits of the trained module"} < set(found)
    assert max(found.values()) <= example.ROUNDING, found
    lines = [each for each in capsys.readouterr().out.splitlines() if "not determined" in each]
    assert [re.search(r"h\.\d\.attn\.c_attn\.bias, 32 of 96 elements", each) is not None for each in lines] == [
        True
    ] * 2

    eager = example.eager

    def other_rate(words, steps, dtype=torch.float32):
        monkeypatch.setattr(example, "RATE", 2.9e-3)
        return eager(words, steps, dtype)

    monkeypatch.setattr(example, "eager", other_rate)
    found = example.run(tmp_path / "other", STEPS)
    assert min(found.values()) > example.ROUNDING, found


def test_the_bias_of_a_key_has_no_gradient_and_adam_follows_rounding(example, monkeypatch):
    """Two runs of eager PyTorch, one with weights that differ in the last place, part in that bias alone; with an
    epsilon above the rounding they do not part."""
    words = example.sentences(STEPS * example.RANKS * example.BATCH)
    adamw, model = torch.optim.AdamW, example.model

    def disturbed():
        net, generator = model(), torch.Generator().manual_seed(1)
        with torch.no_grad():
            for each in net.parameters():
                each.mul_(1 + 2.0**-23 * torch.randn(each.shape, generator=generator))
        return net

    def keys(net):
        return torch.cat([net.get_parameter(f"transformer.h.{i}.attn.c_attn.bias")[32:64] for i in (0, 1)]).detach()

    def both():
        _, one, gradients = example.eager(words, STEPS)
        with monkeypatch.context() as patch:
            patch.setattr(example, "model", disturbed)
            _, two, _ = example.eager(words, STEPS)
        *_, exact = example.eager(words, STEPS, torch.float64)
        return one, two, gradients, exact

    one, two, gradients, exact = both()
    assert float((keys(one) - keys(two)).abs().max()) > 1e-6, "Adam makes steps of rounding"
    named = dict(two.named_parameters())
    theirs = {name: each.detach() for name, each in one.named_parameters()}
    mine = {name: each.detach() for name, each in named.items()}
    assert example.weights(mine, theirs, gradients, exact) < example.ROUNDING
    bias = "transformer.h.0.attn.c_attn.bias"
    assert float(exact[bias][32:64].max()) < 1e-16 < 1e-12 < float(gradients[bias][32:64].max()) < 1e-8
    monkeypatch.setattr(torch.optim, "AdamW", lambda given, rate: adamw(given, rate, eps=1e-4))
    one, two, *_ = both()
    assert float((keys(one) - keys(two)).abs().max()) < 1e-7
