"""A language model of two LSTM layers with dropout between them, gradients clipped by their norm (--clip-norm)."""

import torch
from torch import nn
from torch.nn import functional as F

LETTERS, WIDTH, LENGTH = 20, 12, 6


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, letters):
        hidden, _ = self.lstm(self.embedding(letters))
        logits = self.head(hidden)
        return logits


def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def make():
    model = LanguageModel()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3, momentum=0.5)
    text = torch.randint(0, LETTERS, (4, LENGTH + 1))
    return model, loss, optimizer, (text[:, :-1], text[:, 1:])
