"""CTC loss, which has no ONNX form: its sums over alignments, step by step in time, as ATen operators.

A state is a label, or a blank before, between or behind labels. ``alphas`` sum the alignments that lead to a state,
``betas`` the alignments from the state to an end, both as logarithms. The gradient is PyTorch's: a log-softmax's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

LOW = -1e30
"""The logarithm of next to nothing: differences of infinities are no numbers."""


@dataclass(frozen=True, slots=True)
class _Lattice:
    """The states of some targets, [N, L]. ``emitted``: log-probabilities of their labels, [T, N, L]; ``jumps``: whether
    a state may follow the one two before; ``ends``: 0 where an alignment may end, else ``LOW``; ``times``, ``sizes``:
    lengths of inputs and targets."""

    states: Any
    emitted: Any
    jumps: Any
    ends: Any
    times: Any
    sizes: Any

    @classmethod
    def of(cls, log_probs: Any, targets: Any, times: Any, sizes: Any, blank: int) -> _Lattice:
        device = log_probs.device
        times, sizes = (torch.as_tensor(each, device=device).to(torch.long) for each in (times, sizes))
        joined = targets.dim() == 1
        if joined:  # one behind the other; more labels than steps in time have no alignment
            most = min(targets.shape[0], log_probs.shape[0])
            places = (sizes.cumsum(0) - sizes).unsqueeze(1) + torch.arange(most, device=device)
            targets = targets[places.clamp(max=targets.shape[0] - 1)]
        labels = targets.to(torch.long).clamp(0, log_probs.shape[2] - 1)  # what pads them may be anything
        blanks = torch.full_like(labels, blank)
        last = torch.full_like(sizes.unsqueeze(1), blank)
        states = torch.cat([torch.stack([blanks, labels], 2).flatten(1), last], 1)
        emitted = log_probs.gather(2, states.expand(log_probs.shape[0], *states.shape)).clamp(min=LOW)
        none = torch.zeros_like(last, dtype=torch.bool)
        jumps = torch.cat([none, none, states[:, 2:] != states[:, :-2]], 1)[:, : states.shape[1]]
        most = labels.shape[1] + 1
        behind = 2 * torch.arange(most + 1, device=device).unsqueeze(1) - torch.arange(states.shape[1], device=device)
        ends = _where(((behind == 0) | (behind == 1)).narrow(0, 0, most + joined), emitted)
        return cls(
            states, emitted, jumps, ends.index_select(0, sizes.clamp(max=most) if joined else sizes), times, sizes
        )

    def alphas(self) -> Any:
        """Of every step in time, [T, N, L]."""
        places = torch.arange(self.states.shape[1], device=self.states.device)
        ways = self._ways(-1, self.jumps)
        made = [_where(places < 2, self.emitted) + self.emitted[0]]
        for own in self.emitted[1:]:
            made.append(_led(made[-1], *ways) + own)
        return torch.stack(made)

    def betas(self) -> Any:
        """Of every step in time, [T, N, L]."""
        none = torch.zeros_like(self.jumps[:, :2])
        ways = self._ways(1, torch.cat([self.jumps, none], 1)[:, 2:])
        made = [torch.full_like(self.ends, LOW)]
        count = self.emitted.shape[0]
        last = self.times.unsqueeze(1) == torch.arange(1, count + 1, device=self.times.device).reshape(-1, 1, 1)
        for time in range(count - 1, -1, -1):
            made.append(torch.where(last[time], self.ends, _led(made[-1], *ways)) + self.emitted[time])
        return torch.stack(made[:0:-1])

    def _ways(self, step: int, jumps: Any) -> tuple[Any, Any]:
        """The places that are next to a state in a direction, [3 L], and ``LOW`` where none leads there, [N, 3, L]."""
        count = self.states.shape[1]
        places = torch.arange(count, device=self.states.device)
        moved = torch.stack([places + step * each for each in range(3)])
        there = ((moved >= 0) & (moved < count)).expand(jumps.shape[0], 3, count)
        allowed = torch.stack([torch.ones_like(jumps), torch.ones_like(jumps), jumps], 1)
        return moved.clamp(0, count - 1).flatten(), _where(there & allowed, self.emitted)


def _where(allowed: Any, like: Any) -> Any:
    """0 where something is allowed, else ``LOW``."""
    return torch.where(allowed, 0.0, LOW).to(like.dtype)


def _led(sums: Any, places: Any, ways: Any) -> Any:
    """The logarithms of the sums over what is next to each state."""
    return _log_sum(sums.index_select(1, places).reshape(ways.shape) + ways, 1)


def _log_sum(values: Any, axis: int) -> Any:
    most = values.amax(axis, keepdim=True)
    return (values - most).exp().sum(axis).log() + most.squeeze(axis)


def ctc_loss(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0, zero_infinity: bool = False
) -> tuple[Any, Any]:
    """The loss of each sample, infinite where it has no alignment, and the alphas."""
    lattice = _Lattice.of(log_probs, targets, input_lengths, target_lengths, blank)
    alphas = lattice.alphas()
    last = (lattice.times.clamp(min=1) - 1).reshape(1, -1, 1).expand(1, *lattice.states.shape)
    losses = -_log_sum(alphas.gather(0, last).squeeze(0) + lattice.ends, 1)
    losses = torch.where(losses > -LOW / 2, torch.inf, losses)
    empty = torch.where(lattice.sizes == 0, 0.0, torch.inf).to(losses.dtype)
    return torch.where(lattice.times == 0, empty, losses), alphas


def ctc_loss_backward(
    grad: Any, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, losses: Any, alphas: Any,
    blank: int, zero_infinity: bool = False,
) -> Any:  # fmt: skip
    """The gradient of log-probabilities, [T, N, C], where they are a log-softmax."""
    lattice = _Lattice.of(log_probs, targets, input_lengths, target_lengths, blank)
    lost = losses == torch.inf
    known = torch.where(lost, 0.0, losses) if zero_infinity else losses
    shares = (alphas + lattice.betas() - lattice.emitted + known.reshape(1, -1, 1)).exp()
    classes = torch.arange(log_probs.shape[2], device=log_probs.device)
    of_class = (lattice.states.unsqueeze(2) == classes).to(log_probs.dtype)
    made = (log_probs.exp() - shares.transpose(0, 1).bmm(of_class).transpose(0, 1)) * grad.reshape(1, -1, 1)
    steps = torch.arange(log_probs.shape[0], device=log_probs.device).reshape(-1, 1, 1)
    read = steps < lattice.times.reshape(1, -1, 1)
    return torch.where(read & ~lost.reshape(1, -1, 1) if zero_infinity else read, made, 0.0)


CTC = {
    overload: form
    for operator, form in (
        (torch.ops.aten._ctc_loss, ctc_loss), (torch.ops.aten._ctc_loss_backward, ctc_loss_backward),
    )
    for overload in (operator.default, operator.Tensor)
}  # fmt: skip
"""Operators, and the functions that take their places in a trace."""
