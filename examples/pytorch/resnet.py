"""A residual network with BatchNorm, groups with and without weight decay, label smoothing and a cosine schedule."""

import torch
from torch import nn
from torch.nn import functional as F

SIDE, CLASSES = 8, 4


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.short = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.short(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(Block(8, 8), Block(8, 16, 2))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.layers(self.stem(x))
        logits = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def make():
    model = ResNet()
    decay = [each for each in model.parameters() if each.ndim > 1]
    rest = [each for each in model.parameters() if each.ndim == 1]
    groups = [{"params": decay, "weight_decay": 5e-4}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    batch = (torch.randn(8, 3, SIDE, SIDE), torch.randint(0, CLASSES, (8,)))
    return model, nn.CrossEntropyLoss(label_smoothing=0.1), optimizer, batch, scheduler
