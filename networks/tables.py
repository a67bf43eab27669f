"""Networks that read vectors and tables: a variational autoencoder, a recommender with embedding
tables.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Vae(nn.Module):
    """A variational autoencoder of MLPs (Kingma, Welling 2014): (batch, features) ->
    reconstruction, mean and log variance.
    """

    def __init__(self, features: int = 784, hidden: int = 400, latent: int = 20) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent)
        )
        self.decode = nn.Sequential(
            nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, features), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One sample from the latent distribution, decoded."""
        mean, log_variance = self.encode(x).chunk(2, -1)
        latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decode(latent), mean, log_variance


class Recommender(nn.Module):
    """Embedding tables and an MLP over their products with the dense part (as DLRM, Naumov et al.
    2019): (batch, dense), (batch, tables) -> (batch, 1).
    """

    def __init__(
        self, dense: int = 13, n_tables: int = 6, rows: int = 10_000, width: int = 32
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(n_tables))
        self.bottom = nn.Sequential(
            nn.Linear(dense, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU()
        )
        self.top = nn.Sequential(
            nn.Linear((n_tables + 1) ** 2 + width, 256),
            nn.ReLU(),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Linear(128, 1),
        )

    def forward(self, dense: Tensor, chosen: Tensor) -> Tensor:
        """How likely a click is, a logit."""
        bottom = self.bottom(dense)
        vectors = torch.stack(
            (bottom, *(table(chosen[:, index]) for index, table in enumerate(self.tables))), 1
        )
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat((bottom, products), 1))  # type: ignore[no-any-return]
