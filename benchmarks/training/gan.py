"""A generator and a discriminator, each with its Adam, in turn."""

from step_log import StepLog

log = StepLog()

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 256), nn.Tanh())
discriminator = nn.Sequential(nn.Linear(256, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4)
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4)
loss, real = nn.BCEWithLogitsLoss(), torch.rand(64, 256)
ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
for _ in range(log.n_steps):
    made = generator(torch.randn(64, 16))
    of_discriminator.zero_grad()
    (loss(discriminator(real), ones) + loss(discriminator(made.detach()), zeros)).backward()
    of_discriminator.step()
    of_generator.zero_grad()
    loss(discriminator(made), ones).backward()
    of_generator.step()
    log.end_step()
log.save()
