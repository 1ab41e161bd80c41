"""A classifier in the style of transformers: a batch of keywords, a dataclass with loss, logits and hidden states."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

WORDS, LENGTH, WIDTH, LABELS = 40, 6, 16, 3


@dataclass
class Output:
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.positions = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Embedding(LENGTH, WIDTH)
        self.layer = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True, norm_first=True) for _ in range(2)]
        )
        self.register_buffer("position_ids", torch.arange(LENGTH)[None])

    def forward(self, input_ids, attention_mask):
        states = [self.embeddings(input_ids) + self.positions(self.position_ids)]
        for layer in self.layer:
            states.append(layer(states[-1], src_key_padding_mask=attention_mask == 0))
        return tuple(states)


class ForSequenceClassification(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.dropout, self.classifier = Encoder(), nn.Dropout(0.1), nn.Linear(WIDTH, LABELS)

    def forward(self, input_ids=None, attention_mask=None, labels=None, return_dict=True):
        states = self.encoder(input_ids, attention_mask)
        logits = self.classifier(self.dropout(states[-1][:, 0]))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return Output(loss, logits, states) if return_dict else (loss, logits)


def make():
    model = ForSequenceClassification()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    lengths = torch.tensor([6, 4, 5, 3])
    mask = (torch.arange(LENGTH)[None] < lengths[:, None]).long()
    batch = {
        "input_ids": torch.randint(1, WORDS, (4, LENGTH)) * mask, "attention_mask": mask,
        "labels": torch.randint(0, LABELS, (4,)), "return_dict": True,
    }  # fmt: skip
    return model, None, optimizer, batch
