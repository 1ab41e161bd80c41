"""CTC loss in steps of ATen operators, beside PyTorch's own. By hand, ``pytest -m torch``."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import gopt  # noqa: E402
from gopt.frontends.pytorch.ctc import ctc_loss, ctc_loss_backward  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.verification.sampling import integer_ranges  # noqa: E402

aten = torch.ops.aten


def drawn(most: int) -> int:
    return int(torch.randint(1, most, ()))


@pytest.mark.parametrize("joined", [False, True], ids=["a row each", "one behind the other"])
@pytest.mark.parametrize("seed", range(20))
def test_losses_and_gradients_are_those_of_pytorch(seed, joined):
    torch.manual_seed(seed)
    steps, samples, classes, most = drawn(30), drawn(5), 1 + drawn(6), drawn(9)
    log_probs = (3 * torch.randn(steps, samples, classes, dtype=torch.float64)).log_softmax(2)
    times, sizes = torch.randint(1, steps + 1, (samples,)), torch.randint(1, most + 1, (samples,))
    blank, zero = drawn(classes + 1) - 1, seed % 2 == 0
    labels = torch.randint(0, classes - 1, (samples, most))
    labels += labels >= blank
    targets = torch.cat([row[:size] for row, size in zip(labels, sizes)]) if joined else labels
    lengths = times.tolist(), sizes.tolist()
    losses, alphas = aten._ctc_loss.default(log_probs, targets, *lengths, blank, zero)
    own, sums = ctc_loss(log_probs, targets, times, sizes, blank, zero)
    torch.testing.assert_close(own, losses)
    grad = torch.randn(samples, dtype=torch.float64)
    wanted = aten._ctc_loss_backward.default(grad, log_probs, targets, *lengths, losses, alphas, blank, zero)
    found = ctc_loss_backward(grad, log_probs, targets, times, sizes, own, sums, blank, zero)
    kept = torch.isfinite(losses) | zero
    torch.testing.assert_close(found[:, kept], wanted[:, kept])


def test_a_step_with_ctc_is_exported_and_sharded(tmp_path):
    """It was refused: the shape of its sums follows the longest target. Lengths that verify draws are in range."""
    torch.manual_seed(0)
    net, criterion = torch.nn.Linear(5, 4), torch.nn.CTCLoss(zero_infinity=True)

    def loss(module, batch):
        log_probs = module(batch["x"]).log_softmax(2).transpose(0, 1)
        return criterion(log_probs, batch["labels"], batch["times"], batch["sizes"])

    batch = {
        "x": torch.randn(3, 6, 5), "labels": torch.randint(1, 4, (3, 2)),
        "times": torch.tensor([6, 5, 1]), "sizes": torch.tensor([2, 1, 2]),
    }  # fmt: skip
    exported = export((net, loss, torch.optim.AdamW(net.parameters(), 1e-2), batch), tmp_path / "step.onnx")
    gopt.shard(exported.model, 2).write(tmp_path / "ranks")
    ranges = integer_ranges(gopt.load(exported.model).training)
    assert (ranges["times"].low, ranges["times"].bound, ranges["sizes"].bound) == (1, 7, 3)
    assert gopt.verify(tmp_path / "ranks", steps=1).equal


@pytest.mark.parametrize("kind", [list, tuple])
def test_lengths_as_python_numbers_are_exported(kind, tmp_path):
    """PyTorch makes tensors of them that have no memory in a trace: the step "cannot be traced"."""
    torch.manual_seed(0)
    net, criterion = torch.nn.Linear(5, 4), torch.nn.CTCLoss()

    def loss(module, batch):
        log_probs = module(batch["x"]).log_softmax(2).transpose(0, 1)
        return criterion(log_probs, batch["labels"], kind([6, 5, 4]), target_lengths=kind([2, 1, 2]))

    batch = {"x": torch.randn(3, 6, 5), "labels": torch.randint(1, 4, (3, 2))}
    exported = export((net, loss, torch.optim.SGD(net.parameters(), 1e-2), batch), tmp_path / "step.onnx")
    gopt.shard(exported.model, 1).write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks", steps=1).equal
