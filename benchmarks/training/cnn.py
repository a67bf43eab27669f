"""LeNet-5's layers on generated digits, a shuffling loader, Adam, epochs of 100 batches."""

from step_log import StepLog

log = StepLog()

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 6, 5, padding=2),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(6, 16, 5),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(400, 120),
    nn.ReLU(),
    nn.Linear(120, 84),
    nn.ReLU(),
    nn.Linear(84, 10),
)
digits = TensorDataset(torch.rand(3200, 1, 28, 28), torch.randint(10, (3200,)))
loader = DataLoader(digits, batch_size=32, shuffle=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(log.n_steps // len(loader)):
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        log.end_step()
log.save()
