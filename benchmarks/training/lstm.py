"""A language model of two LSTM layers on generated words, its parameters updated by hand."""

from step_log import StepLog

log = StepLog()

import torch
from torch import nn

torch.manual_seed(0)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.lstm = nn.LSTM(64, 64, num_layers=2)
        self.words = nn.Linear(64, 1000)

    def forward(self, words, state):
        output, state = self.lstm(self.embedding(words), state)
        return self.words(output), state


model = LanguageModel()
text = torch.randint(1000, (36, 16))
state = torch.zeros(2, 16, 64), torch.zeros(2, 16, 64)
for _ in range(log.n_steps):
    model.zero_grad()
    output, state = model(text[:-1], tuple(part.detach() for part in state))
    nn.functional.cross_entropy(output.flatten(0, 1), text[1:].flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=-0.1)
    log.end_step()
log.save()
