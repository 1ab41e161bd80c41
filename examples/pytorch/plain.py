"""A plain training script, without a factory: gopt export finds model, optimizer, criterion and train_loader."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

random = torch.Generator().manual_seed(0)
inputs = torch.randn(256, 12, generator=random)
targets = (inputs @ torch.randn(12, 3, generator=random)).argmax(1)
train_loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)

model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def train(epochs=2):
    for _ in range(epochs):
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(train())
