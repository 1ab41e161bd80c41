"""Layers of RNN, GRU and LSTM with the dropout.

The Python form of them in PyTorch 2.13, which a trace runs, leaves the dropout between layers out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._decomp import decompositions as of_torch


def _layers(
    x: Any, hidden: Any, params: Any, has_biases: Any, num_layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool, layer: Any,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """The output of the last layer, and the last hidden state of each layer and direction."""
    x = x.transpose(0, 1) if batch_first else x
    last: list[Any] = []
    for number in range(num_layers):
        parameters, start, own_back, start_back = of_torch.params_hiddens(params, hidden, number, bidirectional)
        if number and dropout and train:
            x = torch.dropout(x, dropout, train=True)
        forth, end = layer(x, start, parameters, has_biases)
        last.append(end)
        if bidirectional:
            back, end = layer(x, start_back, own_back, has_biases, reverse=True)
            last.append(end)
            forth = torch.cat([forth, back], forth.dim() - 1)
        x = forth
    return x.transpose(0, 1) if batch_first else x, last


@contextlib.contextmanager
def dropout_between_layers() -> Iterator[None]:
    """Put the form above in the place of PyTorch's."""
    with mock.patch.object(of_torch, "_rnn_helper", _layers):
        yield
