"""Export the examples' training steps: `python examples/steps/build.py [NAME ...]` (both of them without names).

What turns a PyTorch network into a functional step (tracing, update rules, the comparison with eager PyTorch) is
shared with the test fixtures. Here the files hold no values, and have a metric beside the loss: `logits`, from which
a trained model answers. Needs torch 2.13, onnx, onnxscript and onnxruntime; training with the files needs none of it.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "fixtures"))

import onnx  # noqa: E402
import optimizers as opt  # noqa: E402
from export import check_form, compare, export  # noqa: E402
from training import Recipe, Training  # noqa: E402

BATCH = 8  # of one rank and micro-step
VOCAB, TOKENS, WIDTH, LAYERS, HEADS = 96, 64, 64, 2, 4


class Block(nn.Module):
    """A pre-norm transformer block with causal attention, without biases."""

    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def attention(self, x):
        b, t, d = x.shape
        # one matrix each: the gradient of a slice of a joint one would store zeros of its whole size in the file
        q, k, v = (f(x).reshape(b, t, HEADS, d // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        mask = torch.ones(t, t, dtype=torch.bool).tril()
        scores = (q @ k.transpose(-2, -1)) * (d // HEADS) ** -0.5
        weights = F.softmax(scores.masked_fill(~mask, -1e9), -1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, d))

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Gpt(nn.Module):
    """Characters in, logits of the next ones out; the output projection is the token embedding."""

    def __init__(self, amp):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        for emb in (self.wte, self.wpe):
            nn.init.normal_(emb.weight, std=0.2)

    def forward(self, x):
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return F.linear(self.ln_f(h), self.wte.weight)

    @staticmethod
    def batch(gen):
        ids = torch.randint(0, VOCAB, (BATCH, TOKENS + 1), generator=gen)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Cnn(nn.Module):
    """Two convolutions with a max pool between them, and a linear head, on 1x8x8 images.

    No BatchNorm: its running statistics follow how a batch is divided, and with them the accuracy would.
    """

    def __init__(self, amp):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        return self.fc(F.relu(self.conv2(x)).flatten(1))

    @staticmethod
    def batch(gen):
        return torch.rand(BATCH, 1, 8, 8, generator=gen), torch.randint(0, 10, (BATCH,), generator=gen)


RECIPES = [
    Recipe("gpt", "AdamW, global-norm clip, tied embedding", Gpt, opt.AdamW(), clip=True, values="absent"),
    Recipe("digits", "SGD with momentum, convolutions", Cnn, opt.Momentum(), values="absent"),
]


def add_logits(model):
    """Make what the loss takes the logarithmic softmax of a second output, `logits` (batch rows by classes)."""
    graph = model.graph
    (softmax,) = (node for node in graph.node if node.op_type == "LogSoftmax")
    old = softmax.input[0]
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = ["logits" if name == old else name for name in names]
    (info,) = (each for each in graph.value_info if each.name == old)
    info.name = "logits"
    graph.output.insert(1, info)
    graph.value_info.remove(info)
    onnx.checker.check_model(model, full_check=True)


def build(recipe):
    """Export, compare with PyTorch, write; prints what was seen."""
    training = Training(recipe)
    model = export(training)
    check_form(model, training)
    path = HERE / f"{recipe.name}.onnx"
    path.write_bytes(model.SerializeToString(deterministic=True))
    worst = compare(model, str(path), training, values_in_file=False)
    add_logits(model)
    path.write_bytes(model.SerializeToString(deterministic=True))
    size = path.stat().st_size / 1024
    parameters = sum(training.state[name].numel() for name in training.params)
    print(f"{path.name}: {len(model.graph.node)} nodes, {parameters} parameters, {size:.0f} KB; after 3 steps beside "
          f"PyTorch: loss within {worst['loss']:.1e}, a state's change within {worst['change']:.1e}")  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in RECIPES:
        if each.name in (sys.argv[1:] or [recipe.name for recipe in RECIPES]):
            build(each)
