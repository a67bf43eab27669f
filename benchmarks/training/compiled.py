"""The network of mlp.py under torch.compile."""

from step_log import StepLog

log = StepLog()

import torch
from torch import nn

torch.manual_seed(0)
model = torch.compile(nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images, labels = torch.rand(32, 784), torch.randint(10, (32,))
for _ in range(log.n_steps):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    log.end_step()
log.save()
